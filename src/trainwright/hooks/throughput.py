"""Throughput and progress: seconds, samples and tokens per step, and totals since the first step of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from trainwright.events import Mean
from trainwright.hooks.flops import flops_per_token, known_peak, matmul_dtype
from trainwright.loop.hook import Hook


class TimeSteps(Hook):
    """Puts `seconds_per_step` and `samples_per_second`; for batches of tokens `tokens_per_second` and `mfu`.

    Time runs from the end of one update to the end of the next, without evaluating and saving. On a GPU the host runs
    ahead of the device and waits for it when a log line is written, so only the mean over several lines is meaningful.
    Tokens do not include padding (by `attention_mask`); rows of a dataset with `tokens_per_sample` count in full.
    `mfu` is the share of the device's peak FLOP/s (see the table in hooks/flops.py), computed from the number of
    parameters and of `input_ids`; it is omitted for unknown devices. With several replicas, `slowest_rank_share` is the
    share of a step in which ranks wait for the slowest one; it is omitted for ranks that share a model, because they
    wait inside the step.
    """

    def before_train(self) -> None:
        """Reads values that do not change during the run."""
        trainer = self.trainer
        assert trainer.train_data is not None
        self._data = trainer.train_data
        self._tokens_per_sample = getattr(self._data.dataset, "tokens_per_sample", None)
        self._num_ranks, self._num_data_ranks = trainer.ranks.size, trainer.ranks.mesh.num_data_ranks
        peak = known_peak(trainer.backend.describe(), matmul_dtype(trainer.model, trainer.config.runtime.precision))
        self._peak = None if peak is None else peak[1] * self._num_ranks
        self._flops_per_token = flops_per_token(trainer.model, trainer.ranks, trainer.context.updater.pipeline)
        self._measures_imbalance = self._num_ranks > 1 and not trainer.ranks.mesh.is_split
        self._worked = trainer.heartbeat.seconds_at_work()
        self._clock: float | None = None

    def before_step(self) -> None:
        """Starts the clock in the first step."""
        self._position = self._data.samples_seen
        if self._clock is None:
            self._clock = self._read_clock()

    def after_step(self) -> None:
        """Puts the rates of this step."""
        assert self._clock is not None
        now = self._read_clock()
        seconds, self._clock = now - self._clock, now
        # By position, because a step may use several batches, and the last one may be smaller.
        samples = self._data.samples_seen - self._position
        if not samples:  # a batch that was made without fetching one
            samples = self.trainer.batch.num_samples * self._num_data_ranks
        storage, batch = self.trainer.storage, self.trainer.batch.value
        # Means, because the rate of a window is all samples divided by all seconds, not a mean of rates.
        storage.put_metric("seconds_per_step", Mean(seconds, 1.0), 1.0)
        storage.put_metric("samples_per_second", Mean(samples, seconds), 1.0)
        tokens: Any = None
        if self._tokens_per_sample is not None:
            tokens = samples * int(self._tokens_per_sample)
        elif isinstance(batch, Mapping) and "input_ids" in batch:
            tokens = self._count_tokens(batch["input_ids"], batch.get("attention_mask"))
        if tokens is not None:
            storage.put_metric("tokens_per_second", Mean(tokens, seconds), 1.0)
            if self._peak is not None:
                storage.put_metric("mfu", Mean(tokens * self._flops_per_token, seconds * self._peak), 1.0)
        if self._measures_imbalance:
            worked = self.trainer.heartbeat.seconds_at_work()
            storage.put_imbalance("slowest_rank_share", worked - self._worked)
            self._worked = worked

    def _read_clock(self) -> float:
        """Returns the time, excluding evaluations and saves, including the current one.

        A resumed run may have evaluated and saved a step before its first one.
        """
        heartbeat = self.trainer.heartbeat
        phase, _, since = heartbeat.current
        pause = time.monotonic() - since if phase in ("evaluate", "save") else 0.0
        return time.perf_counter() - pause - heartbeat.seconds_in("evaluate") - heartbeat.seconds_in("save")

    def _count_tokens(self, input_ids: Any, mask: Any) -> torch.Tensor | int | None:
        """Returns the tokens of a step, assuming the same number on every data rank; counts padding on the device."""
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim < 2:
            return None
        is_masked = isinstance(mask, torch.Tensor) and mask.shape == input_ids.shape
        tokens: torch.Tensor | int = mask.sum() if is_masked else input_ids.numel()
        # The log line has the sum over ranks of tokens over the sum of seconds. A rank without samples has no tokens.
        return tokens * (self._num_data_ranks if self.trainer.batch.num_samples else 0)


_SECONDS_PER_HOUR = 3600.0


class CountProgress(Hook):
    """Puts `samples_seen`, `hours` and `anomalies`, and `tokens_seen` if samples have a fixed number of tokens.

    Each is a total since the first step of the run. `anomalies` counts updates with a wrong loss or gradient, also
    those that the config skips. `hours` is the training time, excluding the time between two starts.
    """

    def __init__(self) -> None:
        self._earlier_hours = 0.0
        self._start: float | None = None
        self._num_anomalies = 0

    def before_train(self) -> None:
        """Starts the clock."""
        data = self.trainer.train_data
        assert data is not None
        self._data = data
        self._tokens_per_sample = getattr(data.dataset, "tokens_per_sample", None)
        self._start = time.perf_counter()

    def after_step(self) -> None:
        """Puts the totals."""
        totals: dict[str, float] = {"samples_seen": self._data.samples_seen}
        if self._tokens_per_sample is not None:
            totals["tokens_seen"] = self._data.samples_seen * int(self._tokens_per_sample)
        self.trainer.storage.put_scalars({**totals, **self.state_dict()}, smoothing_hint=False)

    def on_anomaly(self, anomaly: Any) -> None:
        """Counts the anomaly; the line of the step is not yet written."""
        self._num_anomalies += 1
        self.trainer.storage.put_scalar("anomalies", self._num_anomalies, smoothing_hint=False)

    def state_dict(self) -> dict[str, Any]:
        """Returns the totals that only this hook has."""
        now = 0.0 if self._start is None else time.perf_counter() - self._start
        return {"hours": self._earlier_hours + now / _SECONDS_PER_HOUR, "anomalies": self._num_anomalies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the totals of a checkpoint; a run that rolls back keeps its own, which include that time."""
        if self._start is None:
            self._earlier_hours, self._num_anomalies = float(state["hours"]), int(state["anomalies"])
