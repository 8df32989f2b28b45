"""The learning-rate range test: one short training whose rate rises exponentially, and the rate that it suggests.

`RangeTest` is a hook that writes the rates and records the losses; `suggest` reads the curve. api/tune.py runs the test
on a copy of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainwright.autotune.trial_run import TrialEnded
from trainwright.config.problems import suggest as advise
from trainwright.errors import ConfigError
from trainwright.loop.hook import Hook
from trainwright.optim.device_step import set_learning_rate

SMOOTHING = 0.9
"""The weight of the past in the moving average that detects divergence."""
_NUM_INITIAL = 5
"""Losses whose mean is the initial loss."""
_WIDTH_IN_DECADES = 0.25
"""Standard deviation of the kernel that smooths the finished curve."""
_MIN_DESCENT = 0.02
"""The share of the initial loss by which the curve has to fall."""
_MIN_SIGNAL = 4.0
"""The number of standard errors of the smoothed curve that the descent must exceed."""
_SHARE = 0.9
"""The share of the descent at the suggested rate."""
_ROBUST = 1.4826
"""The standard deviation of normal noise is this many times its median absolute deviation."""


@dataclass(frozen=True)
class Suggestion:
    """A learning rate with the reason for it; without a rate, the reason why there is none."""

    rate: float | None
    reason: str


@dataclass(frozen=True)
class RangeTestResult:
    """The curve of a range test."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """The loss of the update with each rate; the last one may not be finite."""
    smoothed: tuple[float, ...]
    """The finite losses, smoothed without lag."""
    diverged: bool
    suggestion: Suggestion


class RangeTest(Hook):
    """Writes a rising rate before each update and records its loss; ends the trial when the loss diverges.

    `setting` is the value of the rate in the config; the groups of the optimizer keep their ratios to it. None: the
    rate of the first group. The rates of other optimizers stay as configured, without their schedules.
    """

    def __init__(
        self,
        optimizer: str | None,
        rates: Sequence[float],
        *,
        setting: float | None,
        progress: Callable[[int, float, float], None] | None = None,
    ) -> None:
        self._name = optimizer
        self._planned = rates
        self._setting = setting
        self._progress = progress
        self._divergence = Divergence()
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.diverged = False

    def before_train(self) -> None:
        """Reads the rates that the optimizer was built with."""
        optimizers = self.trainer.context.updater.optimizers
        if self._name is None and len(optimizers) > 1:
            names = ", ".join(optimizers)
            raise ConfigError(f"tune lr: the run has several optimizers ({names}). Name one with --optimizer.")
        if self._name is not None and self._name not in optimizers:
            raise ConfigError(f"--optimizer: there is no optimizer {self._name!r}. {advise(self._name, optimizers)}")
        self._entry = entry = optimizers[self._name or next(iter(optimizers))]
        first = next((rate for rate in entry.base_rates if rate), 0.0)
        setting = self._setting or first
        if not setting:
            raise ConfigError(
                "tune lr: every learning rate of the optimizer is 0, so the ratios of its groups are not "
                "known. Give it a rate."
            )
        self._factors = [rate / setting for rate in entry.base_rates]

    def before_step(self) -> None:
        """Writes the rate of the update that follows."""
        rate = self._planned[len(self.rates)]
        groups = self._entry.optimizer.param_groups
        added = [self._factors[0]] * (len(groups) - len(self._factors))  # parameters that have become trainable
        for group, factor in zip(groups, [*self._factors, *added], strict=True):
            set_learning_rate(group, rate * factor)
        self.rates.append(rate)

    def after_step(self) -> None:
        """Records the loss; ends the trial after the last rate, at divergence, or after a stop request."""
        trainer = self.trainer
        loss = float(trainer.storage.latest()["loss"][0])
        self.losses.append(loss)
        self.diverged = self._divergence.add(loss)
        if self._progress is not None:
            self._progress(len(self.losses), self.rates[-1], loss)
        if self.diverged or len(self.losses) == len(self._planned) or trainer.stop_reason is not None:
            raise TrialEnded

    def result(self) -> RangeTestResult:
        """Returns the curve and the suggestion."""
        finite = [(rate, loss) for rate, loss in zip(self.rates, self.losses, strict=False) if math.isfinite(loss)]
        rates, losses = [rate for rate, _ in finite], [loss for _, loss in finite]
        return RangeTestResult(
            rates=tuple(self.rates[: len(self.losses)]),
            losses=tuple(self.losses),
            smoothed=tuple(smooth(rates, losses)),
            diverged=self.diverged,
            suggestion=suggest(rates, losses, diverged=self.diverged),
        )


class Divergence:
    """Detects a diverging loss, which is not finite or whose moving average is far above its initial value.

    Far is as much as the average has fallen before, and at least half of the initial value. The moving average is
    corrected for its bias to the first values.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._average = 0.0
        self._num_losses = 0
        self._lowest = math.inf

    def add(self, loss: float) -> bool:
        """Adds the loss of a step; returns True if it diverges."""
        if not math.isfinite(loss):
            return True
        self._num_losses += 1
        self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
        average = self._average / (1 - SMOOTHING**self._num_losses)
        if len(self._first) < _NUM_INITIAL:
            self._first.append(loss)
            return False
        self._lowest = min(self._lowest, average)
        initial = sum(self._first) / len(self._first)
        return average > initial + max(initial - self._lowest, 0.5 * abs(initial))


def ramp(lowest: float, highest: float, num_steps: int) -> list[float]:
    """Returns rates from `lowest` to `highest`, whose ratio is constant.

    >>> [round(rate, 6) for rate in ramp(0.001, 10.0, 5)]
    [0.001, 0.01, 0.1, 1.0, 10.0]
    """
    ratio = highest / lowest
    return [lowest * ratio ** (step / (num_steps - 1)) for step in range(num_steps)]


def smooth(rates: Sequence[float], losses: Sequence[float]) -> list[float]:
    """Returns the losses smoothed over a quarter of a decade, by local linear regression: without lag at any rate."""
    if len(rates) < 3:
        return list(losses)
    x, y = np.log10(np.asarray(rates)), np.asarray(losses)
    width = max(_WIDTH_IN_DECADES, 1.5 * float(x[1] - x[0]))
    values = []
    for center in x:
        weights = np.exp(-0.5 * ((x - center) / width) ** 2)
        offset = x - center
        s0, s1, s2 = weights.sum(), (weights * offset).sum(), (weights * offset**2).sum()
        t0, t1 = (weights * y).sum(), (weights * offset * y).sum()
        values.append(float((s2 * t0 - s1 * t1) / (s0 * s2 - s1**2)))
    return values


def suggest(rates: Sequence[float], losses: Sequence[float], *, diverged: bool) -> Suggestion:
    """Returns the lowest rate at which the smoothed loss has fallen by 90 % of its whole descent.

    The rate of the minimum itself is close to divergence, and on a plateau it is random. There is no
    suggestion for a curve that falls by less than its noise, or whose minimum is at the end of the range.
    benchmarks/tune_lr.py compares the suggestions with grids.
    """
    if len(rates) < 2 * _NUM_INITIAL:
        ended = "the loss diverged" if diverged else "the test ended"
        return Suggestion(
            None, f"{ended} after {len(rates)} updates, which is too early to see a descent. Lower --min."
        )
    x, y = np.log10(np.asarray(rates)), np.asarray(losses)
    curve = np.asarray(smooth(rates, losses))
    lowest = int(curve.argmin())
    initial = float(curve[: max(_NUM_INITIAL, len(curve) // 10)].mean())
    descent = initial - float(curve[lowest])
    error = _standard_error(y[: lowest + 1] - curve[: lowest + 1], spacing=float(x[1] - x[0]))
    needed = max(_MIN_DESCENT * abs(initial), _MIN_SIGNAL * error)
    if descent < needed:
        if diverged and x[-1] - x[0] < 2.0:
            return Suggestion(None, f"the loss diverges at {rates[-1]:.1e} without falling before. Lower --min.")
        return Suggestion(
            None,
            f"the curve is too flat or too noisy: the smoothed loss falls by {max(descent, 0.0):.2g}, and at least "
            f"{needed:.2g} is needed (noise between batches, or {_MIN_DESCENT:.0%} of the initial loss {initial:.3g}). "
            "Use more --steps, a larger global batch size or a range with higher rates.",
        )
    if not diverged and x[-1] - x[lowest] < _WIDTH_IN_DECADES:
        return Suggestion(None, f"the loss still falls at the highest rate, {rates[-1]:.1e}. Raise --max.")
    rate = _round(rates[int((curve <= initial - _SHARE * descent).argmax())])
    reason = (
        f"it is the lowest rate at which the smoothed loss has fallen by {_SHARE:.0%} of its whole descent, from "
        f"{initial:.3g} to {curve[lowest]:.3g} at {rates[lowest]:.1e}"
    )
    if diverged:
        reason += f"; training diverges {rates[-1] / rate:.0f} times higher, at {rates[-1]:.1e}"
    return Suggestion(rate, reason)


def _standard_error(residuals: np.ndarray, *, spacing: float) -> float:
    """Returns the standard error of the smoothed curve, from the losses' distances from it."""
    width = max(_WIDTH_IN_DECADES, 1.5 * spacing)
    num_effective = max(1.0, 2.0 * math.sqrt(math.pi) * width / spacing)
    return _ROBUST * float(np.median(np.abs(residuals))) / math.sqrt(num_effective)


def _round(rate: float) -> float:
    """Returns the rate with two digits."""
    return float(f"{rate:.1e}")
