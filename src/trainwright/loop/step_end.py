"""What happens between two updates: incidents are looked at, then evaluating, writing and saving where due.

The order is the point: nothing bad is evaluated, written or saved, and the checkpoint comes last, so that it holds
every hook's state and the log already has its step. The loop itself is trainer.py's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainwright.backends import reads_at_once
from trainwright.data.stream_loader import EvaluationData
from trainwright.events.windows import merge, summarise
from trainwright.loop.agreement import Intent
from trainwright.loop.evaluation import EvaluationAbandoned, evaluate_sets
from trainwright.loop.garbage import Garbage

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)


class StepEnd:
    """Ends the steps of one run; keeps what has been evaluated, written and saved so far."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.garbage = Garbage(num_steps=trainer.max_steps)
        self.eval_logs: dict[str, float] = {}
        """The logs of the last evaluation, the test set's included; `evaluated_step` says when that was."""
        self.evaluated_step = -1
        self.reported: set[str] = set()
        """The names of those logs that the writers have been shown."""
        self.window_logs: dict[str, Any] = {}
        self.wants_save = False
        """Is a checkpoint of this step asked for, on every rank alike?"""
        self.asks_for_save = False
        """Does this rank ask for one? With several it is agreed on by the next votes."""
        self.is_evaluating = False
        """Is a step's own evaluation under way? It may be left and done again by a resumed run."""
        self.saved_step = -1
        self.written_step = 0
        """The last step that the writers have seen. After going back, steps up to it are not written twice."""
        self._has_warned = False
        self._nothing_before = 0
        """The next step of which the config's periods ask something."""

    @property
    def fresh_eval_logs(self) -> dict[str, float]:
        """What an evaluation of this very step gave."""
        return self.eval_logs if self.evaluated_step == self._trainer.step else {}

    def recall(self, logs: Mapping[str, float]) -> None:
        """Takes up the evaluation of the step that was restored, if it had one."""
        trainer = self._trainer
        self.eval_logs, self.evaluated_step = dict(logs), trainer.step if logs else -1
        self.reported = set() if trainer.has_unfinished_step else set(logs)

    def ask_for_save(self) -> None:
        """Asks for a checkpoint in the midst of a step."""
        if self._trainer.ranks.size == 1:
            self.wants_save = True
        else:
            self.asks_for_save = True

    def forget(self) -> None:
        """Forgets what belongs to steps that are undone: the run has gone back."""
        self.recall({})
        self.wants_save = self.asks_for_save = False
        self.saved_step = -1
        self._nothing_before = 0

    def agree(self) -> None:
        """Compares the ranks' wishes, and takes notice of checkpoints that were written meanwhile."""
        trainer = self._trainer
        checkpoints = trainer.checkpoints
        trainer.phases.enter("vote", trainer.step)
        if trainer.agreement.is_plain and checkpoints.is_idle and not self.asks_for_save:
            return
        checkpoints.look()
        if checkpoints.failure is not None:
            trainer.agreement.wish(Intent.FAIL, "saving failed")
        asks = self.asks_for_save or checkpoints.is_time()
        num_committed, is_time = trainer.agreement.vote(checkpoints.num_committed, asks)
        checkpoints.announce(num_committed)
        self.wants_save |= checkpoints.grants(is_time)
        if trainer.agreement.decided == Intent.FAIL:
            checkpoints.refuse_failure()

    def run(self) -> bool:
        """Ends the step under way; returns False if the run went back to an earlier one instead."""
        trainer = self._trainer
        if self._is_nothing_due():
            trainer.has_unfinished_step, trainer.ended_under, trainer.is_mid_step = False, 0, False
            self.garbage.tidy(is_due=False)
            return True
        trainer.is_mid_step = True
        # Before the host waits: the device still has work, which hides it.
        self.garbage.tidy(is_due=self._is_write_due)
        if self._must_look() and trainer.incident_response.went_back():
            return False
        try:
            self._evaluate_if_due()
        except EvaluationAbandoned:
            # The update is done and good; the run that goes on evaluates it anew.
            trainer.agreement.decided = Intent.INTERRUPT
            trainer.is_mid_step = False
            trainer.save()
            return True
        except Exception:
            # The update is done and good: keep it, then say what went wrong. Saving takes all ranks.
            trainer.is_mid_step = False
            if not trainer.ranks.is_alone:
                trainer.save()
            raise
        trainer.phases.enter("write", trainer.step)
        self._write_if_due()
        trainer.has_unfinished_step, trainer.ended_under = False, trainer.max_steps if trainer.is_last_step else 0
        trainer.is_mid_step = False
        self._save_if_due()
        if trainer.incident_response.is_snapshot_due:
            trainer.incident_response.take_snapshot()
        return True

    def _is_nothing_due(self) -> bool:
        """Is this a step like most: nothing to look at, evaluate, write or save? Asked in every step, so cheap."""
        trainer = self._trainer
        step = trainer.step
        watch = trainer.surroundings.updater.watch
        if step < self._nothing_before and step < trainer.max_steps and not trainer.agreement.decided:
            return not (self.wants_save or trainer.best.step == step or (watch is not None and watch.has_found))
        config = trainer.config
        periods = [config.log.every_steps, config.evaluation.every_steps, config.checkpoint.every_steps]
        if trainer.incident_response.may_go_back:
            periods.append(config.incidents.snapshot_every_steps)
        self._nothing_before = min(step - step % every + every for every in periods if every)
        if config.checkpoint.every_samples:
            self._nothing_before = 0
        return False

    def _must_look(self) -> bool:
        """Must incidents be known now? Where the device runs ahead, only before something leaves the step."""
        trainer = self._trainer
        return (
            reads_at_once(trainer.device)
            or self._is_evaluation_due
            or self._is_write_due
            or self._is_save_due
            or trainer.incident_response.is_snapshot_due
        )

    @property
    def _is_evaluation_due(self) -> bool:
        every = self._trainer.config.evaluation.every_steps
        return self._trainer.is_last_step or bool(every and self._trainer.step % every == 0)

    @property
    def _is_write_due(self) -> bool:
        return self._trainer.is_last_step or self._trainer.step % self._trainer.config.log.every_steps == 0

    @property
    def _is_save_due(self) -> bool:
        trainer = self._trainer
        return bool(
            self.wants_save
            or trainer.is_last_step
            or trainer.agreement.decided
            or trainer.checkpoints.is_due()
            or trainer.best.step == trainer.step
        )

    def _evaluate_if_due(self) -> None:
        if not self._is_evaluation_due:
            return
        trainer = self._trainer
        trainer.phases.enter("evaluate", trainer.step)
        if self.evaluated_step != trainer.step:
            logs: dict[str, float] = {}
            if trainer.eval_data:
                logs = self._evaluate(trainer.eval_data)
            self.eval_logs, self.evaluated_step, self.reported = logs, trainer.step, set()
            if logs:
                trainer.best.note(trainer.step, logs)
                # Evaluating has brought the ranks together, so a hook's wish to stop can be agreed on at once.
                trainer.agreement.settle()
        test = trainer.surroundings.test_data
        if trainer.is_last_step and test is not None and not any(name.startswith("test/") for name in self.eval_logs):
            self.eval_logs = {**self.eval_logs, **self._evaluate({test.name: test})}

    def _evaluate(self, sets: Mapping[str, EvaluationData]) -> dict[str, float]:
        self.is_evaluating = True
        try:
            return evaluate_sets(self._trainer, sets)
        finally:
            self.is_evaluating = False

    def _write_if_due(self) -> None:
        trainer = self._trainer
        logs: dict[str, Any] = {}
        if self._is_write_due:
            for name, count in (trainer.train_data.counts if trainer.train_data else {}).items():
                trainer.storage.put_scalar(f"samples/{name}", count, smoothing_hint=False)
            self.window_logs = summarise(merge(trainer.ranks.gather(trainer.storage.take_window())))
            logs = trainer.train_loop_end()
            self._warn_of_nan(logs)
            if not trainer.is_last_step:
                trainer.train_loop_begin()
        evaluated = {name: value for name, value in self.fresh_eval_logs.items() if name not in self.reported}
        if logs or evaluated:
            self.reported |= evaluated.keys()
            trainer.storage.publish(logs, evaluated=evaluated)
            if trainer.step > self.written_step or trainer.is_last_step:
                self.written_step = trainer.step
                for writer in trainer.surroundings.writers:
                    writer.write(trainer.storage)

    def _warn_of_nan(self, logs: Mapping[str, Any]) -> None:
        """Warns once of a loss in the log that is not finite; updates that an incident held back are such a case."""
        loss, trainer = logs.get("loss"), self._trainer
        if isinstance(loss, float) and not math.isfinite(loss) and not self._has_warned and trainer.ranks.is_first:
            self._has_warned = True
            logger.warning(
                "Step %d: the loss is %s. Lower the learning rate, or set trainer.max_grad_norm.", trainer.step, loss
            )

    def _save_if_due(self) -> None:
        trainer = self._trainer
        if self.wants_save or (self._is_save_due and (self.saved_step != trainer.step or trainer.ended_under)):
            trainer.save()
