"""Selects the checkpoints to delete: all except the newest few, the best by a metric, and every n-th.

The rules are pure functions of steps and metrics; only `prune` and `delete_all` change the disk, through a store. A
run chooses its best checkpoint with `is_better` too, so both agree on nan and ties. Does not import torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from trainwright.config import CheckpointSection
from trainwright.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


class PrunableStore(Protocol):
    """The interface of a store, local or remote, for pruning."""

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending."""

    def metrics(self, step: int, /) -> Mapping[str, float]:
        """Returns the metrics of a checkpoint."""

    def delete(self, step: int, /) -> None:
        """Removes a checkpoint."""


@dataclass(frozen=True)
class Retention:
    """The policy of `checkpoint.keep_last`, `keep_best` and `keep_every`. The newest and the best are never deleted."""

    keep_last: int | None
    """The number of newest checkpoints that are kept; None: all."""
    keep_best: str | None = None
    """The metric whose best checkpoint is kept; None: no such rule."""
    mode: str = "min"
    """Whether a smaller ("min") or a larger ("max") value of the metric is better."""
    keep_every: int | None = None
    """Steps that are a multiple of this are kept; None: no such rule."""

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            problem = f"{self.keep_last} would delete the newest checkpoint"
            raise ConfigError(f"{problem}. Use 1 or more, or omit it to keep all.", where="checkpoint.keep_last")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"{self.keep_every} is not a period. Use 1 or more.", where="checkpoint.keep_every")

    @classmethod
    def of(cls, section: CheckpointSection) -> Retention:
        """Returns the policy of a run's `checkpoint` section."""
        best = section.keep_best
        return cls(
            keep_last=section.keep_last,
            keep_best=None if best is None else best.metric,
            mode="min" if best is None else best.mode,
            keep_every=section.keep_every,
        )

    def best(self, metrics_by_step: Mapping[int, Mapping[str, float]]) -> int | None:
        """Returns the best step, or None without `keep_best` or if no step has a finite value."""
        if self.keep_best is None:
            return None
        return best_step(metrics_by_step, metric=self.keep_best, mode=self.mode)

    def to_delete(self, metrics_by_step: Mapping[int, Mapping[str, float]], *, num_coming: int = 0) -> list[int]:
        """Returns the committed steps to delete, ascending.

        `num_coming` checkpoints are about to be written and count as kept; the newest existing one is kept in any case.
        """
        if self.keep_last is None:
            return []
        last = max(1, self.keep_last - num_coming)
        kept = {self.best(metrics_by_step)}
        if self.keep_every is not None:
            kept |= {step for step in metrics_by_step if step % self.keep_every == 0}
        return [step for step in sorted(metrics_by_step)[:-last] if step not in kept]


def best_step(metrics_by_step: Mapping[int, Mapping[str, float]], *, metric: str, mode: str) -> int | None:
    """Returns the step with the best value of `metric`, the earliest of equal ones; None if no step has a finite
    value."""
    best: int | None = None
    for step in sorted(metrics_by_step):
        value = metrics_by_step[step].get(metric)
        best_value = None if best is None else metrics_by_step[best][metric]
        if value is not None and is_better(value, best_value, mode):
            best = step
    return best


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Returns True if `value` is better than `best` in `mode` ("min" or "max").

    nan and infinities are never better: a run that diverged to inf must not be the best of "max". Any finite value is
    better than None and nan. An equal value is not better, so the earlier one is kept.
    """
    if mode not in ("min", "max"):
        raise ConfigError(f'The mode is {mode!r}. Use "min" or "max".', where="checkpoint.keep_best.mode")
    if not math.isfinite(value):
        return False
    if best is None or math.isnan(best):
        return True
    return value < best if mode == "min" else value > best


def metrics_by_step(store: PrunableStore) -> dict[int, Mapping[str, float]]:
    """Returns the metrics of every checkpoint; one whose manifest cannot be read is skipped with a warning."""
    known: dict[int, Mapping[str, float]] = {}
    for step in store.steps():
        try:
            known[step] = store.metrics(step)
        except CheckpointError as error:
            logger.warning("Skipped in the comparison of checkpoints: %s", error)
    return known


def prune(store: PrunableStore, retention: Retention, *, num_coming: int = 0) -> list[int]:
    """Deletes by policy and returns the deleted steps; never the newest, never the best.

    A checkpoint whose manifest cannot be read is neither counted nor deleted: it would replace an intact one among the
    last, and `newest_intact` renames it.
    """
    return delete_all(store, retention.to_delete(metrics_by_step(store), num_coming=num_coming))


def delete_all(store: PrunableStore, steps: Iterable[int]) -> list[int]:
    """Deletes these steps and returns the deleted ones; warns about a step that cannot be deleted."""
    deleted = []
    for step in steps:
        try:
            store.delete(step)
        except CheckpointError as error:
            logger.warning("An old checkpoint could not be deleted: %s", error)
            continue
        deleted.append(step)
    return deleted
