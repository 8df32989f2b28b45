"""Profiles some steps of a run: writes torch's trace of them, and a summary of where the time went.

`trainwright train --profile` adds this hook. What is put into the trace is profile_ranges.py's, what is read from it
profile_trace.py's; operations are counted by count_flops.py; the text is profile_summary.py's.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from trainwright.backends.backend import AUTOCAST_DTYPES
from trainwright.errors import ConfigError
from trainwright.hooks.count_flops import (
    can_count_aside,
    can_count_within,
    count_aside,
    estimate_flops,
    flop_counter,
)
from trainwright.hooks.matrix_rate import known_peak, measure_matrix_rate, wait_for
from trainwright.hooks.profile_ranges import LEFT_OUT, Ranges
from trainwright.hooks.profile_summary import ProfileSummary
from trainwright.hooks.profile_trace import read_trace
from trainwright.loop.hook import Hook

logger = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"


class ProfileSteps(Hook):
    """Profiles `steps` steps after `first` others of this start have gone by.

    Of those others the second half is timed, for the profiler itself takes time. Every rank writes
    RUN/profile/steps-A-B-rank-R.json.gz; the first says what is in its own, and writes it to RUN/profile/summary.txt
    and summary.json. A run that ends sooner is profiled as far as it goes.
    """

    def __init__(self, first: int = 10, steps: int = 10) -> None:
        for name, value, least in (("first", first, 0), ("steps", steps, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"profile_steps: {name} is {value!r}. Give a whole number, at least {least}.")
        self._first, self._num_steps = first, steps
        self._begin = self._end = self._timed_from = -1
        self._counter: Any = None
        self._counted_flops: int | None = None
        self._timed: tuple[float, int] | None = None
        self._clock = 0.0
        self._position = 0
        self._left_out = 0.0
        self._start = 0
        self._counts_first = False
        self._profile: Any = None
        self._ranges: Ranges | None = None
        self._has_begun = False

    def before_train(self) -> None:
        """Decides which steps are profiled."""
        trainer = self.trainer
        left = trainer.max_steps - trainer.step
        steps = min(self._num_steps, max(left - 1, 1))
        first = min(self._first, left - steps)
        self._begin, self._end = trainer.step + first, trainer.step + first + steps
        self._timed_from = self._begin - first // 2
        self._counts_first = first > 0 and not can_count_aside(trainer) and can_count_within(trainer)
        self._start = trainer.step
        if (first, steps) != (self._first, self._num_steps):
            logger.info(
                "profile_steps: %d steps are left, so %d are profiled after %d others instead of %d after %d.",
                *(left, steps, first, self._num_steps, self._first),
            )

    def before_step(self) -> None:
        """Begins what begins with this step: counting, timing, profiling."""
        step = self.trainer.step
        if step > self._begin or self._has_begun:  # a run may go back, but is profiled once
            return
        if step == self._start and self._counts_first:
            self._counter = flop_counter()
            self._counter.__enter__()
        if step == self._timed_from < self._begin:
            self._start_clock()
        if step == self._begin:
            if self._timed_from < self._begin:
                self._timed = (self._stop_clock(), self._num_samples_since())
            self._begin_profile()

    def after_step(self) -> None:
        """Ends what this step ends."""
        if self._counter is not None:
            counter, self._counter = self._counter, None
            counter.__exit__(None, None, None)
            self._counted_flops = int(counter.get_total_flops())
        if self.trainer.step == self._end and self._ranges is not None:
            self._finish()

    def after_train(self) -> None:
        """Ends a profile that the run's end has cut short."""
        if self._ranges is not None:
            self._finish()

    def close(self) -> None:
        """Leaves no counter, profiler or range behind, whatever happened."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None
        if self._ranges is not None:
            self._ranges.take_out()
            self._profile.stop_trace()
            self._ranges = self._profile = None

    def _start_clock(self) -> None:
        wait_for(self.trainer.device)
        assert self.trainer.train_data is not None
        self._position = self.trainer.train_data.position
        self._left_out = self._seconds_left_out()
        self._clock = time.perf_counter()

    def _stop_clock(self) -> float:
        """Returns the seconds since `_start_clock`, without evaluating and saving."""
        wait_for(self.trainer.device)
        return time.perf_counter() - self._clock - (self._seconds_left_out() - self._left_out)

    def _seconds_left_out(self) -> float:
        return sum(self.trainer.phases.seconds_in(phase) for phase in LEFT_OUT)

    def _num_samples_since(self) -> int:
        assert self.trainer.train_data is not None
        return self.trainer.train_data.position - self._position

    def _begin_profile(self) -> None:
        self._has_begun = True
        # Above all that torch's profiler says of itself on stderr; it reads this when it is first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = profile()
        # Preparing takes seconds on a GPU, which the trace then does not have.
        self._profile.prepare_trace()
        self._start_clock()
        self._profile.start_trace()
        self._ranges = Ranges(self.trainer)
        self._ranges.put_in()

    def _finish(self) -> None:
        ranges, profiled = self._ranges, self._profile
        assert ranges is not None
        ranges.take_out()
        wait_for(self.trainer.device)
        profiled.stop_trace()
        self._ranges = self._profile = None
        first, last = self._begin + 1, self.trainer.step
        folder = self.trainer.folder / PROFILE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"steps-{first}-{last}-rank-{self.trainer.ranks.rank}.json.gz"
        profiled.export_chrome_trace(str(path))
        if self.trainer.ranks.is_first:
            summary = self._summarise(path, ranges, first, last)
            (folder / "summary.txt").write_text(summary.text() + "\n", encoding="utf-8")
            (folder / "summary.json").write_text(json.dumps(summary.to_dict(), indent=2) + "\n", encoding="utf-8")
            logger.info("%s", summary.text())

    def _summarise(self, trace: Path, ranges: Ranges, first: int, last: int) -> ProfileSummary:
        trainer, shares, num_steps = self.trainer, read_trace(trace), last - first + 1
        num_samples = self._num_samples_since()
        seconds, samples = shares.total / num_steps, num_samples / num_steps
        if self._timed is not None:
            num_timed = self._begin - self._timed_from
            seconds, samples = self._timed[0] / num_timed, self._timed[1] / num_timed
        tokens = self._tokens_per_step(ranges, num_samples, samples)
        flops = self._counted_flops
        if flops is None and can_count_aside(trainer):
            flops = count_aside(trainer, ranges.batch)
        dtype = _dtype_of_products(trainer.model, trainer.config.runtime.precision)
        return ProfileSummary(
            first_step=first,
            last_step=last,
            shares=shares,
            seconds_per_step=seconds,
            is_timed=self._timed is not None,
            samples_per_step=samples,
            tokens_per_step=tokens,
            flops_per_step=estimate_flops(trainer, tokens) if flops is None else flops,
            is_counted=flops is not None,
            matrix_rate=measure_matrix_rate(trainer.device, dtype),
            known_peak=known_peak(trainer.backend.describe(), dtype),
            trace=trace,
        )

    def _tokens_per_step(self, ranges: Ranges, num_samples: int, samples_per_step: float) -> float | None:
        """Returns the tokens of a step over all ranks: by the dataset's word, else as the profiled batches had."""
        assert self.trainer.train_data is not None
        per_sample = getattr(self.trainer.train_data.dataset, "tokens_per_sample", None)
        if per_sample is None and ranges.num_tokens and num_samples:
            per_sample = ranges.num_tokens * self.trainer.ranks.mesh.num_data_ranks / num_samples
        return None if per_sample is None else float(per_sample) * samples_per_step


def _dtype_of_products(model: torch.nn.Module, precision: str) -> torch.dtype:
    """Returns what most matrix products of a forward are computed in."""
    if precision in AUTOCAST_DTYPES:
        return AUTOCAST_DTYPES[precision]
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.float32
