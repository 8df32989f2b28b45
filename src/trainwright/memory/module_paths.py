"""Module paths of the memory settings, and wrappers of a module's forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

from torch import nn

from trainwright.config.problems import describe, nearest
from trainwright.errors import ConfigError
from trainwright.models.names import names_module, unmatched

_LISTS = (nn.ModuleList, nn.ModuleDict)


def by_path(label: str, given: Any, keys: Collection[str]) -> dict[str, Any]:
    """Returns the settings by module path; the path of a setting for the whole model is "".

    A mapping is one setting if it has one of the setting's `keys` (such as `layers` and `save`). The values of these
    are never mappings, so `{layers: {layers: [Block]}}` is a setting for a submodule of that name.
    """
    if not isinstance(given, Mapping):
        return {"": given}
    own = [str(key) for key, value in given.items() if key in keys and not isinstance(value, Mapping)]
    others = [str(key) for key in given if key not in own]
    if own and others:
        found = nearest(others[0], keys, cutoff=0.5)
        guess = f' Did you mean "{found}"?' if found else ""
        raise ConfigError(
            f"{label}: {others[0]} is not one of {', '.join(keys)}, and a path cannot be next to {own[0]}.{guess} "
            "Use one setting with those keys, or a mapping from paths to settings."
        )
    return {"": given} if own else {str(path): setting for path, setting in given.items()}


def parts_of(label: str, model: nn.Module, path: str, *, is_whole: bool = True) -> dict[str, nn.Module]:
    """Returns the outermost submodules that a path matches; the model itself for ""."""
    if not path:
        return {"": model}
    modules = {name: module for name, module in model.named_modules() if name}
    found = {name: module for name, module in modules.items() if names_module(path, name)}
    if not found and is_whole:
        raise ConfigError(f"{label}: {unmatched(path, modules, 'module')}")
    return dict(_outermost(found))


def layers_of(
    label: str, model: nn.Module, path: str, wanted: Iterable[str], *, is_whole: bool = True
) -> dict[str, nn.Module]:
    """Returns the layers in a submodule (its path, "" for all) that are of a class or match a glob, in order.

    A class also matches its subclasses. A list of modules, which is never called, stands for its members. For nested
    matches, the outer one is returned; a module with two paths is returned once. A class or glob that matches nothing
    raises, unless the model is not whole: a pipeline stage.
    """
    prefix = f"{path}." if path else ""
    modules = {name: module for name, module in model.named_modules() if name == path or name.startswith(prefix)}
    found: dict[str, nn.Module] = {}
    for word in wanted:
        matched = {name: module for name, module in modules.items() if _is_match(word, name, module)}
        if not matched and is_whole:
            classes = dict.fromkeys(type(module).__name__ for module in modules.values())
            names = [*classes, *(name for name in modules if name)]
            raise ConfigError(f"{label}: {unmatched(word, names, 'class or module')}")
        found |= dict(_members(matched))
    return {name: module for name, module in _outermost(found) if name in modules}


def _is_match(word: str, name: str, module: nn.Module) -> bool:
    # Not nn.Module itself, because every module derives from it.
    classes = {each.__name__ for each in type(module).__mro__ if each not in (nn.Module, object)}
    return word in classes or (bool(name) and names_module(word, name))


def _members(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, module in modules.items():
        if isinstance(module, _LISTS):
            yield from _members({f"{name}.{child}": member for child, member in module.named_children()})
        else:
            yield name, module


def _outermost(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    for name, module in modules.items():
        parts = name.split(".")
        outer = {".".join(parts[:end]) for end in range(1, len(parts))} | ({""} if name else set())
        if not outer & modules.keys() and id(module) not in seen:
            seen.add(id(module))
            yield name, module


def read_names(label: str, given: Any, *, expected: str = "a name or a list of names") -> tuple[str, ...]:
    """Returns a name or a list of names as a tuple; rejects anything else."""
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not names or not all(isinstance(each, str) and each for each in names):
        raise ConfigError(f"{label}: must be {expected}; got {describe(given)}.")
    return tuple(names)


def read_layers(
    label: str, given: Any, keys: Collection[str], *, example: str
) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Returns the layers that a setting names, and the setting as a mapping.

    A setting is a name, a list of names, or a mapping with `layers` and others of the `keys`.
    """
    settings = given if isinstance(given, Mapping) else {"layers": given}
    unknown = [key for key in settings if key not in keys]
    if unknown or "layers" not in settings:
        wrong = f"{unknown[0]} is unknown" if unknown else "layers is missing"
        raise ConfigError(f"{label}: {wrong}. Use class names or globs, or {example}.")
    return read_names(f"{label}.layers" if isinstance(given, Mapping) else label, settings["layers"]), settings


def reject_overlap(label: str, name: str, chosen: Iterable[str], *, change: str) -> None:
    """Raises if a layer contains a previously selected one, or is a part of it; `change` describes what happens to
    both."""
    for other in chosen:
        if name == other or f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
            raise ConfigError(
                f"{label}: {name or 'the model'} is already {change}, as part of {other or 'the model'}. Keep one of "
                "the two."
            )


Forward = Callable[..., Any]


class Around:
    """A wrapper of a forward, with its signature. A subclass defines `__call__`."""

    def __init__(self, forward: Forward) -> None:
        update_wrapper(self, forward)
        self.inner: Forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped forward."""
        return self.inner(*args, **kwargs)


def put_around(module: nn.Module, around: Callable[[Forward], Around]) -> None:
    """Replaces the forward of only this object."""
    forward = module.forward
    if not hasattr(module, "_original_forward"):
        # Stored as in accelerate; models/saving.py uses it to check that the forward is the class's own.
        vars(module)["_original_forward"] = forward
    module.forward = around(forward)


@contextmanager
def forwards_put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores the forwards of these modules at the end."""
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
    """Returns True if this module or a submodule has a wrapper of this kind."""
    return any(isinstance(layer, kind) for each in module.modules() for layer in arounds_of(each))


def arounds_of(module: nn.Module) -> list[Around]:
    """Returns the wrappers of this module's forward, the outermost first."""
    found, forward = [], vars(module).get("forward")
    while isinstance(forward, Around):
        found.append(forward)
        forward = forward.inner
    return found
