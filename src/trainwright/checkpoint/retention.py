"""Which checkpoints to delete: all but the newest few, the best by a metric, and every n-th.

The rules are pure functions of steps and metrics; only `prune` touches the disk, through a store. The best one
during a run is chosen with `is_better`, so both agree on nan and ties. Imports no torch.
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


class Store(Protocol):
    """What pruning asks of a store, local or remote."""

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending."""

    def metrics(self, step: int, /) -> Mapping[str, float]:
        """Returns the metrics that were saved with a checkpoint."""

    def delete(self, step: int, /) -> None:
        """Removes a checkpoint."""


@dataclass(frozen=True)
class Retention:
    """The policy of `checkpoint.keep_last`, `keep_best` and `keep_every`. The newest and the best are never deleted."""

    keep_last: int | None
    """How many of the newest are kept; None: all."""
    keep_best: str | None = None
    """The metric whose best checkpoint is kept; None: none is kept for its metric."""
    mode: str = "min"
    """Whether a smaller ("min") or a larger ("max") value of the metric is better."""
    keep_every: int | None = None
    """Steps that this divides are kept; None: none is kept for its number."""

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            problem = f"{self.keep_last} would delete the newest checkpoint"
            raise ConfigError(f"{problem}. Use 1 or more, or leave it out to keep all.", where="checkpoint.keep_last")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"{self.keep_every} is no period. Use 1 or more.", where="checkpoint.keep_every")

    @classmethod
    def of(cls, section: CheckpointSection) -> Retention:
        """Returns the policy that a run's `checkpoint` section asks for."""
        best = section.keep_best
        return cls(
            keep_last=section.keep_last,
            keep_best=None if best is None else best.metric,
            mode="min" if best is None else best.mode,
            keep_every=section.keep_every,
        )

    def best(self, metrics_by_step: Mapping[int, Mapping[str, float]]) -> int | None:
        """Returns the step that counts as the best, or None where nobody asks or no step has a finite value."""
        if self.keep_best is None:
            return None
        return best_step(metrics_by_step, metric=self.keep_best, mode=self.mode)

    def to_delete(self, metrics_by_step: Mapping[int, Mapping[str, float]], *, num_coming: int = 0) -> list[int]:
        """Returns the committed steps to delete, ascending.

        With `num_coming`, as many of the last are about to be written and their places are given up beforehand; the
        newest that is there stays all the same.
        """
        if self.keep_last is None:
            return []
        last = max(1, self.keep_last - num_coming)
        best = self.best(metrics_by_step)
        return [step for step in sorted(metrics_by_step)[:-last] if step != best and not self._is_nth(step)]

    def _is_nth(self, step: int) -> bool:
        return self.keep_every is not None and step % self.keep_every == 0


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


def metrics_by_step(store: Store) -> dict[int, Mapping[str, float]]:
    """Return the metrics of every checkpoint; one whose manifest cannot be read is left out with a warning."""
    known: dict[int, Mapping[str, float]] = {}
    for step in store.steps():
        try:
            known[step] = store.metrics(step)
        except CheckpointError as error:
            logger.warning("Left out when comparing checkpoints: %s", error)
    return known


def prune(store: Store, retention: Retention, *, num_coming: int = 0) -> list[int]:
    """Delete by policy and return the deleted steps; never the newest, never the best.

    One whose manifest cannot be read neither counts nor is deleted: as one of the last it would push out an intact
    one, and `newest_intact` will set it aside. One that cannot be deleted is named in a warning; training goes on.
    """
    return delete_all(store, retention.to_delete(metrics_by_step(store), num_coming=num_coming))


def delete_all(store: Store, steps: Iterable[int]) -> list[int]:
    """Delete these steps and return those that are gone; one that cannot be deleted is named in a warning."""
    deleted = []
    for step in steps:
        try:
            store.delete(step)
        except CheckpointError as error:
            logger.warning("An old checkpoint stays: %s", error)
            continue
        deleted.append(step)
    return deleted
