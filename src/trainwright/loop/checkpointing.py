"""Saving and restoring a trainer on all ranks, and which checkpoint is the best.

What a checkpoint contains is in checkpoint/contents.py; how it is committed in checkpoint/store.py.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.checkpoint import contents
from trainwright.checkpoint.background import BackgroundSaver
from trainwright.checkpoint.remote_files import RemotePath
from trainwright.checkpoint.retention import Retention, best_step, is_better, metrics_by_step
from trainwright.checkpoint.together import Together, encode_share, reject_unshared_folder
from trainwright.config import KeepBest
from trainwright.errors import CheckpointError, ConfigError
from trainwright.events.mean import merge
from trainwright.loop.update import LossScale
from trainwright.parallel.collectives import Notes
from trainwright.parallel.mesh import is_split
from trainwright.parallel.replicate import copy_from_first

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)


class BestSoFar:
    """The best value of the metric that `checkpoint.keep_best` names, over committed and coming checkpoints."""

    def __init__(self, policy: KeepBest | None, *, where: object | None = None) -> None:
        self._policy = policy
        self._where = where
        self.value: float | None = None
        self.step: int | None = None
        """The step of the best value; saved when it is reached, whatever the period."""

    @property
    def metric(self) -> str | None:
        """The metric's name, such as valid/loss; None if nobody asks for the best."""
        return None if self._policy is None else self._policy.metric

    def note(self, step: int, logs: Mapping[str, float]) -> None:
        """Takes an evaluation's logs; a NaN is never best."""
        if self._policy is None:
            return
        if self._policy.metric not in logs:
            raise ConfigError(
                f"checkpoint.keep_best.metric: no evaluation gives {self._policy.metric!r}. "
                f"The last one gave {', '.join(logs) or 'nothing'}.",
                where=self._where,
            )
        value = logs[self._policy.metric]
        if is_better(value, self.value, self._policy.mode):
            self.value, self.step = value, step

    def recall(self, metrics_by_step: Mapping[int, Mapping[str, float]]) -> None:
        """Takes up the best of the checkpoints that are there."""
        if self._policy is None:
            return
        self.step = best_step(metrics_by_step, metric=self._policy.metric, mode=self._policy.mode)
        self.value = None if self.step is None else metrics_by_step[self.step][self._policy.metric]


class Checkpoints:
    """The checkpoints of a run: when one is due, the save under way, and who hears of its commit.

    Every rank calls the same methods in the same order. The first one writes; where the model is split, each writes
    what it holds, and the first one commits. A save's fate reaches the others by the votes of the steps after it, or
    at the next save, whichever comes first.
    """

    def __init__(self, trainer: Trainer) -> None:
        section = trainer.config.checkpoint
        self._trainer = trainer
        self._section = section
        self.best = BestSoFar(section.keep_best, where=trainer.config.origin("checkpoint.keep_best.metric"))
        self._notes: Notes | None = None
        self._together: Together | None = None
        self._saver = self._make_saver()
        self._under_way: int | None = None
        self._num_saves = self._num_saves_at_vote = 0
        self.num_committed = 0
        """On the first rank: the number of the last save that was committed, counted alike on every rank."""
        self.failure: Exception | None = None
        """On the first rank: why saving has failed for good."""
        self.is_training = False
        """Are steps to come? Else nothing is written beside them, and a checkpoint is there when `save` returns."""
        self.places_before = 0
        """The place of the data at which the step under way began."""
        self.keeps_settings = False
        """Do the optimizers keep the settings that they were built with, whatever a checkpoint says?"""
        self._saved_at = time.monotonic()

    def prepare(self) -> None:
        """Makes ready to save together, where the model is split; every rank calls it, before training.

        Rejects a checkpoints folder that not all ranks see. Whoever saves without it does it then.
        """
        ranks = self._trainer.ranks
        if not ranks.mesh.is_split or self._together is not None:
            return
        reject_unshared_folder(self._trainer.context.store, ranks)
        # A topic of its own: a process may train several times, and notes stay.
        self._notes = Notes(ranks.broadcast(f"checkpoints-{secrets.token_hex(4)}"))
        self._together = Together(ranks.rank, ranks.size, self._notes)
        self._saver = self._make_saver()

    def _make_saver(self) -> BackgroundSaver | None:
        ranks = self._trainer.ranks
        if (self._together is None) if ranks.mesh.is_split else not ranks.is_first:
            return None
        return BackgroundSaver(
            self._trainer.context.store,
            retention=Retention.of(self._section),
            asynchronous=self._section.asynchronous,
            max_failures=self._section.max_failures,
            together=self._together,
        )

    def is_due(self) -> bool:
        """Is a checkpoint of this step due by steps or samples? The same on every rank."""
        section, trainer = self._section, self._trainer
        if section.every_steps and trainer.step % section.every_steps == 0:
            return True
        if section.every_samples and trainer.train_data is not None:
            return trainer.train_data.places // section.every_samples > self.places_before // section.every_samples
        return False

    def is_time(self) -> bool:
        """Is one due by the clock? Each rank has its own, so that they must agree on it."""
        minutes = self._section.every_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60.0 * minutes

    def grants(self, is_time: bool) -> bool:
        """Is a save that some rank's clock asked for still due? Votes are a step old: one may have been made since."""
        num_saves, self._num_saves_at_vote = self._num_saves_at_vote, self._num_saves
        return is_time and (self._trainer.ranks.size == 1 or num_saves == self._num_saves)

    @property
    def is_idle(self) -> bool:
        """Is nothing being saved, nor to be saved by the clock?"""
        return self._under_way is None and self._section.every_minutes is None

    def look(self) -> None:
        """Takes notice of what the background has done since; never waits."""
        if self._saver is None or not self._trainer.ranks.is_first:
            return
        if self._saver.take_committed():
            self.num_committed = self._num_saves
        try:
            self._saver.check()
        except Exception as error:
            self.failure = error

    def announce(self, num_committed: int) -> None:
        """Calls `after_save` if the save under way is the one that is said to be committed."""
        if self._under_way is not None and num_committed == self._num_saves:
            step, self._under_way = self._under_way, None
            self._trainer.callbacks.call("after_save", self._trainer.context.store.path(step))

    def save(self, *, metrics: Mapping[str, float]) -> Path | RemotePath:
        """Copies the state of all ranks and writes it, beside training where the config says so."""
        trainer = self._trainer
        self.settle()
        self.prepare()
        parts = collect_parts(trainer)
        share = parts if self._together is None else encode_share(parts, trainer.ranks)
        failure: CheckpointError | None = None
        if self._saver is not None:
            try:
                self._saver.save(trainer.step, share, metrics=metrics)
            except CheckpointError as error:  # a state that no checkpoint can hold
                failure = error
        failures = trainer.ranks.gather(failure) if self._together is not None else [trainer.ranks.broadcast(failure)]
        failure = next((each for each in failures if each is not None), None)
        if failure is not None:
            raise failure
        self._saved_at = time.monotonic()
        self._num_saves += 1
        self._under_way = trainer.step
        if not self.is_training:
            self.settle(must_succeed=True)
            self.close()  # nobody else would end its thread
        elif not self._section.asynchronous:
            self.settle()
        return trainer.context.store.path(trainer.step)

    def settle(self, *, must_succeed: bool = False) -> None:
        """Waits for the save under way and tells every rank of its fate; raises on all if saving failed for good.

        With `must_succeed` also if this one failed: it is the run's last.
        """
        lost: Exception | None = None
        if self._saver is not None:
            try:
                self._saver.wait(must_succeed=must_succeed)
            except (CheckpointError, OSError) as error:
                lost = error
            self.look()
        if self._num_saves == 0:
            return
        num_committed, failure = self._trainer.ranks.broadcast((self.num_committed, self.failure or lost))
        self.announce(num_committed)
        if failure is not None:
            raise failure

    def reject_failure(self) -> None:
        """Raises why saving has failed for good, on every rank."""
        raise self.failure or CheckpointError("The first rank can save no checkpoint any more; its error says why.")

    def close(self) -> None:
        """Waits until the file under way is written, whatever happened to the run."""
        if self._saver is not None:
            self._saver.close()
        if self._notes is not None:
            self._notes.close()
            self._notes = self._together = None
        self._saver = self._make_saver()  # whoever saves after the run may


def collect_parts(trainer: Trainer) -> dict[str, Any]:
    """Returns what a checkpoint of this moment holds; shares memory with the live state.

    The same on every rank, but for what is split: there each rank has its part, as a DTensor or by stages.
    """
    ranks = trainer.ranks
    # What is saved is then what every rank goes on with.
    copy_from_first([each for each in trainer.model.buffers() if not is_split(each)], ranks)
    window = merge(ranks.gather(trainer.storage.peek_window()))
    # Ranks that share samples share their random numbers too.
    generators = ranks.gather_samples(contents.generator_state())
    assert trainer.train_data is not None
    data = trainer.train_data.merge_states(ranks.gather_samples(trainer.train_data.state_dict()))
    return contents.collect(
        model=trainer.model,
        optimizers=trainer.optimizers,
        hooks=trainer.callbacks.keyed(),
        events=trainer.storage.state_dict(window),
        data=data,
        loss_scale=trainer.loss_scale,
        anomalies=trainer.anomaly_response,
        generators=generators,
        step=trainer.step,
        has_unfinished_step=trainer.has_unfinished_step,
        max_steps_at_end=trainer.ended_under,
        unclaimed_hook_state=trainer.unclaimed_hook_state,
    )


def restore_checkpoint(trainer: Trainer, step: int, *, keep_settings: bool = False) -> None:
    """Brings a trainer to the state of a checkpoint; every rank reads it.

    With `keep_settings` the optimizers keep the settings (weight decay, betas) that they were built with.
    """
    store = trainer.context.store
    trainer.checkpoints.keeps_settings = keep_settings
    restore_state(trainer, partial(store.read_split, step), location=str(store.path(step)))
    metrics = trainer.ranks.broadcast(metrics_by_step(store) if trainer.ranks.is_first else {})
    trainer.best.recall(metrics)
    trainer.step_end.recall(metrics.get(step, {}))


def restore_weights(trainer: Trainer, step: int) -> None:
    """Gives a trainer that only evaluates the weights of a checkpoint, and its hooks their state."""
    store = trainer.context.store
    elsewhere = _names_of_all_stages(trainer)
    weights = store.read_split(step, "model")
    contents.load_model_state(weights, trainer.model, source=str(store.path(step)), other_stages=elsewhere)
    hooks = store.read_split(step, "training")["hooks"]
    contents.restore_hooks(hooks, trainer.callbacks.keyed(), model=trainer.model)


def restore_state(trainer: Trainer, read: Callable[[str], Any], *, location: str) -> None:
    """Brings a trainer to a state whose parts `read` gives: `model`, `optimizers`, `training`.

    Their tensors may be whole or in pieces, however the trainer's own are laid out.
    """
    keep_settings, elsewhere = trainer.checkpoints.keeps_settings, _names_of_all_stages(trainer)
    contents.load_model_state(read("model"), trainer.model, source=location, other_stages=elsewhere)
    contents.restore_optimizers(
        read("optimizers"), trainer.model, trainer.optimizers, keep_settings=keep_settings, other_stages=elsewhere
    )
    training = read("training")
    trainer.step = trainer.storage.step = int(training["step"])
    trainer.has_unfinished_step = bool(training["has_unfinished_step"])
    trainer.ended_under = int(training["max_steps_at_end"])
    assert trainer.train_data is not None
    trainer.train_data.load_state_dict(training["data"], accept_changes=keep_settings)
    trainer.storage.load_state_dict(training["events"], with_window=trainer.ranks.is_first)
    _restore_loss_scale(trainer.loss_scale, training["loss_scale"])
    if "anomalies" in training:  # one of an earlier version has none
        trainer.anomaly_response.load_state_dict(training["anomalies"])
    trainer.step_end.forget()
    hooks = trainer.callbacks.keyed()
    trainer.unclaimed_hook_state = contents.restore_hooks(training["hooks"], hooks, model=trainer.model)
    data_rank = trainer.ranks.mesh.data_rank
    if data_rank < len(training["generators"]):  # a rank that is new begins with its own seed
        trainer.saved_generators = training["generators"][data_rank]


def _names_of_all_stages(trainer: Trainer) -> list[str]:
    """Returns the names of all weights of a pipeline, of which each stage holds some; none without a pipeline."""
    if trainer.ranks.mesh.size("pipeline") == 1:
        return []
    own = [*trainer.model.state_dict(keep_vars=True), *(name for name, _ in trainer.model.named_parameters())]
    return sorted({name for names in trainer.ranks.gather(own) for name in names})


def _restore_loss_scale(loss_scale: LossScale | None, state: Any) -> None:
    if loss_scale is not None and state is not None:
        loss_scale.load_state_dict(state)
