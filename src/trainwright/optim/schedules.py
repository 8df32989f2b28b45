"""Schedules: the factor on the base learning rate, as a pure function of the step.

    factor = schedule(step, max_steps)      # step: updates completed so far, 0 … max_steps − 1
    lr     = base_lr × factor               # written into the optimizer before update number step + 1

The end points are exact. Steps beyond the run have the last value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from trainwright.errors import ConfigError


class Schedule:
    """The interface and the warm-up of all schedules; a subclass defines `after_warmup`.

    The warm-up is linear: the factor of update number n is n / warmup_steps, so update number `warmup_steps` is the
    first at exactly 1.0. Its step is called the peak. Without warm-up the first update is at exactly 1.0 and the peak
    is step 0. `warmup_fraction` is a fraction of max_steps, rounded to a whole number of steps. None means no warm-up.
    A run that is shorter than its warm-up ends before the peak.
    """

    def __init__(self, *, warmup_steps: int | None = None, warmup_fraction: float | None = None) -> None:
        _reject_both(warmup_steps=warmup_steps, warmup_fraction=warmup_fraction)
        _check_whole("warmup_steps", warmup_steps, least=0)
        _check_fraction("warmup_fraction", warmup_fraction)
        self.warmup_steps = warmup_steps or 0
        self.warmup_fraction = warmup_fraction

    def __call__(self, step: int, max_steps: int) -> float:
        """Returns the factor for the update that follows `step` completed updates of a run of `max_steps`."""
        warmup = self.warmup_steps if self.warmup_fraction is None else round(self.warmup_fraction * max_steps)
        step = min(step, max_steps - 1)
        if step < warmup:
            return (step + 1) / warmup
        return self.after_warmup(step, peak=max(warmup - 1, 0), max_steps=max_steps)

    def after_warmup(self, step: int, *, peak: int, max_steps: int) -> float:
        """Returns the factor for peak ≤ step < max_steps; at the peak it must be exactly 1.0."""
        raise NotImplementedError(f"{type(self).__name__} must define after_warmup(step, *, peak, max_steps).")


class Constant(Schedule):
    """Exactly 1.0 from the peak on."""

    def after_warmup(self, step: int, *, peak: int, max_steps: int) -> float:
        """Returns 1.0."""
        return 1.0


class Decay(Schedule):
    """Decreases from exactly 1.0 at the peak to exactly `minimum` at the last update; a subclass defines `height`.

    `minimum` is a fraction of the base rate. A run that ends at its peak stays at 1.0.
    """

    def __init__(
        self, *, minimum: float = 0.0, warmup_steps: int | None = None, warmup_fraction: float | None = None
    ) -> None:
        super().__init__(warmup_steps=warmup_steps, warmup_fraction=warmup_fraction)
        _check_fraction("minimum", minimum)
        self.minimum = minimum

    def after_warmup(self, step: int, *, peak: int, max_steps: int) -> float:
        """Returns the height of the progress, above the minimum."""
        return _above(self.height(_progress(step, peak, max_steps - 1)), self.minimum)

    def height(self, progress: float) -> float:
        """Returns the height at a progress of 0 … 1: exactly 1.0 at 0 and exactly 0.0 at 1."""
        raise NotImplementedError(f"{type(self).__name__} must define height(progress).")


class Polynomial(Decay):
    """Decreases as (1 − progress) ** power, from exactly 1.0 at the peak to exactly `minimum` at the last update."""

    def __init__(
        self,
        *,
        power: float = 2.0,
        minimum: float = 0.0,
        warmup_steps: int | None = None,
        warmup_fraction: float | None = None,
    ) -> None:
        super().__init__(minimum=minimum, warmup_steps=warmup_steps, warmup_fraction=warmup_fraction)
        if not _is_number(power) or not 0.0 < power < math.inf:
            raise ConfigError(f"power is {power!r}. Use a positive number; 1 is a straight line.", where="schedule")
        self.power = power

    def height(self, progress: float) -> float:
        """Returns the remaining fraction of the run to the power."""
        return float((1.0 - progress) ** self.power)


class Linear(Decay):
    """Decreases linearly from exactly 1.0 at the peak to exactly `minimum` at the last update."""

    def height(self, progress: float) -> float:
        """Returns the remaining fraction of the run."""
        return DECAY_SHAPES["linear"](progress)


class Cosine(Decay):
    """Decreases on half a cosine from exactly 1.0 at the peak to exactly `minimum` at the last update."""

    def height(self, progress: float) -> float:
        """Returns the half cosine of the progress."""
        return DECAY_SHAPES["cosine"](progress)


class InverseSquareRoot(Schedule):
    """Decreases as 1 / sqrt(update number), scaled to exactly 1.0 at the peak. It does not depend on the run's
    length."""

    def after_warmup(self, step: int, *, peak: int, max_steps: int) -> float:
        """Returns sqrt(peak's update number / this update's number)."""
        return math.sqrt(peak + 1) / math.sqrt(step + 1)


class Step(Schedule):
    """Multiplies the rate by `factor` at each milestone, or every N steps; exactly 1.0 before.

    `every_steps` counts from the peak, which is the start of the run without warm-up. `milestones` are increasing
    counts of completed updates after the warm-up; the first update after each has the lower rate. Set one of both.
    """

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        milestones: Sequence[int] | None = None,
        factor: float = 0.1,
        warmup_steps: int | None = None,
        warmup_fraction: float | None = None,
    ) -> None:
        super().__init__(warmup_steps=warmup_steps, warmup_fraction=warmup_fraction)
        _reject_both(every_steps=every_steps, milestones=milestones)
        if every_steps is None and milestones is None:
            raise ConfigError("Step needs every_steps, such as 1000, or milestones, such as [600, 900].")
        _check_whole("every_steps", every_steps, least=1)
        for milestone in milestones or ():
            _check_whole("milestones", milestone, least=1)
        if milestones is not None and list(milestones) != sorted(set(milestones)):
            raise ConfigError(f"milestones are {list(milestones)}. List them in increasing order, each once.")
        _check_fraction("factor", factor)
        self.every_steps = every_steps
        self.milestones = tuple(milestones or ())
        self.factor = factor

    def after_warmup(self, step: int, *, peak: int, max_steps: int) -> float:
        """Returns the factor to the power of the drops so far."""
        if self.every_steps is not None:
            return float(self.factor ** ((step - peak) // self.every_steps))
        if self.milestones and self.milestones[0] <= peak:
            raise ConfigError(
                f"milestone {self.milestones[0]} falls into the warm-up of {peak + 1} steps. "
                "Use later milestones or a shorter warm-up.",
                where="schedule",
            )
        return float(self.factor ** sum(step >= milestone for milestone in self.milestones))


class WarmupStableDecay(Schedule):
    """Stays at exactly 1.0 from the peak on, then decreases to exactly `minimum` over the last `decay_steps` updates.

    `decay_fraction` is a fraction of max_steps, 0.1 by default. The shapes: `linear`, half a `cosine`, and
    `sqrt`, which is 1 − sqrt(progress), steep at first. With 0 steps the factor stays at 1.0; a
    decay that is longer than the run after the peak begins at the peak.
    """

    def __init__(
        self,
        *,
        decay_steps: int | None = None,
        decay_fraction: float | None = None,
        shape: str = "linear",
        minimum: float = 0.0,
        warmup_steps: int | None = None,
        warmup_fraction: float | None = None,
    ) -> None:
        super().__init__(warmup_steps=warmup_steps, warmup_fraction=warmup_fraction)
        _reject_both(decay_steps=decay_steps, decay_fraction=decay_fraction)
        _check_whole("decay_steps", decay_steps, least=0)
        _check_fraction("decay_fraction", decay_fraction)
        _check_fraction("minimum", minimum)
        if shape not in DECAY_SHAPES:
            raise ConfigError(f'shape is "{shape}". Use one of: {", ".join(DECAY_SHAPES)}.', where="schedule")
        self.decay_steps = decay_steps
        self.decay_fraction = 0.1 if decay_fraction is None else decay_fraction
        self.shape = shape
        self.minimum = minimum

    def after_warmup(self, step: int, *, peak: int, max_steps: int) -> float:
        """Returns 1.0 before the decay, then the shape of the decay's progress."""
        last = max_steps - 1
        decay = round(self.decay_fraction * max_steps) if self.decay_steps is None else self.decay_steps
        decay = min(decay, last - peak)
        if step <= last - decay:
            return 1.0
        return _above(DECAY_SHAPES[self.shape](_progress(step, last - decay, last)), self.minimum)


DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2.0,  # exact: cos(math.pi) is exactly -1.0
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def _progress(step: int, start: int, end: int) -> float:
    """Returns the position of `step` between start (0.0) and end (1.0); 0.0 if both are the same step."""
    return (step - start) / (end - start) if end > start else 0.0


def _above(height: float, minimum: float) -> float:
    """Maps heights 1 … 0 to 1 … minimum. Both ends are exact in this form, whereas m + (1 − m) × 1 need not be 1."""
    return height + (1.0 - height) * minimum


def _reject_both(**options: Any) -> None:
    """Rejects two forms of the same setting."""
    given = [f"{name} ({value})" for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both set. Keep one of them.", where="schedule")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_whole(name: str, value: Any, *, least: int) -> None:
    if value is not None and (not _is_number(value) or not isinstance(value, int) or value < least):
        raise ConfigError(f"{name} is {value!r}. Use a whole number of at least {least}.", where="schedule")


def _check_fraction(name: str, value: Any) -> None:
    if value is not None and (not _is_number(value) or not 0.0 <= value <= 1.0):  # also rejects nan
        raise ConfigError(f"{name} is {value!r}. Use a fraction from 0 to 1.", where="schedule")
