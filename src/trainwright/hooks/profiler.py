"""Profiles some steps: torch's trace with named ranges, and a summary of where the time went."""

from __future__ import annotations

import gzip
import json
import logging
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.profiler import profile, record_function

from trainwright.backends.backend import AUTOCAST_DTYPES
from trainwright.backends.private_torch import tree_map_only
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.hooks.flops import (
    MatrixRate,
    TensorLike,
    can_count_aside,
    can_count_within,
    count_aside,
    estimate_flops,
    flop_counter,
    known_peak,
    measure_matrix_rate,
    wait_for,
)
from trainwright.loop.hook import Hook

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

PREFIX = "trainwright: "

LEFT_OUT = ("evaluate", "save")
"""What belongs to no step: a profile does not count it."""

_OF_PHASE = {
    "data": "data",
    "reduce": "communication",
    "update": "optimizer",
    "evaluate": "evaluate",
    "save": "save",
}
"""The name of a phase of the loop (loop/heartbeat.py); of the others it is `host`."""


class Ranges:
    """Names in the trace from `put_in` until `take_out`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # A replayed update has no parts that the host could tell apart.
        self._of_step = "replay" if trainer.config.runtime.mode == "graph" else "host"
        self._of_vote = "communication" if trainer.ranks.size > 1 else "host"
        self._open: record_function | None = None
        self._name = self._outer = "host"
        self._put: list[tuple[Any, str, Any]] = []
        self.num_tokens = 0
        """Those of this rank's batches so far, where batches have `input_ids`."""
        self.batch: Any = None
        """The first batch, with a `TensorLike` in each tensor's place."""

    def put_in(self) -> None:
        """Begins, between two steps."""
        trainer = self._trainer
        self._wrap(trainer.phases, "enter", self._enter_phase)
        self._wrap(trainer, "next_train_inputs", self._next_inputs)
        self._wrap(trainer, "run_forward", self._named("forward"))
        self._wrap(trainer.context.updater, "begin", self._begin_update)
        self._switch("host")

    def take_out(self) -> None:
        """Ends; the trainer is as it was."""
        for owner, name, before in reversed(self._put):
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
        self._put = []
        self._switch(None)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Puts `around` before a method of one object, not of its class; it gets the method and its arguments."""
        act = getattr(owner, name)
        self._put.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = lambda *arguments, **options: around(act, *arguments, **options)

    def _switch(self, name: str | None) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if name is not None:
            self._name = name
            self._open = record_function(PREFIX + name)
            self._open.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        """Names what is inside; afterwards comes the name of the phase that the loop is in by then."""
        if self._name in LEFT_OUT:  # the forward of an evaluation
            yield
            return
        self._switch(name)
        try:
            yield
        finally:
            if self._put:
                self._switch(self._outer)

    def _named(self, name: str) -> Callable[..., Any]:
        def call(act: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            with self._within(name):
                return act(*arguments, **options)

        return call

    def _enter_phase(self, enter: Callable[[str, int], None], phase: str, step: int) -> None:
        if phase == "step":
            self._outer = self._of_step
        elif phase == "vote":
            self._outer = self._of_vote
        else:
            self._outer = _OF_PHASE.get(phase, "host")
        self._switch(self._outer)
        enter(phase, step)

    def _next_inputs(self, act: Callable[..., Any], iterator: Iterator[Any]) -> Any:
        batch = act(iterator)
        if self.batch is None:
            self.batch = tree_map_only(torch.Tensor, lambda tensor: TensorLike(tensor.shape, tensor.dtype), batch)
        if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
            self.num_tokens += batch["input_ids"].numel()
        return batch

    def _begin_update(self, begin: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        update = begin(*arguments, **options)
        # The update lives for one step: nobody need take these out.
        for name, row in (("backward", "backward"), ("apply", "optimizer")):
            act, named = getattr(update, name), self._named(row)
            vars(update)[name] = lambda *given, act=act, named=named, **more: named(act, *given, **more)
        return update


ROWS = ("data", "host", "forward", "backward", "optimizer", "replay", "communication", "idle")
"""What a moment is shared out to.

data: the device, or on a CPU everything, waits for a batch; host: it waits for hooks, logs and the loop, or does what
they ask of it; replay: a recorded update as a whole; communication: only data of other ranks moves; idle: a GPU has
nothing to do although the host is within the update.
"""

_COMPUTE = ("forward", "backward", "optimizer", "replay")
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_MICROSECOND = 1e-6


@dataclass(frozen=True)
class Shares:
    """The seconds of each row, which add up to the whole; rows without any are missing."""

    seconds: Mapping[str, float]
    has_device: bool
    """Did a device of its own work, beside the host?"""

    @property
    def total(self) -> float:
        """The seconds of all rows: those of the profiled steps."""
        return sum(self.seconds.values())


class _Span(NamedTuple):
    start: float
    end: float
    row: str


def read_trace(path: Path) -> Shares:
    """Reads what torch's `export_chrome_trace` wrote, gzipped."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return share_out(json.load(file)["traceEvents"])


def share_out(events: Iterable[Mapping[str, Any]]) -> Shares:
    """Gives every moment between the first range's beginning and the last one's end to one row."""
    whole = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(
        _Span(float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]).removeprefix(PREFIX))
        for event in whole
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(PREFIX)
    )
    if not ranges:
        raise TrainwrightError("The trace has none of the ranges that a profile of steps puts into it.")
    on_device = _device_spans(whole, ranges)
    seconds = dict.fromkeys(ROWS, 0.0)
    has_device = bool(on_device)
    last = max([ranges[-1].end, *(span.end for span in on_device)])
    # While the device works on what is left to it, the host waits at the end.
    ranges.append(_Span(ranges[-1].end, last, "idle" if has_device else "host"))
    for length, host, active in _moments(ranges, on_device):
        if host not in LEFT_OUT:
            seconds[_row_of(host, active) if has_device else host] += length * _MICROSECOND
    return Shares({row: seconds[row] for row in ROWS if seconds[row] > 0}, has_device)


def _device_spans(events: list[Mapping[str, Any]], ranges: list[_Span]) -> list[_Span]:
    """Returns what ran on a device, each with the row of the range that launched it."""
    launched_at = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    starts = [span.start for span in ranges]
    spans = []
    for event in events:
        if event.get("cat") not in _ON_DEVICE:
            continue
        start = float(event["ts"])
        # One whose launch is not in the trace is taken to belong to what the host does when it begins.
        launched = launched_at.get(event.get("args", {}).get("correlation"), start)
        if launched < starts[0]:
            continue  # of the step before
        row = ranges[bisect_right(starts, launched) - 1].row
        if str(event["name"]).startswith(("nccl", "rccl")):
            row = row if row in LEFT_OUT else "communication"
        spans.append(_Span(start, start + float(event["dur"]), row))
    return spans


def _moments(ranges: list[_Span], on_device: list[_Span]) -> Iterable[tuple[float, str, Counter[str]]]:
    """Yields, for each stretch in which nothing begins or ends, its length, the host's row and the device's rows."""
    marks: list[tuple[float, int, str, int]] = [(span.start, 0, span.row, 0) for span in ranges]
    marks += [(span.start, 1, span.row, 1) for span in on_device]
    marks += [(span.end, 1, span.row, -1) for span in on_device]
    marks.append((ranges[-1].end, 2, "", 0))
    marks.sort()
    active: Counter[str] = Counter()
    host, before = ranges[0].row, ranges[0].start
    for moment, kind, row, change in marks:
        if moment > before:
            yield moment - before, host, active
            before = moment
        if kind == 0:
            host = row
        else:
            active[row] += change


def _row_of(host: str, active: Counter[str]) -> str:
    """The row of a moment on a device: what it computes, else what it moves, else whom it waits for."""
    for row in (*_COMPUTE, "communication", "data", "host"):
        if active[row] > 0:
            return row
    return host if host in ("data", "host") else "idle"


_LABELS = {
    "data": ("data wait", "no batch was there in time"),
    "host": ("host", "hooks, logs and the loop itself"),
    "forward": ("forward", ""),
    "backward": ("backward", ""),
    "optimizer": ("optimizer", "clipping and judging included"),
    "replay": ("update", "recorded: forward, backward and optimizer in one"),
    "communication": ("communication", "with other ranks, and nothing computed meanwhile"),
    "idle": ("idle", "the device waited for its next kernel"),
}
_BAR = 30
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


@dataclass(frozen=True)
class ProfileSummary:
    """The figures of one profile, on the rank that made it."""

    first_step: int
    last_step: int
    shares: Shares
    seconds_per_step: float
    """Without the profiler, where some steps before it were timed."""
    is_timed: bool
    """Were they? Else the seconds are those of the profiled steps, which are slower."""
    samples_per_step: float
    """Over all ranks, as the tokens are."""
    tokens_per_step: float | None
    flops_per_step: int | None
    """Of this rank; None where nobody knows."""
    is_counted: bool
    """Were they counted? Else they are estimated, by parameters and tokens."""
    matrix_rate: MatrixRate
    known_peak: tuple[str, float] | None
    """The device's name in the table of known peaks, and its FLOP/s; None: it is not in it."""
    trace: Path

    @property
    def num_steps(self) -> int:
        """How many steps were profiled."""
        return self.last_step - self.first_step + 1

    def percentages(self) -> dict[str, float]:
        """Returns each row's share in tenths of a percent, rounded so that they add up to 100."""
        return round_to_hundred({row: self.shares.seconds.get(row, 0.0) for row in ROWS if self._shows(row)})

    def utilization(self, flops_per_second: float) -> float | None:
        """Returns which share of a rate a step reaches; None where its operations are unknown."""
        if self.flops_per_step is None:
            return None
        return self.flops_per_step / self.seconds_per_step / flops_per_second

    def text(self) -> str:
        """Returns all of it as lines for a terminal."""
        profiled = self.shares.total / self.num_steps
        without = f"; {_duration(self.seconds_per_step)} without the profiler" if self.is_timed else ""
        lines = [f"Profile of steps {self.first_step} to {self.last_step}: {_duration(profiled)} a step{without}"]
        for row, percent in self.percentages().items():
            label, remark = _LABELS[row]
            bar = "█" * round(percent / 100 * _BAR)
            lines.append(f"  {label:<13} {percent:5.1f} %  {bar:<{_BAR}}  {remark}".rstrip())
        if {"replay", "forward"} <= self.shares.seconds.keys():
            lines.append("  Not all of these steps were replays: profile later ones (hook profiler, first: …).")
        return "\n".join([*lines, *self._speed_lines(), f"  trace: {self.trace} (open it at ui.perfetto.dev)"])

    def to_dict(self) -> dict[str, object]:
        """Returns the figures for a JSON file."""
        peak = self.known_peak
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "percent": self.percentages(),
            "seconds_per_step": self.seconds_per_step,
            "seconds_per_profiled_step": self.shares.total / self.num_steps,
            "samples_per_second": self.samples_per_step / self.seconds_per_step,
            "tokens_per_second": None if self.tokens_per_step is None else self.tokens_per_step / self.seconds_per_step,
            "flops_per_step": self.flops_per_step,
            "is_counted": self.is_counted,
            "matrix_flops_per_second": self.matrix_rate.flops_per_second,
            "matrix_dtype": str(self.matrix_rate.dtype).removeprefix("torch."),
            "share_of_matrix_rate": self.utilization(self.matrix_rate.flops_per_second),
            "known_peak_flops_per_second": None if peak is None else peak[1],
            "share_of_known_peak": None if peak is None else self.utilization(peak[1]),
        }

    def _shows(self, row: str) -> bool:
        if row in ("forward", "backward", "optimizer"):
            return "replay" not in self.shares.seconds or row in self.shares.seconds
        return row != "replay" or row in self.shares.seconds

    def _speed_lines(self) -> list[str]:
        speeds = [f"{self.samples_per_step / self.seconds_per_step:,.1f} samples/s"]
        if self.tokens_per_step is not None:
            speeds.append(f"{self.tokens_per_step / self.seconds_per_step:,.0f} tokens/s")
        measured, dtype = self.matrix_rate, str(self.matrix_rate.dtype).removeprefix("torch.")
        if self.flops_per_step is None:
            speeds.append("FLOP/s unknown: a step's operations could not be counted")
            return [f"  {', '.join(speeds)}"]
        reached = self.flops_per_step / self.seconds_per_step
        how = "" if self.is_counted else ", estimated: 6 × parameters × tokens"
        speeds.append(f"{_amount(reached)}FLOP/s ({_amount(self.flops_per_step)}FLOP a step and rank{how})")
        share = self.utilization(measured.flops_per_second)
        lines = [
            f"  {', '.join(speeds)}",
            f"  MFU {share:6.1%} of the {_amount(measured.flops_per_second)}FLOP/s measured here, {dtype} matrices "
            f"of {measured.size} × {measured.size}",
        ]
        if self.known_peak is None:
            return [*lines, f"  MFU unknown of the vendor's peak: this device and {dtype} are not in the table"]
        word, peak = self.known_peak
        return [
            *lines,
            f"  MFU {self.utilization(peak):6.1%} of {_amount(peak)}FLOP/s, the vendor's peak of {word}, dense",
        ]


def round_to_hundred(amounts: Mapping[str, float]) -> dict[str, float]:
    """Returns each amount as a percentage of their sum in tenths; those that lose most by rounding are rounded up.

    >>> round_to_hundred({"a": 1.0, "b": 1.0, "c": 1.0})
    {'a': 33.4, 'b': 33.3, 'c': 33.3}
    """
    total = sum(amounts.values()) or 1.0
    exact = {name: 1000 * amount / total for name, amount in amounts.items()}
    tenths = {name: int(value) for name, value in exact.items()}
    missing = round(sum(exact.values())) - sum(tenths.values())
    for name in sorted(exact, key=lambda name: tenths[name] - exact[name])[:missing]:
        tenths[name] += 1
    return {name: tenth / 10 for name, tenth in tenths.items()}


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _amount(number: float) -> str:
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.4g} "


PROFILE_FOLDER = "profile"


class Profiler(Hook):
    """Profiles `steps` steps after `first` others of this start have gone by.

    Of those others the second half is timed, for the profiler itself takes time. Every rank writes
    RUN/profile/steps-A-B-rank-R.json.gz; the first says what is in its own, and writes it to RUN/profile/summary.txt
    and summary.json. A run that ends sooner is profiled as far as it goes.
    """

    def __init__(self, first: int = 10, steps: int = 10) -> None:
        for name, value, least in (("first", first, 0), ("steps", steps, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"profiler: {name} is {value!r}. Give a whole number, at least {least}.")
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
                "profiler: %d steps are left, so %d are profiled after %d others instead of %d after %d.",
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
        self._position = self.trainer.train_data.samples_seen
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
        return self.trainer.train_data.samples_seen - self._position

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
