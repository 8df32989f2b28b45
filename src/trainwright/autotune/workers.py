"""Measures the time that a step waits for data with a number of loader processes, and selects a number.

`DataWait` is a hook that measures one number in a trial run; api/tune.py runs one trial for each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.autotune.trial_run import TrialEnded
from trainwright.loop.hook import Hook

ENOUGH = 0.05
"""The share of a step that may be spent waiting for data."""
WARMUP_STEPS = 3
"""Steps that are not measured: processes start, and caches are filled."""


@dataclass(frozen=True)
class WorkerTime:
    """The mean over the measured steps with this number of loader processes."""

    num_workers: int
    wait_seconds: float
    """Time per step in which the loop waits for its batch."""
    step_seconds: float
    """Time per step, including the wait."""

    @property
    def share(self) -> float:
        """The share of a step that is spent waiting."""
        return self.wait_seconds / self.step_seconds


class DataWait(Hook):
    """Measures a number of steps after the first few, then ends the trial.

    On a GPU, the host fetches a batch while the device is still computing, so the wait is an upper bound for the
    device.
    """

    def __init__(self, num_workers: int, num_steps: int) -> None:
        self._num_workers = num_workers
        self._num_steps = num_steps
        self._waited = self._clock = 0.0
        self.time: WorkerTime | None = None
        """The result, once the trial has ended."""

    def after_step(self) -> None:
        """Starts the clock after the first steps, and reads it after the last one."""
        trainer = self.trainer
        if trainer.step == WARMUP_STEPS:
            trainer.storage.latest()  # waits for the device
            self._waited, self._clock = trainer.heartbeat.seconds_in("data"), time.perf_counter()
        if trainer.step == WARMUP_STEPS + self._num_steps:
            trainer.storage.latest()
            waited, seconds = trainer.heartbeat.seconds_in("data") - self._waited, time.perf_counter() - self._clock
            self.time = WorkerTime(self._num_workers, waited / self._num_steps, seconds / self._num_steps)
        if self.time is not None or trainer.stop_reason is not None:
            raise TrialEnded


def enough_workers(times: Sequence[WorkerTime]) -> WorkerTime:
    """Returns the smallest number with a negligible wait for data, or the one with the shortest step."""
    enough = [each for each in times if each.share <= ENOUGH]
    if enough:
        return min(enough, key=lambda each: each.num_workers)
    return min(times, key=lambda each: each.step_seconds)
