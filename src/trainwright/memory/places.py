"""How `model.remat`, `model.scan` and `model.offload` name places of a model, alike in all three.

A setting stands for the whole model, or, as a mapping from paths, for sub-modules: `remat: {encoder: [Layer]}`. Inside
it, layers are named by class or by glob; a glob's meaning is in models/names.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from trainwright.config.problems import nearest
from trainwright.errors import ConfigError
from trainwright.models.names import names_module, unmatched

_LISTS = (nn.ModuleList, nn.ModuleDict)


def by_path(label: str, given: Any, words: Collection[str]) -> dict[str, Any]:
    """Tells one setting from a mapping of settings by path; the path of a setting for the whole model is "".

    A mapping is one setting if it has one of the setting's `words` (such as `layers` and `save`). As none of these
    is ever a mapping itself, `{layers: {layers: [Block]}}` is a setting for a sub-module that is called so.
    """
    if not isinstance(given, Mapping):
        return {"": given}
    own = [str(key) for key, value in given.items() if key in words and not isinstance(value, Mapping)]
    others = [str(key) for key in given if key not in own]
    if own and others:
        found = nearest(others[0], words, cutoff=0.5)
        guess = f' Did you mean "{found}"?' if found else ""
        raise ConfigError(
            f"{label}: {others[0]} is none of {', '.join(words)}, and a path has no place beside {own[0]}.{guess} "
            f"Give one setting with those words, or a mapping from paths to settings."
        )
    return {"": given} if own else {str(path): setting for path, setting in given.items()}


def parts_of(label: str, model: nn.Module, path: str, *, is_whole: bool = True) -> dict[str, nn.Module]:
    """Returns the outermost sub-modules that a path names; the model itself for ""."""
    if not path:
        return {"": model}
    places = {name: module for name, module in model.named_modules() if name}
    found = {name: module for name, module in places.items() if names_module(path, name)}
    if not found and is_whole:
        raise ConfigError(f"{label}: {unmatched(path, places, 'module')}")
    return dict(_outermost(found))


def layers_of(
    label: str, model: nn.Module, part: str, wanted: Iterable[str], *, is_whole: bool = True
) -> dict[str, nn.Module]:
    """Returns the layers in a part of a model (its name, "" for all) that are of a class or match a glob, in order.

    A class also stands for those derived from it, and a list of modules, which is never called, for its members.
    Where one that is named is inside of another, the outer one is meant. A module that stands at two places is
    returned once. A class or glob that matches nothing is refused, unless the model is not whole: a pipeline's stage.
    """
    prefix = f"{part}." if part else ""
    places = {name: module for name, module in model.named_modules() if name == part or name.startswith(prefix)}
    found: dict[str, nn.Module] = {}
    for word in wanted:
        matched = {name: module for name, module in places.items() if _is_named(word, name, module)}
        if not matched and is_whole:
            classes = dict.fromkeys(type(module).__name__ for module in places.values())
            names = [*classes, *(name for name in places if name)]
            raise ConfigError(f"{label}: {unmatched(word, names, 'class or module')}")
        found |= dict(_members(matched))
    return {name: module for name, module in _outermost(found) if name in places}


def _is_named(word: str, name: str, module: nn.Module) -> bool:
    # nn.Module itself is no answer: everything derives from it.
    classes = {each.__name__ for each in type(module).__mro__ if each not in (nn.Module, object)}
    return word in classes or (bool(name) and names_module(word, name))


def _members(places: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in places.items():
        if isinstance(module, _LISTS):
            yield from _members({f"{name}.{child}": member for child, member in module.named_children()})
        else:
            yield name, module


def _outermost(places: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for name, module in places.items():
        parts = name.split(".")
        outer = {".".join(parts[:end]) for end in range(1, len(parts))} | ({""} if name else set())
        if not outer & places.keys() and id(module) not in seen:
            seen.add(id(module))
            yield name, module
