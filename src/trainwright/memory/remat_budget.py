"""`model.remat: {layers: [Block], budget: auto}`: which shares there are, and what each layer would hold.

The search for the largest share that fits runs real steps, and is loop/remat_fitting.py's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from trainwright.backends.private_torch import tree_leaves
from trainwright.memory.forwards import Around, Forward, forwards_put_back, put_around
from trainwright.memory.remat import AUTO, choose_layers, kind_of
from trainwright.parallel.local import local

_GRAIN = 10_000  # shares are written to a run's settings, with four digits


def has_auto(given: Any) -> bool:
    """Does a setting of `model.remat`, or of a part of the model in it, leave its budget to be found?"""
    if not isinstance(given, Mapping):
        return False
    budget = given.get("budget")
    return (isinstance(budget, str) and budget == AUTO) or any(map(has_auto, given.values()))


def with_budget(given: Any, share: float) -> Any:
    """Returns the setting with a share in the place of every `auto`; a share for all of them."""
    if not isinstance(given, Mapping):
        return given
    return {
        key: share if key == "budget" and value == AUTO else with_budget(value, share) for key, value in given.items()
    }


def only_auto(given: Any) -> Any:
    """Returns of the setting what has a budget that is to be found; None where nothing has."""
    return _part(given, wants_auto=True)


def without_auto(given: Any) -> Any:
    """Returns of the setting what is told already; None where nothing is."""
    return _part(given, wants_auto=False)


def _part(given: Any, *, wants_auto: bool) -> Any:
    if not has_auto(given):
        return None if wants_auto else given
    if given.get("budget") == AUTO:
        return given if wants_auto else None
    parts = {path: _part(setting, wants_auto=wants_auto) for path, setting in given.items()}
    return {path: setting for path, setting in parts.items() if setting is not None} or None


def shares_of(model: nn.Module, given: Any) -> list[float]:
    """Returns the shares that make a difference, ascending, from 0 (all are recomputed) to 1 (none is)."""
    layers = choose_layers(model, with_budget(given, 0.0), says=False)
    counts = Counter(kind_of(layer) for layer, _ in layers.values())
    # Rounded up, so that the share of so many layers has them all.
    shares = {math.ceil(number * _GRAIN / count) / _GRAIN for count in counts.values() for number in range(count + 1)}
    by_number = {num_recomputed(model, given, share): share for share in sorted(shares | {0.0, 1.0}, reverse=True)}
    return sorted(by_number.values())


def num_recomputed(model: nn.Module, given: Any, share: float) -> int:
    """Returns how many layers are recomputed with this share."""
    return len(choose_layers(model, with_budget(given, share), says=False))


@contextmanager
def counting_held_bytes(model: nn.Module, given: Any) -> Iterator[dict[str, int]]:
    """Gives a mapping from each layer that could be recomputed to the bytes that its forward leaves for the backward.

    It is filled when the layer is first called within. The layer then runs once more, and what it would hold is
    counted and dropped, so that counting takes the memory of one operation. Weights and inputs, which are held in any
    case, do not count.
    """
    layers = {name: layer for name, (layer, _) in choose_layers(model, with_budget(given, 0.0), says=False).items()}
    weights = frozenset(_storage(each) for each in [*model.parameters(), *model.buffers()])
    held: dict[str, int] = {}
    with forwards_put_back(layers.values()):
        for name, layer in layers.items():
            put_around(layer, partial(_Counted, note=partial(_note_largest, held, name), weights=weights))
        yield held


class _Counted(Around):
    """A forward that tells once how much it would hold."""

    def __init__(self, forward: Forward, *, note: Callable[[int], None], weights: frozenset[StorageWeakRef]) -> None:
        super().__init__(forward)
        self._note = note
        self._weights = weights
        self._has_counted = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._has_counted:
            self._has_counted = True
            inputs = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            self._note(_held_bytes(lambda: self.inner(*args, **kwargs), self._weights | inputs))
        return self.inner(*args, **kwargs)


def _note_largest(held: dict[str, int], name: str, num_bytes: int) -> None:
    held[name] = max(num_bytes, held.get(name, 0))


def _held_bytes(run: Callable[[], Any], known: frozenset[StorageWeakRef]) -> int:
    seen: set[StorageWeakRef] = set()
    total = 0

    def count(tensor: Tensor) -> None:
        nonlocal total
        storage = _storage(tensor)
        if storage not in known and storage not in seen:
            seen.add(storage)
            total += local(tensor).untyped_storage().nbytes()

    with saved_tensors_hooks(count, _refuse):
        run()
    return total


def _refuse(packed: Any) -> Tensor:
    raise AssertionError("what was counted is not there any more, and nobody asks for it")


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Returns what the storage is known by, also after it was dropped: no later one is equal to it."""
    return StorageWeakRef(local(tensor).untyped_storage())  # type: ignore[no-untyped-call]
