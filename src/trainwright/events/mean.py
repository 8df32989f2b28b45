"""`Mean`, a mean that knows its weight, and the windows in which means add up over steps, puts and ranks.

Means of unequal batches add up exactly. storage.py collects values; writers get a window's summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

IGNORED_LABEL = -100
"""Labels of this value do not count: torch's and transformers' convention."""


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """The mean `total / count`, kept apart.

    `total` is a sum (a tensor, with a gradient where it is a loss, or a number) and `count` how many
    things were summed (tokens, samples): a number, or a tensor where only the device knows it.

    >>> Mean(6.0, 3).value
    2.0
    """

    total: torch.Tensor | float
    count: torch.Tensor | float

    @property
    def value(self) -> torch.Tensor | float:
        """The mean itself; an empty one is 0, not NaN, so that a rank without samples adds nothing."""
        if isinstance(self.count, torch.Tensor):
            # Not clamped to something tiny: in 16 bits that is 0 again.
            return self.total / torch.where(self.count == 0, 1, self.count)
        return self.total / self.count if self.count else self.total * 0.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def detach(self) -> Mean:
        """Returns a copy that keeps no graph alive and does not change when the originals do."""
        return Mean(_settle(self.total), _settle(self.count))


def _settle(value: torch.Tensor | float) -> torch.Tensor | float:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


Kind = Literal["mean", "total", "put", "last", "spread"]
"""mean: a mean and its weight; total: a sum and its count; put: averaged per step; last: the newest wins;
spread: seconds of each rank, of which a window shows the share that the ranks on average waited for the slowest."""


@dataclass(slots=True)
class Series:
    """One name's values by step: [total, count] pairs, or the last object."""

    kind: Kind
    steps: dict[int, list[Any]] = field(default_factory=dict)

    def value_at(self, step: int) -> Any:
        """The value of one step; of a spread the seconds of each rank."""
        total, count = self.steps[step]
        return total if self.kind in ("last", "spread") else _divide(total, count)

    def summary(self) -> Any:
        """The value of the whole window: see `Kind`."""
        if self.kind == "last":
            return self.steps[max(self.steps)][0]
        if self.kind == "spread":
            return _waiting_share([seconds for _, (seconds, _) in sorted(self.steps.items())])
        if self.kind == "put":
            return sum(_divide(total, count) for _, (total, count) in sorted(self.steps.items())) / len(self.steps)
        # In the order of steps, so that the sum's rounding does not depend on where a checkpoint cut the window.
        totals, counts = zip(*(pair for _, pair in sorted(self.steps.items())), strict=True)
        return _divide(sum(totals), sum(counts))


Window = dict[str, Series]


def add_record(window: Window, name: str, step: int, value: Any, weight: Any, kind: Kind) -> None:
    """Adds one put to a window. A name that changes its kind begins anew with the new kind."""
    family: Kind = "total" if kind == "mean" else kind
    series = window.get(name)
    if series is None or series.kind != family:
        series = window[name] = Series(family)
    total = value * weight if kind == "mean" else [value] if kind == "spread" else value
    if family == "total" and not weight:
        total = 0.0  # a rank that only stands in may have a NaN (the deviation of one sample), and 0 × NaN is NaN
    place = series.steps.get(step)
    if place is None or family == "last":
        series.steps[step] = [total, weight]
    elif family == "spread":
        place[0][0] += value
    else:
        place[0] += total
        place[1] += weight


def merge(windows: Iterable[Window]) -> Window:
    """Adds up the windows of all ranks. Ranks may hold different names, or none.

    A put is averaged on each rank first, so that a rank which puts twice in a step weighs no more than
    its neighbour; of a "last" value the lowest rank's is taken; of a "spread" every rank's is kept.
    """
    windows = list(windows)
    if len(windows) == 1:
        return windows[0]
    merged: Window = {}
    for window in windows:
        for name, series in window.items():
            for step, (total, count) in series.steps.items():
                if series.kind == "last":
                    if name not in merged or step not in merged[name].steps:
                        add_record(merged, name, step, total, count, "last")
                elif series.kind == "spread":
                    _keep_apart(merged, name, step, total)
                elif series.kind == "put":
                    add_record(merged, name, step, _divide(total, count), 1.0, "put")
                else:
                    add_record(merged, name, step, total, count, "total")
    return merged


def summarise(window: Window) -> dict[str, Any]:
    """Returns name → value of the whole window; a name without any weight is left out."""
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
    """Restores what `window_to_state` returned."""
    return {
        name: Series(entry["kind"], {int(step): [total, count] for step, total, count in entry["steps"]})
        for name, entry in state.items()
    }


def _keep_apart(merged: Window, name: str, step: int, seconds: list[float]) -> None:
    """Appends one rank's seconds to those of the ranks before it."""
    series = merged.get(name)
    if series is None or series.kind != "spread":
        series = merged[name] = Series("spread")
    kept = series.steps.get(step)
    series.steps[step] = [[*(kept[0] if kept else []), *seconds], 1.0]


def _waiting_share(steps: list[list[float]]) -> float:
    """Of the seconds that the slowest rank needed in each step, the share that the average rank waited for it."""
    slowest = sum(max(seconds) for seconds in steps)
    waited = sum(max(seconds) - sum(seconds) / len(seconds) for seconds in steps)
    return _divide(waited, slowest)


def _divide(total: float, count: float) -> float:
    return total / count if count else 0.0
