"""Finds updates whose loss or gradient is not finite, and losses far above those of the previous steps.

If the host runs ahead of the device, the decision is made on the device. response.py has the response to an anomaly.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch

from trainwright.backends import Capture, reads_at_once
from trainwright.config import AnomaliesSection

_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_MIN_RELATIVE_DISTANCE, _MIN_DISTANCE = 1e-3, 1e-6  # of the distance: while the loss is constant, noise is not a spike


def min_losses(size: int) -> int:
    """Returns the number of losses that a window of this size needs before a loss can be a spike: a quarter, and at
    least five."""
    return max(-(-size // 4), 5)


class Measure(NamedTuple):
    """The statistics of the losses in a window."""

    median: float
    deviation: float
    """A robust standard deviation."""

    def limit(self, threshold: float) -> float:
        """Returns the highest loss that is not a spike."""
        return self.median + threshold * self.deviation


class LossWindow:
    """The window on the host, kept sorted: adding a loss and measuring costs 4 µs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.losses: deque[float] = deque()
        """Oldest first."""
        self._ordered: list[float] = []

    def add(self, loss: float) -> None:
        """Adds the finite loss of a good step; drops the oldest one if the window is full."""
        if len(self.losses) == self.size:
            del self._ordered[bisect_left(self._ordered, self.losses.popleft())]
        self.losses.append(loss)
        insort(self._ordered, loss)

    def fill(self, losses: Sequence[float]) -> None:
        """Replaces the contents with the last of these losses."""
        self.losses = deque(losses[-self.size :])
        self._ordered = sorted(self.losses)

    def measure(self) -> Measure | None:
        """Returns the statistics; None if there are too few losses."""
        ordered = self._ordered
        if len(ordered) < min_losses(self.size):
            return None
        middle = (len(ordered) - 1) // 2  # the lower one of an even number, as on the device
        median, count = ordered[middle], middle + 1
        # The `count` losses nearest to the median are adjacent: find where they begin.
        low, high = 0, len(ordered) - count
        while low < high:
            probe = (low + high) // 2
            if median - ordered[probe] > ordered[probe + count] - median:
                low = probe + 1
            else:
                high = probe
        distance = max(median - ordered[low], ordered[low + count - 1] - median)
        return Measure(median, max(distance, abs(median) * _MIN_RELATIVE_DISTANCE, _MIN_DISTANCE) * _MAD_TO_DEVIATION)


class DeviceLossWindow:
    """The window on the device, which never waits: about twenty small kernels per step.

    Only the device knows how many losses there are. The state is one number in 0 … 2·size − 1: below `size` it is the
    number of losses, from there on the slot that is overwritten next, plus `size`. A table maps it to the following
    values.
    """

    def __init__(self, size: int, *, threshold: float, device: torch.device) -> None:
        self._size, self._threshold = size, threshold
        # Infinite where there is none yet. The additional slot receives losses that are not counted.
        self._losses = torch.full((size + 1,), torch.inf, dtype=torch.float64, device=device)
        self._state = torch.zeros(1, dtype=torch.int64, device=device)
        self._table = torch.tensor([self._row(state) for state in range(2 * size)], device=device)

    def _row(self, state: int) -> tuple[int, int, int]:
        """Returns the state after one more loss, the slot of that loss, and the index of the median when sorted."""
        after = state + 1 if state + 1 < 2 * self._size else self._size
        num_losses = min(state, self._size)
        # If there are too few: an infinite limit, which no loss exceeds.
        middle = (num_losses - 1) // 2 if num_losses >= min_losses(self._size) else self._size - 1
        return after, state % self._size, middle

    def judge(self, loss: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
        """Returns whether a step is bad, by itself or as a spike; adds its loss if not. All have shape (1,)."""
        loss = loss.to(torch.float64)
        after, slot, middle = self._table.index_select(0, self._state).unbind(1)
        ordered = torch.sort(self._losses[: self._size]).values
        median = ordered.gather(0, middle)
        distance = torch.sort((ordered - median).abs_()).values.gather(0, middle)
        least = median.abs().mul_(_MIN_RELATIVE_DISTANCE).clamp_(min=_MIN_DISTANCE)
        # Separate kernels: fused with the sum, the product would be rounded differently from the host.
        deviation = torch.maximum(distance, least).mul_(_MAD_TO_DEVIATION)
        is_bad = is_bad | (loss > deviation.mul_(self._threshold).add_(median))
        self._losses.scatter_(0, torch.where(is_bad, self._size, slot), loss)
        self._state.copy_(torch.where(is_bad, self._state, after))
        return is_bad

    def fill(self, losses: Sequence[float]) -> None:
        """Replaces the contents with these losses, at most `size`."""
        contents = torch.full((self._size + 1,), torch.inf, dtype=torch.float64)
        contents[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
        self._losses.copy_(contents)
        self._state.fill_(len(losses))


_MAX_PENDING = 1000  # steps whose values stay on the device before the host waits for them once


@dataclass(frozen=True)
class Anomaly:
    """An update with an anomaly: the argument of a hook's `on_anomaly`."""

    step: int
    kind: Literal["non_finite", "spike"]
    policy: Literal["raise", "skip", "rollback"]
    loss: float
    """The loss over all ranks."""
    grad_norm: float
    ranks: tuple[int, ...]
    """The ranks whose own loss was not finite; all ranks if it was finite on each."""
    median: float | None = None
    """The median of the losses that the spike was compared with."""
    deviation: float | None = None
    """Their robust standard deviation."""
    last_good: tuple[int, float] | None = None
    """The last good step before it, and its loss."""
    positions: tuple[int, int] | None = None
    """The range of positions in the order of the training data that the step used."""

    def describe(self) -> str:
        """Returns a sentence that describes the anomaly."""
        if self.median is not None and self.deviation is not None:
            return (
                f"The loss is {self.loss:.6g} at step {self.step}, {(self.loss - self.median) / self.deviation:.3g} "
                f"robust standard deviations above {self.median:.6g}, the median of the steps before."
            )
        before = f" (last finite: {self.last_good[1]:.6g} at step {self.last_good[0]})" if self.last_good else ""
        if math.isfinite(self.loss):
            return f"The gradient norm is {self.grad_norm} at step {self.step}, where the loss is {self.loss:.6g}."
        where = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return f"The loss is {self.loss} at step {self.step} on {where}{before}."


def join_ranks(found: Sequence[Sequence[Anomaly]]) -> list[Anomaly]:
    """Merges the results of `look` on all ranks: the same anomalies, each with the information of that rank."""
    joined = []
    for same in zip(*found, strict=True):
        ranks = tuple(sorted({rank for anomaly in same for rank in anomaly.ranks}))
        joined.append(replace(same[0], ranks=ranks or tuple(range(len(found)))))
    return joined


class _Step(NamedTuple):
    """One call of `judge`, with its values still on the device."""

    step: int
    loss: torch.Tensor
    grad_norm: torch.Tensor
    own_is_finite: torch.Tensor | bool
    skip: torch.Tensor | bool
    """The decision of the device; False if it made none."""
    judges_norm: bool
    is_first: bool
    positions: tuple[int, int] | None


class AnomalyDetector:
    """Judges every update without waiting for the device until `look`.

    On a CPU, where reading a value does not wait, the host judges immediately (2 µs, or 6 µs with spikes). On other
    devices the device decides if a policy skips updates; otherwise values are kept and judged by `look`.
    """

    def __init__(
        self, section: AnomaliesSection, *, device: torch.device, rank: int, capture: Capture | None = None
    ) -> None:
        """`capture` is set in graph mode, in which the host cannot judge during a step."""
        self._section = section
        self._rank = rank
        self._skips_spikes = section.spike in ("skip", "rollback")
        self._sees_spikes = section.spike != "ignore"
        self.skips_updates = section.non_finite != "raise" or self._skips_spikes
        """True if a policy skips updates."""
        self.positions: tuple[int, int] | None = None
        """The positions of the current batch in the data; the loop sets it before each update."""
        self._capture = capture or Capture()
        self._reads_at_once = reads_at_once(device)
        self._host_judges = self._reads_at_once and capture is None
        self._window = LossWindow(section.spike_window)
        self._device_window: DeviceLossWindow | None = None
        if self._skips_spikes and not self._host_judges:
            self._device_window = DeviceLossWindow(
                section.spike_window, threshold=section.spike_threshold, device=device
            )
        self._pending: list[_Step] = []
        self._captured: list[_Step] = []
        self._found: list[Anomaly] = []
        self._last_good: tuple[int, float] | None = None
        self._skip: torch.Tensor | bool = False

    def judge(
        self,
        step: int,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        *,
        own_is_finite: torch.Tensor | bool,
        judges_norm: bool = True,
        is_first: bool = True,
    ) -> torch.Tensor | bool | None:
        """Returns whether to skip this update: None if updates are never skipped, a tensor if only the device knows.

        `own_is_finite` refers to this rank's loss. With a loss scale an infinite norm is not an anomaly: `judges_norm`
        is then False. In a step with several updates the first loss is compared with previous steps; the others need
        only be finite, and are skipped if the first was.
        """
        if self._host_judges or not self.skips_updates:
            call = _Step(step, loss, grad_norm, own_is_finite, False, judges_norm, is_first, self.positions)
            if not self._host_judges:
                self._keep(call)
                return None
            is_skipped = self._take(call, float(loss), float(grad_norm), bool(own_is_finite), device_skips=None)
            self._skip = is_skipped or (not is_first and bool(self._skip))
            return self._skip if self.skips_updates else None
        skip = _is_not_finite(loss, grad_norm if judges_norm else None)
        if not is_first:
            skip = skip | self._skip
        elif self._device_window is not None:
            skip = self._device_window.judge(loss.reshape(1), skip.reshape(1))
        self._skip = skip.reshape(())
        self._keep(_Step(step, loss, grad_norm, own_is_finite, self._skip, judges_norm, is_first, self.positions))
        return self._skip

    @property
    def has_found(self) -> bool:
        """True if `look` would return anomalies, as far as that is known without waiting."""
        return bool(self._found or (self._reads_at_once and self._pending))

    def take_calls(self) -> list[tuple[Any, ...]]:
        """Returns and clears the calls of `judge` in a step that is captured: they have no values yet."""
        calls, self._captured = self._captured, []
        return [tuple(call)[1:-1] for call in calls]

    def repeat(self, call: Sequence[Any], *, step: int) -> None:
        """Repeats a call that `take_calls` returned, with the values of a replay."""
        loss, grad_norm, own_is_finite, skip, judges_norm, is_first = call
        kept = _Step(step, loss, grad_norm, own_is_finite, skip, judges_norm, is_first, self.positions)
        if not self._reads_at_once:
            self._keep(kept)
            return
        device_skips = bool(skip) if self._device_window is not None else None
        self._take(kept, float(loss), float(grad_norm), bool(own_is_finite), device_skips=device_skips)

    def look(self) -> list[Anomaly]:
        """Returns the anomalies since the last call, one per step; waits for the device.

        Each names this rank if its own loss was not finite: `join_ranks` joins what the ranks know.
        """
        self._drain()
        found, self._found = self._found, []
        return list({anomaly.step: anomaly for anomaly in reversed(found)}.values())[::-1]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to judge equally; waits for the device."""
        self._drain()
        return {"losses": list(self._window.losses), "last_good": self._last_good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`, also after a rollback; discards pending values."""
        self._pending, self._found, self._skip = [], [], False
        self._window.fill([float(loss) for loss in state["losses"]])
        if self._device_window is not None:
            self._device_window.fill(list(self._window.losses))
        last_good = state["last_good"]
        self._last_good = None if last_good is None else (int(last_good[0]), float(last_good[1]))

    def _keep(self, call: _Step) -> None:
        if self._capture.is_active:
            self._captured.append(call)
            return
        self._pending.append(call)
        if len(self._pending) >= _MAX_PENDING:
            self._drain()

    def _drain(self) -> None:
        """Copies pending values to the host, in one copy, and judges them there."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        values = _to_host([value for call in pending for value in call[1:5]])
        for number, call in enumerate(pending):
            loss, grad_norm, own_is_finite, skip = values[4 * number : 4 * number + 4]
            device_skips = bool(skip) if self._device_window is not None else None
            self._take(call, loss, grad_norm, bool(own_is_finite), device_skips=device_skips)

    def _take(
        self, call: _Step, loss: float, grad_norm: float, own_is_finite: bool, *, device_skips: bool | None
    ) -> bool:
        """Judges one update by its numbers; returns whether it is to be skipped.

        `device_skips` is the decision of the device, which counts if it made one.
        """
        is_finite = math.isfinite(loss) and (math.isfinite(grad_norm) or not call.judges_norm)
        is_spike, measure = False, None
        if is_finite and call.is_first and self._sees_spikes:
            measure = self._window.measure()
            is_spike = measure is not None and loss > measure.limit(self._section.spike_threshold)
            is_spike = is_spike if device_skips is None else device_skips
        if is_spike or not is_finite:
            self._note(call, loss, grad_norm, own_is_finite, measure if is_spike else None)
            return not is_finite or self._skips_spikes
        if call.is_first:
            self._last_good = (call.step, loss)
            if self._sees_spikes:
                self._window.add(loss)
        return False

    def _note(self, call: _Step, loss: float, grad_norm: float, own_is_finite: bool, measure: Measure | None) -> None:
        spike = self._section.spike
        assert measure is None or spike != "ignore"
        self._found.append(
            Anomaly(
                step=call.step,
                kind="non_finite" if measure is None else "spike",
                policy=self._section.non_finite if measure is None or spike == "ignore" else spike,
                loss=loss,
                grad_norm=grad_norm,
                ranks=() if own_is_finite else (self._rank,),
                median=None if measure is None else measure.median,
                deviation=None if measure is None else measure.deviation,
                last_good=self._last_good,
                positions=call.positions,
            )
        )


def _is_not_finite(loss: torch.Tensor, grad_norm: torch.Tensor | None) -> torch.Tensor:
    """Returns a bool on the device, in four kernels: x - x is 0 only for finite x."""
    zero = loss - loss if grad_norm is None else (loss - loss) + (grad_norm - grad_norm)
    return zero != 0


def _to_host(values: Sequence[torch.Tensor | bool]) -> list[float]:
    """Returns all values as numbers, with one copy from the device."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            kinds.setdefault(value.dtype, []).append(value if value.ndim == 0 else value.reshape(()))
    copied = iter(torch.cat([torch.stack(some).to(torch.float64) for some in kinds.values()]).tolist())
    arrived = {dtype: iter(list(islice(copied, len(some)))) for dtype, some in kinds.items()}
    return [next(arrived[value.dtype]) if isinstance(value, torch.Tensor) else float(value) for value in values]
