"""Profiles some steps: torch's trace with named ranges, and a summary of how the time is spent."""

from __future__ import annotations

import gzip
import json
import logging
import os
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.profiler import profile

from trainwright.backends import waits_for_memory
from trainwright.backends.backend import AUTOCAST_DTYPES
from trainwright.backends.private_torch import tree_map_only
from trainwright.compile.graph import uncaptured_axes
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.hooks.costs import (
    KERNEL_COSTS,
    LABELS,
    Cost,
    RunProperties,
    divide_by_operators,
    kernel_cost,
    largest_costs,
    own_seconds,
)
from trainwright.hooks.flops import (
    MatrixRate,
    TensorLike,
    can_count_aside,
    can_count_within,
    count_aside,
    estimate_flops,
    flop_counter,
    known_peak,
    matmul_dtype,
    measure_matrix_rate,
    wait_for,
)
from trainwright.loop.heartbeat import PHASES, PhaseTrace
from trainwright.loop.hook import Hook
from trainwright.models.fp8 import gains_from_fp8
from trainwright.user_code.locations import is_user_code

logger = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"
NOT_COUNTED = ("evaluate", "save")
"""Phases that are not part of a step."""
ROWS = {
    "data": ("data wait", "no batch was ready in time"),
    "host": ("host", "hooks, logs and the loop itself"),
    "forward": ("forward", ""),
    "backward": ("backward", ""),
    "optimizer": ("optimizer", "including clipping and anomaly detection"),
    "replay": ("update", "captured: forward, backward and optimizer in one"),
    "communication": ("communication", "with other ranks, without computing at the same time"),
    "idle": ("idle", "the device waited for its next kernel"),
}
"""The rows of a summary, with label and remark.

data: the device, or on a CPU everything, waits for a batch; host: it waits for hooks, logs and the loop, or runs their
kernels; idle: a GPU has no work although the host is inside the update.
"""
_ROWS_OF_PHASES = {
    "data": "data",
    "reduce": "communication",
    "update": "optimizer",
    "evaluate": "evaluate",
    "save": "save",
}
"""The row of a phase of the loop (loop/heartbeat.py); the row of other phases is `host`."""

_COMPUTE = ("forward", "backward", "optimizer", "replay")
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_MICROSECOND = 1e-6
_BAR = 30
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


@dataclass(frozen=True)
class Shares:
    """The seconds of each row, without rows that have none."""

    seconds: Mapping[str, float]
    has_device: bool
    """True if a device other than the host ran kernels."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """The same seconds by cost (costs.py): kernels by name instead of by the operation that launched them."""

    @property
    def total(self) -> float:
        """The seconds of all rows: the duration of the profiled steps."""
        return sum(self.seconds.values())


class _Span(NamedTuple):
    start: float
    end: float
    row: str
    cost: str = ""
    """Of a kernel."""


def share_out(events: Iterable[Mapping[str, Any]], rows: Mapping[str, str] | None = None) -> Shares:
    """Assigns every instant of a torch trace to one row; `rows` are further rows of phases."""
    row_of = {**dict.fromkeys(PHASES, "host"), **_ROWS_OF_PHASES, **(rows or {})}
    prefix = PhaseTrace.PREFIX
    complete = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(
        _Span(float(event["ts"]), float(event["ts"]) + float(event["dur"]), row_of.get(name, name))
        for event in complete
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(prefix)
        for name in [str(event["name"]).removeprefix(prefix)]
    )
    if not ranges:
        raise TrainwrightError("The trace has no ranges of the profiler hook.")
    on_device = _device_spans(complete, ranges)
    has_device = bool(on_device)
    last = max([ranges[-1].end, *(span.end for span in on_device)])
    # While the device completes its work, the host waits at the end.
    ranges.append(_Span(ranges[-1].end, last, "idle" if has_device else "host"))
    seconds, costs = dict.fromkeys(ROWS, 0.0), dict.fromkeys(LABELS, 0.0)
    for length, host, active in _intervals(ranges, on_device):
        if host not in NOT_COUNTED:
            row = _row_of(host, active) if has_device else host
            seconds[row] += length * _MICROSECOND
            if has_device:
                costs[_cost_of(row, active)] += length * _MICROSECOND
    if not has_device:
        costs.update(_costs_of_operators(complete, ranges, seconds))
    return Shares(
        {row: value for row, value in seconds.items() if value > 0},
        has_device,
        {cost: value for cost, value in costs.items() if value > 0},
    )


def _costs_of_operators(
    events: list[Mapping[str, Any]], ranges: list[_Span], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Returns the seconds of each cost on a CPU: computing rows are divided by their operators."""
    starts = [span.start for span in ranges]
    operators: dict[str, list[tuple[str, float]]] = {row: [] for row in _COMPUTE}
    for start, name, own in own_seconds(events):
        number = bisect_right(starts, start) - 1
        if number >= 0 and ranges[number].row in operators:
            operators[ranges[number].row].append((name, own * _MICROSECOND))
    costs: dict[str, float] = defaultdict(float)
    for row, value in seconds.items():
        is_divided = row in ("forward", "backward", "replay")
        for cost, part in (divide_by_operators(value, operators[row]) if is_divided else {row: value}).items():
            costs[cost] += part
    return costs


class _KernelCosts(dict[str, str]):
    """The cost of each kernel by name, because a trace has thousands of events of some hundred kernels."""

    def __missing__(self, name: str) -> str:
        self[name] = kernel_cost(name)
        return self[name]


def _device_spans(events: list[Mapping[str, Any]], ranges: list[_Span]) -> list[_Span]:
    """Returns the work of the device, each span with the row of the range that launched it."""
    launched_at = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    starts = [span.start for span in ranges]
    spans = []
    cost_of = _KernelCosts()
    for event in events:
        if event.get("cat") not in _ON_DEVICE:
            continue
        start = float(event["ts"])
        # Without its launch in the trace, it belongs to the range in which it starts.
        launched = launched_at.get(event.get("args", {}).get("correlation"), start)
        if launched < starts[0]:
            continue  # of the previous step
        row = ranges[bisect_right(starts, launched) - 1].row
        if str(event["name"]).startswith(("nccl", "rccl")) and row not in NOT_COUNTED:
            row = "communication"
        spans.append(_Span(start, start + float(event["dur"]), row, cost_of[str(event["name"])]))
    return spans


def _intervals(ranges: list[_Span], on_device: list[_Span]) -> Iterator[tuple[float, str, _Active]]:
    """Yields length, row of the host and active kernels of the device for each interval without a start or an end."""
    marks: list[tuple[float, int, str, str, int]] = [(span.start, 0, span.row, "", 0) for span in ranges]
    marks += [(span.start, 1, span.row, span.cost, 1) for span in on_device]
    marks += [(span.end, 1, span.row, span.cost, -1) for span in on_device]
    marks.append((ranges[-1].end, 1, "", "", 0))
    marks.sort()
    active: _Active = Counter()
    host, before = ranges[0].row, ranges[0].start
    for now, is_device, row, cost, change in marks:
        if now > before:
            yield now - before, host, active
            before = now
        if is_device:
            active[row, ""] += change
            active[row, cost] += change
        else:
            host = row


_Active: TypeAlias = "Counter[tuple[str, str]]"
"""The number of active kernels by row and cost; by row alone with an empty cost."""


def _row_of(host: str, active: _Active) -> str:
    """Returns the row of an interval on a device: that of its computation, its copy, or its wait, in this order."""
    for row in (*_COMPUTE, "communication", "data", "host"):
        if active[row, ""] > 0:
            return row
    return host if host in ("data", "host") else "idle"


def _cost_of(row: str, active: _Active) -> str:
    """Returns the cost of an interval: that of its kernel in forward, backward and replays, otherwise its row."""
    if row not in ("forward", "backward", "replay"):
        return row
    return next((cost for cost in KERNEL_COSTS if active[row, cost] > 0), "other")


@dataclass(frozen=True)
class ProfileSummary:
    """The figures of one profile, of the rank that recorded it."""

    first_step: int
    last_step: int
    shares: Shares
    seconds_per_step: float
    """Without the profiler if `is_timed`, otherwise of the profiled steps, which are slower."""
    is_timed: bool
    samples_per_step: float
    """Over all ranks, as `tokens_per_step`."""
    tokens_per_step: float | None
    flops_per_step: int | None
    """Of this rank; None if unknown."""
    is_counted: bool
    """False if the operations are estimated from parameters and tokens."""
    matrix_rate: MatrixRate
    known_peak: tuple[str, float] | None
    """The device's name in the table of known peaks, and its FLOP/s; None if it is not in the table."""
    trace: Path
    facts: RunProperties = field(default_factory=RunProperties)
    """The settings of the run, for advice."""

    def costs(self) -> list[Cost]:
        """Returns the three largest costs with the setting that addresses each."""
        return largest_costs(round_to_hundred(self.shares.costs), self.facts)

    @property
    def seconds_per_profiled_step(self) -> float:
        """The duration of a step with the profiler."""
        return self.shares.total / (self.last_step - self.first_step + 1)

    def percentages(self) -> dict[str, float]:
        """Returns the share of each row in tenths of a percent; they add up to 100."""
        seconds = self.shares.seconds
        hidden = ("forward", "backward", "optimizer") if "replay" in seconds else ("replay",)
        return round_to_hundred({row: seconds.get(row, 0.0) for row in ROWS if row in seconds or row not in hidden})

    def utilization(self, flops_per_second: float) -> float | None:
        """Returns the share of a rate that a step reaches; None if its operations are unknown."""
        if self.flops_per_step is None:
            return None
        return self.flops_per_step / self.seconds_per_step / flops_per_second

    def text(self) -> str:
        """Returns the summary as lines for a terminal."""
        without = f"; {_duration(self.seconds_per_step)} without the profiler" if self.is_timed else ""
        duration = _duration(self.seconds_per_profiled_step)
        lines = [f"Profile of steps {self.first_step} to {self.last_step}: {duration} a step{without}"]
        for row, percent in self.percentages().items():
            label, remark = ROWS[row]
            bar = "█" * round(percent / 100 * _BAR)
            lines.append(f"  {label:<13} {percent:5.1f} %  {bar:<{_BAR}}  {remark}".rstrip())
        # On a CPU graph mode runs eagerly.
        if self.shares.has_device and {"replay", "forward"} <= self.shares.seconds.keys():
            lines.append("  Not all of these steps were replays: profile later ones (hook profiler, first: …).")
        lines += [*self._speed_lines(), f"  trace: {self.trace} (open it at ui.perfetto.dev)"]
        costs = self.costs()
        if costs:
            lines += ["The largest costs:", *(f"  {number}. {each.text()}" for number, each in enumerate(costs, 1))]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Returns the figures for a JSON file."""
        peak = None if self.known_peak is None else self.known_peak[1]
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "percent": self.percentages(),
            "costs": [each._asdict() for each in self.costs()],
            "seconds_per_step": self.seconds_per_step,
            "seconds_per_profiled_step": self.seconds_per_profiled_step,
            "samples_per_second": self.samples_per_step / self.seconds_per_step,
            "tokens_per_second": None if self.tokens_per_step is None else self.tokens_per_step / self.seconds_per_step,
            "flops_per_step": self.flops_per_step,
            "is_counted": self.is_counted,
            "matrix_flops_per_second": self.matrix_rate.flops_per_second,
            "matrix_dtype": str(self.matrix_rate.dtype).removeprefix("torch."),
            "share_of_matrix_rate": self.utilization(self.matrix_rate.flops_per_second),
            "known_peak_flops_per_second": peak,
            "share_of_known_peak": None if peak is None else self.utilization(peak),
        }

    def _speed_lines(self) -> list[str]:
        speeds = [f"{self.samples_per_step / self.seconds_per_step:,.1f} samples/s"]
        if self.tokens_per_step is not None:
            speeds.append(f"{self.tokens_per_step / self.seconds_per_step:,.0f} tokens/s")
        if self.flops_per_step is None:
            return [f"  {', '.join(speeds)}, FLOP/s unknown: the operations of a step could not be counted"]
        estimated = "" if self.is_counted else ", estimated: 6 × parameters × tokens"
        reached = _amount(self.flops_per_step / self.seconds_per_step)
        speeds.append(f"{reached}FLOP/s ({_amount(self.flops_per_step)}FLOP a step and rank{estimated})")
        rate, size, dtype = self.matrix_rate
        dtype_name = str(dtype).removeprefix("torch.")
        lines = [
            f"  {', '.join(speeds)}",
            f"  MFU {self.utilization(rate):6.1%} of the {_amount(rate)}FLOP/s measured here, {dtype_name} matrices of "
            f"{size} × {size}",
        ]
        if self.known_peak is None:
            return [*lines, f"  MFU of the vendor's peak: unknown for {dtype_name} on this device"]
        word, peak = self.known_peak
        return [
            *lines,
            f"  MFU {self.utilization(peak):6.1%} of {_amount(peak)}FLOP/s, the vendor's peak of {word}, dense",
        ]


def round_to_hundred(amounts: Mapping[str, float]) -> dict[str, float]:
    """Returns each amount as a percentage of the sum in tenths; the largest remainders are rounded up.

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


class Profiler(Hook):
    """Profiles `steps` steps after the first `first` steps of this start.

    The second half of those first steps is timed, because the profiler itself takes time. Every rank writes
    RUN/profile/steps-A-B-rank-R.json.gz; the first rank logs its summary and writes it to RUN/profile/summary.txt and
    summary.json. A run that ends earlier is profiled until its end.
    """

    def __init__(self, first: int = 10, steps: int = 10) -> None:
        for name, value, least in (("first", first, 0), ("steps", steps, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"profiler: {name} is {value!r}. Use an integer of at least {least}.")
        self._first, self._num_steps = first, steps
        self._counter: Any = None
        self._counted_flops: int | None = None
        self._clock = (0.0, 0)
        """The last reading of `_read_clock`."""
        self._timed: tuple[float, float] | None = None
        """Seconds and samples of a step without the profiler."""
        self._profile: Any = None
        self._has_begun = False
        self._num_tokens = 0
        """The tokens of this rank's profiled batches, if batches have `input_ids`."""
        self._batch: Any = None
        """The first profiled batch, with a `TensorLike` for each tensor."""

    def before_train(self) -> None:
        """Decides which steps are profiled."""
        trainer = self.trainer
        left = trainer.max_steps - trainer.step
        steps = min(self._num_steps, max(left - 1, 1))
        first = min(self._first, left - steps)
        self._start, self._begin, self._end = trainer.step, trainer.step + first, trainer.step + first + steps
        self._timed_from = self._begin - first // 2
        self._counts_first = first > 0 and not can_count_aside(trainer) and can_count_within(trainer)
        if (first, steps) != (self._first, self._num_steps):
            logger.info(
                "profiler: the run has %d steps left: skipping %d and profiling %d, instead of %d and %d.",
                *(left, first, steps, self._first, self._num_steps),
            )

    def before_step(self) -> None:
        """Starts the counting, timing and profiling that are due in this step."""
        step = self.trainer.step
        if self._has_begun:  # a run may roll back, but is profiled once
            return
        if step == self._start and self._counts_first:
            self._counter = flop_counter()
            self._counter.__enter__()
        if step == self._timed_from < self._begin:
            self._clock = self._read_clock()
        if step == self._begin:
            num_timed = self._begin - self._timed_from
            if num_timed:
                seconds, position = self._read_clock()
                self._timed = (seconds - self._clock[0]) / num_timed, (position - self._clock[1]) / num_timed
            self._begin_profile()

    def after_step(self) -> None:
        """Ends the counting, timing and profiling that are due after this step."""
        if self._counter is not None:
            counter, self._counter = self._counter, None
            counter.__exit__(None, None, None)
            self._counted_flops = int(counter.get_total_flops())
        if self._profile is None:
            return
        batch = self.trainer.batch.value
        if self._batch is None:
            self._batch = tree_map_only(torch.Tensor, lambda tensor: TensorLike(tensor.shape, tensor.dtype), batch)
        if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
            self._num_tokens += batch["input_ids"].numel()
        if self.trainer.step == self._end:
            self._finish()

    def after_train(self) -> None:
        """Completes the profile of a run that ends earlier."""
        if self._profile is not None:
            self._finish()

    def close(self) -> None:
        """Ends the counter, the profiler and the ranges after an error."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None
        if self._profile is not None:
            self.trainer.heartbeat.end_trace()
            self._profile.stop_trace()
            self._profile = None

    def _read_clock(self) -> tuple[float, int]:
        """Returns the seconds without evaluating and saving, and the data position; waits for the device."""
        wait_for(self.trainer.device)
        assert self.trainer.train_data is not None
        not_counted = sum(self.trainer.heartbeat.seconds_in(phase) for phase in NOT_COUNTED)
        return time.perf_counter() - not_counted, self.trainer.train_data.samples_seen

    def _begin_profile(self) -> None:
        self._has_begun = True
        # Suppresses all messages of torch's profiler on stderr; it is read at the first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = profile()
        # Preparing takes seconds on a GPU, which are not in the trace.
        self._profile.prepare_trace()
        self._clock = self._read_clock()
        self._profile.start_trace()
        self.trainer.heartbeat.start_trace()

    def _finish(self) -> None:
        profiled = self._profile
        self.trainer.heartbeat.end_trace()
        wait_for(self.trainer.device)
        profiled.stop_trace()
        self._profile = None
        first, last = self._begin + 1, self.trainer.step
        folder = self.trainer.folder / PROFILE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"steps-{first}-{last}-rank-{self.trainer.ranks.rank}.json.gz"
        profiled.export_chrome_trace(str(path))
        if self.trainer.ranks.is_first:
            summary = self._summarise(path, first, last)
            (folder / "summary.txt").write_text(summary.text() + "\n", encoding="utf-8")
            (folder / "summary.json").write_text(json.dumps(summary.to_dict(), indent=2) + "\n", encoding="utf-8")
            logger.info("%s", summary.text())

    def _summarise(self, trace: Path, first: int, last: int) -> ProfileSummary:
        trainer, num_steps = self.trainer, last - first + 1
        # The host cannot divide a replayed update.
        rows = {
            "step": "replay" if trainer.config.runtime.mode == "graph" else "host",
            "vote": "communication" if trainer.ranks.size > 1 else "host",
        }
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            shares = share_out(json.load(file)["traceEvents"], rows)
        num_samples = self._read_clock()[1] - self._clock[1]
        seconds, samples = self._timed or (shares.total / num_steps, num_samples / num_steps)
        assert trainer.train_data is not None
        per_sample = getattr(trainer.train_data.dataset, "tokens_per_sample", None)
        if per_sample is None and self._num_tokens and num_samples:
            per_sample = self._num_tokens * trainer.ranks.mesh.num_data_ranks / num_samples
        tokens = None if per_sample is None else float(per_sample) * samples
        flops = self._counted_flops
        if flops is None and can_count_aside(trainer):
            flops = count_aside(trainer, self._batch)
        dtype = matmul_dtype(trainer.model, trainer.config.runtime.precision)
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
            facts=self._facts(),
        )

    def _facts(self) -> RunProperties:
        """Returns the settings of the run, for advice on its costs."""
        trainer = self.trainer
        config, runtime, backend = trainer.config, trainer.config.runtime, trainer.backend
        is_on_gpu = waits_for_memory(trainer.device)
        section, optimizer = config.model, config.trainer.optimizer
        reserved: Mapping[str, Any] = {} if section is None else section.reserved
        arguments: Mapping[str, Any] = {} if section is None else section.arguments
        is_transformers = section is not None and section.type.startswith("transformers:")
        has_masters = optimizer is not None and optimizer.type in ("adamw", "lion", "muon")
        mesh, is_bf16 = trainer.ranks.mesh, AUTOCAST_DTYPES.get(runtime.precision) == torch.bfloat16
        is_fp32 = matmul_dtype(trainer.model, "fp32") == torch.float32
        is_own = is_user_code(type(trainer.model))
        return RunProperties(
            mode=runtime.mode,
            is_compiled=runtime.mode == "compile"
            or (runtime.mode == "graph" and is_on_gpu)
            or "compile_repeated_blocks" in reserved,
            is_on_gpu=is_on_gpu,
            precision=runtime.precision,
            fastest_precision=backend.choose_precision(),
            supports_fp8=runtime.precision == "bf16"
            and backend.supports_precision("fp8")
            and mesh.size("tensor") == 1
            and gains_from_fp8(trainer.model),
            tf32=runtime.tf32,
            can_capture=runtime.precision != "fp16" and not uncaptured_axes(mesh),
            gathers_fp32=mesh.size("fsdp") > 1 and is_bf16 and runtime.gather_precision == "fp32" and is_fp32,
            num_workers=config.data.num_workers,
            log_every_steps=config.log.every_steps,
            recomputes="activation_checkpointing" in reserved,
            casts_weights=is_on_gpu and is_fp32 and is_bf16 and has_masters,
            optimizer={} if optimizer is None else {"type": optimizer.type, **optimizer.arguments},
            fused_loss=arguments.get("fused_loss"),
            kernels=str(reserved.get("kernels", "fast")) if is_transformers else None,
            has_mask=is_own and isinstance(self._batch, Mapping) and "attention_mask" in self._batch,
        )
