"""Throughput and progress: seconds, samples and tokens per step, and totals since the first step of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainwright.loop.hook import Hook


class TimeSteps(Hook):
    """Puts `seconds_per_step` and `samples_per_second`, and `tokens_per_second` where samples have a fixed length.

    From before the batch is fetched until after the update: evaluating, writing and saving do not count.
    On a GPU the host runs ahead of the device, so only the mean over a log window says something.
    """

    def before_train(self) -> None:
        """Looks up how many tokens a sample has."""
        data = self.trainer.train_data
        assert data is not None
        self._data = data
        self._tokens_per_sample = getattr(data.dataset, "tokens_per_sample", None)

    def before_step(self) -> None:
        """Starts the clock."""
        self._position = self._data.samples_seen
        self._start = time.perf_counter()

    def after_step(self) -> None:
        """Stops the clock."""
        seconds = time.perf_counter() - self._start
        # By position, for a step may take several batches, and the last one may be smaller.
        samples = self._data.samples_seen - self._position
        storage = self.trainer.storage
        storage.put_timing("seconds_per_step", seconds, 1.0)
        # Totals, so that a window's speed is all its samples over all its seconds, not a mean of speeds.
        storage.put_timing("samples_per_second", samples, seconds)
        if self._tokens_per_sample is not None:
            storage.put_timing("tokens_per_second", samples * int(self._tokens_per_sample), seconds)


_SECONDS_PER_HOUR = 3600.0


class CountProgress(Hook):
    """Puts `samples_seen`, `hours` and `anomalies`, and `tokens_seen` where samples have a fixed length.

    Each is the sum since the run's first step. `anomalies` counts updates whose loss or gradient went wrong: a step
    that is not finite shows there, also where the config lets it be skipped. Hours are those of training, without the
    time between two starts.
    """

    def __init__(self) -> None:
        self._earlier_hours = 0.0
        self._start: float | None = None
        self._num_anomalies = 0

    def before_train(self) -> None:
        """Starts the clock, and looks up how many tokens a sample has."""
        data = self.trainer.train_data
        assert data is not None
        self._data = data
        self._tokens_per_sample = getattr(data.dataset, "tokens_per_sample", None)
        self._start = time.perf_counter()

    def after_step(self) -> None:
        """Puts the sums."""
        sums: dict[str, float] = {"samples_seen": self._data.samples_seen}
        if self._tokens_per_sample is not None:
            sums["tokens_seen"] = self._data.samples_seen * int(self._tokens_per_sample)
        sums |= {"hours": self._hours(), "anomalies": self._num_anomalies}
        self.trainer.storage.put_scalars(sums, smoothing_hint=False)

    def on_anomaly(self, anomaly: Any) -> None:
        """Counts it; the step's line is not written yet."""
        self._num_anomalies += 1
        self.trainer.storage.put_scalar("anomalies", self._num_anomalies, smoothing_hint=False)

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums that nobody else keeps."""
        return {"hours": self._hours(), "anomalies": self._num_anomalies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the sums of a checkpoint; a run that goes back keeps its own, for it has used them up."""
        if self._start is None:
            self._earlier_hours, self._num_anomalies = float(state["hours"]), int(state["anomalies"])

    def _hours(self) -> float:
        now = 0.0 if self._start is None else time.perf_counter() - self._start
        return self._earlier_hours + now / _SECONDS_PER_HOUR
