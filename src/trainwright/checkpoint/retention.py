"""Which checkpoints to delete: all but the newest few and the best by a metric.

The rules are pure functions of steps and metrics; only `prune` touches the disk, through `store.py`. The best
one during a run is chosen with `is_better`, so both agree on nan and ties.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainwright.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from trainwright.checkpoint.store import CheckpointStore  # it imports torch; the rules below need none

logger = logging.getLogger(__name__)


def to_delete(steps: Sequence[int], *, keep_last: int | None, best: int | None) -> list[int]:
    """Return the steps to delete, ascending: all but the last `keep_last` and `best`. None keeps all."""
    if keep_last is None:
        return []
    if keep_last < 1:
        problem = f"{keep_last} would delete the newest checkpoint"
        raise ConfigError(f"{problem}. Use 1 or more, or leave it out to keep all.", where="checkpoint.keep_last")
    return [step for step in sorted(set(steps))[:-keep_last] if step != best]


def best_step(metrics_by_step: Mapping[int, Mapping[str, float]], *, metric: str, mode: str) -> int | None:
    """Return the step with the best value of `metric`, the earlier of equals; None if no step has a finite one."""
    best: int | None = None
    for step in sorted(metrics_by_step):
        value = metrics_by_step[step].get(metric)
        best_value = None if best is None else metrics_by_step[best][metric]
        if value is not None and is_better(value, best_value, mode):
            best = step
    return best


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Say whether `value` beats `best` in `mode` ("min" or "max").

    nan and the infinities never do: a run that diverged to inf must not be the best of "max". Any finite value beats
    None and nan. Equal is not better, so the earlier stays.
    """
    if mode not in ("min", "max"):
        raise ConfigError(f'The mode is {mode!r}. Use "min" or "max".', where="checkpoint.keep_best.mode")
    if not math.isfinite(value):
        return False
    if best is None or math.isnan(best):
        return True
    return value < best if mode == "min" else value > best


def metrics_by_step(store: CheckpointStore) -> dict[int, dict[str, float]]:
    """Return the metrics of every checkpoint; one whose manifest cannot be read is left out with a warning."""
    known: dict[int, dict[str, float]] = {}
    for step in store.steps():
        try:
            known[step] = store.metrics(step)
        except CheckpointError as error:
            logger.warning("Left out when comparing checkpoints: %s", error)
    return known


def prune(store: CheckpointStore, *, keep_last: int | None, metric: str | None = None, mode: str = "min") -> list[int]:
    """Delete by policy and return the deleted steps; never the newest, never the best by `metric`.

    One whose manifest cannot be read neither counts nor is deleted: as one of the last it would push out an intact
    one, and `newest_intact` will set it aside. One that cannot be deleted is named in a warning; training goes on.
    """
    known = metrics_by_step(store)
    best = None if metric is None else best_step(known, metric=metric, mode=mode)
    deleted = []
    for step in to_delete(list(known), keep_last=keep_last, best=best):
        try:
            store.delete(step)
        except CheckpointError as error:
            logger.warning("An old checkpoint stays: %s", error)
            continue
        deleted.append(step)
    return deleted
