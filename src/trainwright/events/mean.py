"""`Mean`, a mean with its weight, and windows, in which values add up over puts, steps and ranks.

Means of unequal batches add up exactly. storage.py collects the values; the loop merges and summarises windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

IGNORED_LABEL = -100
"""Targets with this label are ignored: the default `ignore_index` of torch and transformers."""


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """The mean `total / count`, stored as its two parts, so that means of unequal batches add up exactly.

    A loss or a metric that is a Mean is weighted by its count: over micro-batches, ranks and the log window. A plain
    scalar is weighted by its number of samples.

    >>> Mean(6.0, 3).value
    2.0
    >>> (Mean(6.0, 3) + Mean(4.0, 1)).value
    2.5
    """

    total: torch.Tensor | float
    """A sum: a tensor (with a gradient if it is a loss) or a number."""
    count: torch.Tensor | float
    """The number of summed elements (tokens, samples): a number, or a tensor if only the device has it."""

    @property
    def value(self) -> torch.Tensor | float:
        """The mean itself. An empty one is 0, not NaN, so that a rank without samples adds nothing."""
        if isinstance(self.count, torch.Tensor):
            # Not clamped to a tiny number, which would be 0 in 16 bits.
            return self.total / torch.where(self.count == 0, 1, self.count)
        return self.total / self.count if self.count else self.total * 0.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def detach(self) -> Mean:
        """Returns a copy that keeps no graph alive and does not change when the originals do."""
        return Mean(detached_copy(self.total), detached_copy(self.count))


def is_dtensor(value: Any) -> bool:
    """Returns True for a DTensor."""
    # By attribute and not by class, because importing its module takes half as long as importing torch.
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def is_sharded(value: Any) -> bool:
    """Returns True for a DTensor if this rank has only a part of it: a shard, or a term of a sum."""
    return is_dtensor(value) and not all(each.is_replicate() for each in value.placements)


def detached_copy(value: Any) -> Any:
    """Returns a copy of a tensor that keeps no graph alive; other values unchanged. Never communicates."""
    if not isinstance(value, torch.Tensor):
        return value
    if not is_sharded(value):
        return value.detach().clone()
    # Not `clone()`, because torch would first reduce the terms of a norm, which waits for the other ranks.
    sharded: Any = value
    local = sharded.to_local().detach().clone()
    layout = {"shape": value.shape, "stride": value.stride(), "run_check": False}
    return type(sharded).from_local(local, sharded.device_mesh, sharded.placements, **layout)


Kind = Literal["mean", "total", "put", "last", "imbalance"]
"""How values of a name are combined.

mean: weighted means; total: sums over their counts; put: averaged per step, then over steps; last: the newest value;
imbalance: seconds of each rank, logged as the share of the slowest rank's time that the average rank waits.
"""


@dataclass(slots=True)
class Series:
    """The values of one name by step: [total, count]; for `last` the value, for `imbalance` a list over ranks."""

    kind: Kind
    steps: dict[int, list[Any]] = field(default_factory=dict)

    def value_at(self, step: int) -> Any:
        """Returns the value of one step; for `imbalance` the seconds of each rank."""
        total, count = self.steps[step]
        return total if self.kind in ("last", "imbalance") else _divide(total, count)

    def summary(self) -> Any:
        """Returns the value of the whole window: see `Kind`."""
        # In the order of steps, so that rounding does not depend on a checkpoint within the window.
        totals, counts = zip(*(self.steps[step] for step in sorted(self.steps)), strict=True)
        if self.kind == "last":
            return totals[-1]
        if self.kind == "imbalance":
            waited = sum(max(seconds) - sum(seconds) / len(seconds) for seconds in totals)
            return _divide(waited, sum(map(max, totals)))
        if self.kind == "put":
            return sum(map(_divide, totals, counts)) / len(totals)
        return _divide(sum(totals), sum(counts))


Window = dict[str, Series]


def add_record(window: Window, name: str, step: int, value: Any, weight: Any, kind: Kind) -> None:
    """Adds one value to a window. A name whose kind changes starts over with the new kind."""
    total = value * weight if kind == "mean" else value
    if kind == "mean":
        kind = "total"
    if kind == "total" and not weight:
        total = 0.0  # a rank without samples may have a NaN (the deviation of one sample), and 0 × NaN is NaN
    series = window.get(name)
    if series is None or series.kind != kind:
        series = window[name] = Series(kind)
    earlier = series.steps.get(step)
    if earlier is None or kind == "last":
        series.steps[step] = [total, weight]
    else:
        series.steps[step] = [earlier[0] + total, earlier[1] + weight]  # lists of an imbalance are joined


def merge(windows: Iterable[Window]) -> Window:
    """Merges the windows of all ranks. Ranks may have different names, or none.

    A put is averaged on each rank first, so a rank that puts twice in a step has no more weight than the others. The
    lowest rank's value of a `last` name is used.
    """
    windows = list(windows)
    if len(windows) == 1:
        return windows[0]
    merged: Window = {}
    for window in windows:
        for name, series in window.items():
            for step, (total, count) in series.steps.items():
                if series.kind == "put":
                    total, count = _divide(total, count), 1.0
                if series.kind != "last" or name not in merged or step not in merged[name].steps:
                    add_record(merged, name, step, total, count, series.kind)
    return merged


def summarise(window: Window) -> dict[str, Any]:
    """Returns name → value of the whole window, without names that have no weight."""
    return {
        name: series.summary()
        for name, series in window.items()
        if series.kind == "last" or any(count for _, count in series.steps.values())
    }


def window_to_state(window: Window) -> dict[str, Any]:
    """Returns a window as plain dicts and lists, for a checkpoint."""
    return {
        name: {"kind": series.kind, "steps": [[step, *pair] for step, pair in series.steps.items()]}
        for name, series in window.items()
    }


def window_from_state(state: Mapping[str, Any]) -> Window:
    """Restores the result of `window_to_state`."""
    return {
        name: Series(entry["kind"], {int(step): [total, count] for step, total, count in entry["steps"]})
        for name, entry in state.items()
    }


def _divide(total: float, count: float) -> float:
    return total / count if count else 0.0
