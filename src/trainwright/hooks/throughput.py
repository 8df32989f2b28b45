"""Throughput and progress: seconds, samples and tokens per step, and totals since the first step of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from trainwright.hooks.flops import flops_per_token, known_peak, matmul_dtype
from trainwright.loop.hook import Hook


class TimeSteps(Hook):
    """Puts `seconds_per_step` and `samples_per_second`; for batches of tokens `tokens_per_second` and `mfu`.

    Time runs from before the batch is fetched until after the update, without evaluating, writing and saving. On a GPU
    the host runs ahead of the device, so only the mean over a log window is meaningful. Tokens do not include padding.
    `mfu` is the share of the device's peak FLOP/s (hooks/flops.py has the table) that the model's parameters account
    for; it is left out for unknown devices. With several ranks `slowest_rank_share` is the share of a step in which
    ranks wait for the slowest one.
    """

    def before_train(self) -> None:
        """Looks up what does not change during the run."""
        trainer = self.trainer
        assert trainer.train_data is not None
        self._data = trainer.train_data
        self._tokens_per_sample = getattr(self._data.dataset, "tokens_per_sample", None)
        self._num_ranks = trainer.ranks.size
        peak = known_peak(trainer.backend.describe(), matmul_dtype(trainer.model, trainer.config.runtime.precision))
        self._peak = None if peak is None else peak[1] * self._num_ranks
        self._flops_per_token = flops_per_token(trainer.model, trainer.ranks)
        self._worked = trainer.heartbeat.seconds_at_work()

    def before_step(self) -> None:
        """Starts the clock."""
        self._position = self._data.position
        self._start = time.perf_counter()

    def after_step(self) -> None:
        """Stops the clock."""
        seconds = time.perf_counter() - self._start
        # By position: a step may take several batches, and the last one may be smaller.
        samples = self._data.position - self._position
        storage = self.trainer.storage
        storage.put_timing("seconds_per_step", seconds, 1.0)
        # Totals: the rate of a window is all its samples over all its seconds, not a mean of rates.
        storage.put_timing("samples_per_second", samples, seconds)
        batch = self.trainer.batch.value
        has_tokens = self._tokens_per_sample is not None or (isinstance(batch, Mapping) and "input_ids" in batch)
        tokens = self._count_tokens(samples) if has_tokens else None
        if tokens is not None:
            storage.put_timing("tokens_per_second", tokens, seconds)
            if self._peak is not None:
                storage.put_timing("mfu", tokens * self._flops_per_token, seconds * self._peak)
        if self._num_ranks > 1:
            worked = self.trainer.heartbeat.seconds_at_work()
            storage.put_spread("slowest_rank_share", worked - self._worked)
            self._worked = worked

    def _count_tokens(self, samples: int) -> Any:
        """Returns the tokens of a step over all ranks, on the device if they are counted there; None without tokens."""
        if self._tokens_per_sample is not None:
            return samples * int(self._tokens_per_sample)
        batch = self.trainer.batch
        tokens, mask = batch.value.get("input_ids"), batch.value.get("attention_mask")
        if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
            return None
        # Ranks may have different numbers of tokens; the log line holds their sum over the sum of their seconds.
        is_masked = isinstance(mask, torch.Tensor) and mask.shape == tokens.shape
        own: Any = mask.sum() if is_masked and mask is not None else tokens.numel()
        return own * (self.trainer.ranks.mesh.num_data_ranks if batch.num_samples else 0)


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
        sums: dict[str, float] = {"samples_seen": self._data.position}
        if self._tokens_per_sample is not None:
            sums["tokens_seen"] = self._data.position * int(self._tokens_per_sample)
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
