"""What a profile of some steps says, on one screen: where the time went, how fast it is, and how fast it could be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainwright.hooks.matrix_rate import MatrixRate
from trainwright.hooks.profile_trace import ROWS, Shares

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
            lines.append("  Not all of these steps were replays: profile later ones (hook profile_steps, first: …).")
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
