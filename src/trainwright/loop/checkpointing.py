"""When a checkpoint is due, the save in progress, and which checkpoint is the best.

What a checkpoint contains is in checkpoint/contents.py; how it is committed is in checkpoint/store.py.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from trainwright.checkpoint.background import BackgroundSaver
from trainwright.checkpoint.remote_files import RemotePath
from trainwright.checkpoint.remote_store import AnyStore
from trainwright.checkpoint.retention import Retention, best_step, is_better
from trainwright.checkpoint.together import Together, encode_share, ranks_without_folder, reject_unshared_folder
from trainwright.config import CheckpointSection, KeepBest
from trainwright.config.problems import suggest
from trainwright.errors import CheckpointError, ConfigError
from trainwright.loop.metrics import MetricNames
from trainwright.parallel.collectives import Notes, Ranks

logger = logging.getLogger(__name__)

SHARED_BYTES = 2**28
"""The minimum size of the trained weights for the ranks of a replicated model to divide the writing of a checkpoint."""


class BestCheckpoint:
    """The best value of the metric in `checkpoint.keep_best`, over committed and pending checkpoints."""

    def __init__(self, policy: KeepBest | None, *, where: object | None = None) -> None:
        self._policy = policy
        self._where = where
        self.value: float | None = None
        self.step: int | None = None
        """The step of the best value; it is saved immediately, independent of the period."""

    @property
    def metric(self) -> str | None:
        """The name of the metric, such as valid/loss; None without `keep_best`."""
        return None if self._policy is None else self._policy.metric

    def check(self, names: MetricNames) -> None:
        """Raises for a name that no evaluation returns, as far as the names are known before the first evaluation."""
        if self._policy is not None:
            label = "checkpoint.keep_best.metric"
            names.check(self._policy.metric, label=label, mode=self._policy.mode, where=self._where)

    def update(self, step: int, logs: Mapping[str, float]) -> None:
        """Compares the logs of an evaluation; a NaN is never the best."""
        if self._policy is None:
            return
        if self._policy.metric not in logs:
            raise ConfigError(
                f"checkpoint.keep_best.metric: no evaluation returns {self._policy.metric!r}. "
                f"{suggest(self._policy.metric, logs, cutoff=0.8)}",
                where=self._where,
            )
        value = logs[self._policy.metric]
        if is_better(value, self.value, self._policy.mode):
            self.value, self.step = value, step

    def restore(self, metrics_by_step: Mapping[int, Mapping[str, float]]) -> None:
        """Continues with the best of the existing checkpoints."""
        if self._policy is None:
            return
        self.step = best_step(metrics_by_step, metric=self._policy.metric, mode=self._policy.mode)
        self.value = None if self.step is None else metrics_by_step[self.step][self._policy.metric]


class Checkpointing:
    """The saves of a run: when one is due, the save in progress, and whether it was committed.

    Every rank calls the same methods in the same order. The first rank writes; if the model is sharded or large, each
    rank writes a part and the first one commits. The other ranks receive the result of a save through the votes of the
    following steps, or at the next save, whichever comes first.
    """

    def __init__(self, section: CheckpointSection, store: AnyStore, ranks: Ranks) -> None:
        self._section = section
        self._store = store
        self._ranks = ranks
        self._notes: Notes | None = None
        self._together: Together | None = None
        self._writes_alone = False
        """True if the ranks of a large replicated model do not share the folder."""
        self._saver = self._make_saver()
        self.pending_step: int | None = None
        """The step of the save in progress."""
        self._num_saves = self._num_saves_at_vote = 0
        self.num_committed = 0
        """On the first rank: the number of the last committed save; every rank counts saves in the same way."""
        self.failure: Exception | None = None
        """On the first rank: the reason why saving has failed permanently."""
        self._saved_at = time.monotonic()

    def prepare(self, model: torch.nn.Module) -> None:
        """Prepares the ranks to save a sharded or a large model together; collective.

        Raises if the ranks of a sharded model do not all see the checkpoints folder. If the ranks of a replicated model
        do not, only the first rank writes.
        """
        if self._together is not None or self._ranks.size == 1:
            return
        if self._ranks.mesh.is_split:
            reject_unshared_folder(self._store, self._ranks)
        elif self._writes_alone or _trained_bytes(model) < SHARED_BYTES:
            return
        else:
            try:
                blind = ranks_without_folder(self._store, self._ranks)
            except CheckpointError:  # raised by the first save
                blind = [0]
            self._writes_alone = bool(blind)
            if blind:
                logger.info("Rank 0 writes checkpoints alone: rank %s does not see its folder.", blind[0])
                return
        # A unique topic, because a process may train several times and notes are not deleted.
        self._notes = Notes(self._ranks.broadcast(f"checkpoints-{secrets.token_hex(4)}"))
        self._together = Together(self._ranks.rank, self._ranks.size, self._notes)
        self._saver = self._make_saver()

    def _make_saver(self) -> BackgroundSaver | None:
        if self._together is None and (self._ranks.mesh.is_split or not self._ranks.is_first):
            return None
        return BackgroundSaver(
            self._store,
            retention=Retention.of(self._section),
            asynchronous=self._section.asynchronous,
            max_failures=self._section.max_failures,
            together=self._together,
        )

    def is_due_by_samples(self, start: int, stop: int) -> bool:
        """Returns True if a checkpoint is due after a step that used the positions start … stop−1 of the data."""
        every = self._section.every_samples
        return bool(every and stop // every > start // every)

    def is_due_by_time(self) -> bool:
        """Returns True if a save is due by this rank's clock; the ranks agree on it through votes."""
        minutes = self._section.every_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60.0 * minutes

    def accepts_request(self, requested: bool) -> bool:
        """Returns True if a save that some rank requested is still due, because votes are one step old."""
        num_saves, self._num_saves_at_vote = self._num_saves_at_vote, self._num_saves
        return requested and (self._ranks.size == 1 or num_saves == self._num_saves)

    def poll(self) -> None:
        """Checks the background save without waiting."""
        if self._saver is None or not self._ranks.is_first:
            return
        if self._saver.take_committed():
            self.num_committed = self._num_saves
        try:
            self._saver.check()
        except Exception as error:
            self.failure = error

    def take_committed(self, num_committed: int) -> Path | RemotePath | None:
        """Returns the path of the save in progress once it is committed; it is then no longer in progress."""
        if self.pending_step is None or num_committed != self._num_saves:
            return None
        step, self.pending_step = self.pending_step, None
        return self._store.path(step)

    def start_save(self, step: int, parts: Mapping[str, Any], *, metrics: Mapping[str, float]) -> None:
        """Copies the state of all ranks and begins to write it; the previous save must be finished."""
        share = parts if self._together is None else encode_share(parts, self._ranks)
        failure: CheckpointError | None = None
        if self._saver is not None:
            try:
                self._saver.save(step, share, metrics=metrics)
            except CheckpointError as error:  # a value that cannot be saved
                failure = error
        failures = self._ranks.gather(failure) if self._together is not None else [self._ranks.broadcast(failure)]
        failure = next((each for each in failures if each is not None), None)
        if failure is not None:
            raise failure
        self._saved_at = time.monotonic()
        self._num_saves += 1
        self.pending_step = step

    def finish(self, *, must_succeed: bool) -> tuple[Path | RemotePath | None, Exception | None]:
        """Waits for the save in progress; returns its path if it was committed, and the reason if saving failed
        permanently.

        With `must_succeed` a failure of this save counts too, because it is the last save of the run.
        """
        failure: Exception | None = None
        if self._saver is not None:
            try:
                self._saver.wait(must_succeed=must_succeed)
            except (CheckpointError, OSError) as error:
                failure = error
            self.poll()
        if self._num_saves == 0:
            return None, None
        num_committed, failure = self._ranks.broadcast((self.num_committed, self.failure or failure))
        return self.take_committed(num_committed), failure

    def raise_failure(self) -> NoReturn:
        """Raises on every rank if saving has failed permanently."""
        raise self.failure or CheckpointError("The first rank can no longer save checkpoints; see its error.")

    def close(self) -> None:
        """Waits until the file in progress is written, also if the run has failed."""
        if self._saver is not None:
            self._saver.close()
        if self._notes is not None:
            self._notes.close()
            self._notes = self._together = None
        self._saver = self._make_saver()  # `save()` may be called after the run


def _trained_bytes(model: torch.nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters() if each.requires_grad)
