"""When a checkpoint is the best, and how the trainer's state is saved and restored on all ranks.

What a checkpoint holds is checkpoint/contents.py's; how it is committed checkpoint/store.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.checkpoint import contents
from trainwright.checkpoint.retention import best_step, is_better, metrics_by_step, prune
from trainwright.config import KeepBest
from trainwright.errors import CheckpointError, ConfigError
from trainwright.events.windows import merge
from trainwright.loop.loss_scale import LossScale
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


def save_checkpoint(trainer: Trainer, *, metrics: Mapping[str, float]) -> Path:
    """Writes the state of all ranks as one checkpoint; the first rank writes, all wait for the commit."""
    store, ranks = trainer.surroundings.store, trainer.ranks
    copy_from_first(trainer.model.buffers(), ranks)  # what is saved is then what every rank goes on with
    window = merge(ranks.gather(trainer.storage.peek_window()))
    generators = ranks.gather(contents.generator_state())
    assert trainer.train_data is not None
    data = trainer.train_data.merge_states(ranks.gather(trainer.train_data.state_dict()))
    failure: CheckpointError | None = None
    if ranks.is_first:
        parts = contents.collect(
            model=trainer.model,
            optimizers=trainer.optimizers,
            hooks=trainer.moments.keyed(),
            events=trainer.storage.state_dict(window),
            data=data,
            loss_scale=trainer.loss_scale,
            generators=generators,
            step=trainer.step,
            has_unfinished_step=trainer.has_unfinished_step,
            ended_under=trainer.ended_under,
            unclaimed_hook_state=trainer.unclaimed_hook_state,
        )
        try:
            store.write(trainer.step, parts, metrics=metrics)
            policy = trainer.config.checkpoint.keep_best
            prune(
                store,
                keep_last=trainer.config.checkpoint.keep_last,
                metric=policy.metric if policy else None,
                mode=policy.mode if policy else "min",
            )
        except CheckpointError as error:
            failure = error
    failure = ranks.broadcast(failure)
    if failure is not None:
        raise failure
    return store.path(trainer.step)


def restore_checkpoint(trainer: Trainer, step: int, *, keep_settings: bool = False) -> None:
    """Brings a trainer to the state of a checkpoint; every rank reads it.

    With `keep_settings` the optimizers keep the settings (weight decay, betas) that they were built with.
    """
    store = trainer.surroundings.store
    contents.restore_model(store, step, trainer.model)
    optimizers = store.read(step, "optimizers")
    contents.restore_optimizers(optimizers, trainer.model, trainer.optimizers, keep_settings=keep_settings)
    training = store.read(step, "training")
    trainer.step = trainer.storage.step = int(training["step"])
    trainer.has_unfinished_step = bool(training["has_unfinished_step"])
    trainer.ended_under = int(training["ended_under"])
    assert trainer.train_data is not None
    trainer.train_data.load_state_dict(training["data"], accept_changes=keep_settings)
    trainer.storage.load_state_dict(training["events"], with_window=trainer.ranks.is_first)
    _restore_loss_scale(trainer.loss_scale, training["loss_scale"])
    trainer.unclaimed_hook_state = contents.restore_hooks(training["hooks"], trainer.moments.keyed())
    if trainer.ranks.rank < len(training["generators"]):  # a rank that is new begins with its own seed
        trainer.saved_generators = training["generators"][trainer.ranks.rank]
    metrics = trainer.ranks.broadcast(metrics_by_step(store) if trainer.ranks.is_first else {})
    trainer.best.recall(metrics)
    trainer.eval_logs = dict(metrics.get(step, {}))
    trainer.evaluated_step = step if trainer.eval_logs else -1
    trainer.reported = set() if trainer.has_unfinished_step else set(trainer.eval_logs)


def _restore_loss_scale(loss_scale: LossScale | None, state: Any) -> None:
    if loss_scale is not None and state is not None:
        loss_scale.load_state_dict(state)
