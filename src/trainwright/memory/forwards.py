"""Puts something around the forward of one module, in place: names, hooks and class of the module stay as they are.

What is put around is an object that calls the forward it was given. It must hold that bound method and nothing else of
the module, so that a copy of the model runs its own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

from torch import nn

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
        # Kept beside, as accelerate does: by it models/as_shipped.py knows that the mathematics are the class's own.
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
