"""How memory settings name modules of a model, and how a module's forward is wrapped in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
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
    returned once. A class or glob that matches nothing is rejected, unless the model is not whole: a pipeline's stage.
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


Forward = Callable[..., Any]


class Around:
    """A forward around another, whose signature it shows. A subclass defines `__call__`."""

    def __init__(self, forward: Forward) -> None:
        update_wrapper(self, forward)
        self.inner: Forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward that was given."""
        return self.inner(*args, **kwargs)


def put_around(module: nn.Module, around: Callable[[Forward], Around]) -> None:
    """Replaces the forward of this object alone."""
    forward = module.forward
    if not hasattr(module, "_original_forward"):
        # Kept beside, as accelerate does: by it models/saving.py knows that the mathematics are the class's own.
        vars(module)["_original_forward"] = forward
    module.forward = around(forward)


@contextmanager
def forwards_put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Takes away again what is put around these modules within."""
    keys = ("forward", "_original_forward")
    kept = [(vars(module), {key: vars(module)[key] for key in keys if key in vars(module)}) for module in modules]
    try:
        yield
    finally:
        for own, before in kept:
            for key in keys:
                own.pop(key, None)
            own.update(before)


def has_around(module: nn.Module, kind: type[Around]) -> bool:
    """Has this module, or one inside of it, a forward of this kind around its own?"""
    return any(isinstance(layer, kind) for each in module.modules() for layer in arounds_of(each))


def arounds_of(module: nn.Module) -> list[Around]:
    """Returns what was put around this module's forward, the outermost first."""
    found, forward = [], vars(module).get("forward")
    while isinstance(forward, Around):
        found.append(forward)
        forward = forward.inner
    return found
