"""Finds updates whose loss or gradient is not finite, and losses far above those of the previous steps.

Decides on the device where the device decides; the trainer acts on what was found.
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

from trainwright.backends import reads_at_once
from trainwright.config import AnomaliesSection

_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_LEAST_RELATIVE, _LEAST = 1e-3, 1e-6  # of the distance: where the loss stands still, no wiggle is a spike


def least_needed(size: int) -> int:
    """How many losses a window of this size needs before anything is a spike: a quarter, and at least five."""
    return max(-(-size // 4), 5)


class Measure(NamedTuple):
    """What a window says of the losses in it."""

    median: float
    deviation: float
    """A robust standard deviation."""

    def limit(self, threshold: float) -> float:
        """The highest loss that is no spike."""
        return self.median + threshold * self.deviation


class LossWindow:
    """The window on the host: sorted at all times, so that one more loss and its measure cost 4 µs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.losses: deque[float] = deque()
        """Oldest first."""
        self._ordered: list[float] = []

    def add(self, loss: float) -> None:
        """Takes the finite loss of a good step; the oldest one leaves a full window."""
        if len(self.losses) == self.size:
            del self._ordered[bisect_left(self._ordered, self.losses.popleft())]
        self.losses.append(loss)
        insort(self._ordered, loss)

    def fill(self, losses: Sequence[float]) -> None:
        """Holds the last of these losses, and nothing else."""
        self.losses = deque(losses[-self.size :])
        self._ordered = sorted(self.losses)

    def measure(self) -> Measure | None:
        """Measures the losses; None while they are too few."""
        ordered = self._ordered
        if len(ordered) < least_needed(self.size):
            return None
        middle = (len(ordered) - 1) // 2  # of an even number the lower one, as on the device
        median, count = ordered[middle], middle + 1
        # The `count` losses nearest to the median stand side by side: find where they begin.
        low, high = 0, len(ordered) - count
        while low < high:
            probe = (low + high) // 2
            if median - ordered[probe] > ordered[probe + count] - median:
                low = probe + 1
            else:
                high = probe
        distance = max(median - ordered[low], ordered[low + count - 1] - median)
        return Measure(median, max(distance, abs(median) * _LEAST_RELATIVE, _LEAST) * _MAD_TO_DEVIATION)


class DeviceLossWindow:
    """The window on a device that nobody wants to wait for: about twenty small kernels a step.

    How many losses there are, too, only the device knows. Its state is one number of 0 … 2·size − 1: below `size` it
    is the number of losses, from there on the slot that is overwritten next, plus `size`; a table has all that follows
    from it.
    """

    def __init__(self, size: int, *, threshold: float, device: torch.device) -> None:
        self._size, self._threshold = size, threshold
        # Infinite where there is none yet. One slot more: there the losses go that do not count.
        self._losses = torch.full((size + 1,), torch.inf, dtype=torch.float64, device=device)
        self._state = torch.zeros(1, dtype=torch.int64, device=device)
        self._table = torch.tensor([self._row(state) for state in range(2 * size)], device=device)

    def _row(self, state: int) -> tuple[int, int, int]:
        """Returns the state after one more loss, the slot of that, and the median's place in the sorted window."""
        after = state + 1 if state + 1 < 2 * self._size else self._size
        num_losses = min(state, self._size)
        # While they are too few: an infinite one, of which nothing comes that any loss were above.
        middle = (num_losses - 1) // 2 if num_losses >= least_needed(self._size) else self._size - 1
        return after, state % self._size, middle

    def judge(self, loss: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
        """Returns whether a step is bad, by itself or as a spike; takes up its loss if not. All of shape (1,)."""
        loss = loss.to(torch.float64)
        after, slot, middle = self._table.index_select(0, self._state).unbind(1)
        ordered = torch.sort(self._losses[: self._size]).values
        median = ordered.gather(0, middle)
        distance = torch.sort((ordered - median).abs_()).values.gather(0, middle)
        least = median.abs().mul_(_LEAST_RELATIVE).clamp_(min=_LEAST)
        # Each product by itself: in one kernel with the sum it would be rounded otherwise than on the host.
        deviation = torch.maximum(distance, least).mul_(_MAD_TO_DEVIATION)
        is_bad = is_bad | (loss > deviation.mul_(self._threshold).add_(median))
        self._losses.scatter_(0, torch.where(is_bad, self._size, slot), loss)
        self._state.copy_(torch.where(is_bad, self._state, after))
        return is_bad

    def fill(self, losses: Sequence[float]) -> None:
        """Holds these losses, at most `size`, and nothing else."""
        held = torch.full((self._size + 1,), torch.inf, dtype=torch.float64)
        held[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
        self._losses.copy_(held)
        self._state.fill_(len(losses))


_MOST_WAITING = 1000  # steps that are remembered on the device if nobody looks; then it is waited for once


@dataclass(frozen=True)
class Anomaly:
    """An update that went wrong: what a hook's `on_anomaly` gets."""

    step: int
    kind: Literal["non_finite", "spike"]
    policy: Literal["raise", "skip", "rollback"]
    loss: float
    """The loss over all ranks."""
    grad_norm: float
    ranks: tuple[int, ...]
    """The ranks whose own loss was not finite; all where it was finite on each."""
    median: float | None = None
    """The median of the losses that a spike was measured against."""
    deviation: float | None = None
    """Their robust standard deviation."""
    last_good: tuple[int, float] | None = None
    """The last good step before, and its loss."""
    places: tuple[int, int] | None = None
    """Which places of the training data the step was made from: the first, and the one behind the last."""

    def describe(self) -> str:
        """Says what happened, in a sentence."""
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
    """Makes one list of what `look` returned on each rank: the same anomalies, each rank knowing of itself."""
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
    hold: torch.Tensor | bool
    """What the device said; False where it was not asked."""
    judges_norm: bool
    is_first: bool
    places: tuple[int, int] | None


class AnomalyWatch:
    """Judges every update on the device; nothing waits for it until `look`.

    Where reading waits for nothing, on a CPU, the host judges at once, in 2 µs (with spikes 6). Else, where nothing is
    held back (`raise`, `ignore`), the device has nothing to do: values are kept and judged when somebody looks.
    """

    def __init__(
        self, section: AnomaliesSection, *, device: torch.device, rank: int, is_recorded: bool = False
    ) -> None:
        self._section = section
        self._rank = rank
        self._holds_spikes = section.spike in ("skip", "rollback")
        self._sees_spikes = section.spike != "ignore"
        self.gates = section.non_finite != "raise" or self._holds_spikes
        """Does any policy need updates to be held back?"""
        self.places: tuple[int, int] | None = None
        """The places of the data in hand; the loop says so before each update, and anomalies tell it."""
        # A recorded step cannot stop for the host; what the device has judged is looked at after each replay.
        self._reads_at_once = reads_at_once(device)
        self._host_judges = self._reads_at_once and not is_recorded
        self._window = LossWindow(section.spike_window)
        self._device_window: DeviceLossWindow | None = None
        if self._holds_spikes and not self._host_judges:
            self._device_window = DeviceLossWindow(
                section.spike_window, threshold=section.spike_threshold, device=device
            )
        self._waiting: list[_Step] = []
        self.is_recording = False
        self._recorded: list[_Step] = []
        self._found: list[Anomaly] = []
        self._last_good: tuple[int, float] | None = None
        self._hold: torch.Tensor | bool = False

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
        """Returns whether to hold this update back, None where nothing ever is; a tensor where only the device knows.

        `own_is_finite` is about this rank's own part of the loss. With a loss scale an infinite norm is no anomaly:
        `judges_norm` is then False. A step with several updates asks for each: its first loss is the one that is
        measured, the others need only be finite, and are held back if the first was.
        """
        if self._host_judges or not self.gates:
            call = _Step(step, loss, grad_norm, own_is_finite, False, judges_norm, is_first, self.places)
            if not self._host_judges:
                self._keep(call)
                return None
            is_held = self._take(call, float(loss), float(grad_norm), bool(own_is_finite), says_hold=None)
            self._hold = is_held or (not is_first and bool(self._hold))
            return self._hold if self.gates else None
        hold = _is_not_finite(loss, grad_norm if judges_norm else None)
        if not is_first:
            hold = hold | self._hold
        elif self._device_window is not None:
            hold = self._device_window.judge(loss.reshape(1), hold.reshape(1))
        self._hold = hold.reshape(())
        self._keep(_Step(step, loss, grad_norm, own_is_finite, self._hold, judges_norm, is_first, self.places))
        return self._hold

    @property
    def has_found(self) -> bool:
        """Is there something to look at, as far as that is known without waiting?"""
        return bool(self._found or (self._reads_at_once and self._waiting))

    def take_calls(self) -> list[tuple[Any, ...]]:
        """Returns what `judge` has kept of a step that is recorded, and forgets it: it has no values yet."""
        calls, self._recorded = self._recorded, []
        return [tuple(call)[1:-1] for call in calls]

    def keep_again(self, call: Sequence[Any], *, step: int) -> None:
        """Keeps what `take_calls` returned, with the values of a replay."""
        loss, grad_norm, own_is_finite, hold, judges_norm, is_first = call
        kept = _Step(step, loss, grad_norm, own_is_finite, hold, judges_norm, is_first, self.places)
        if not self._reads_at_once:
            self._keep(kept)
            return
        says_hold = bool(hold) if self._device_window is not None else None
        self._take(kept, float(loss), float(grad_norm), bool(own_is_finite), says_hold=says_hold)

    def look(self) -> list[Anomaly]:
        """Returns the anomalies since the last look, one a step; waits for the device.

        Each names this rank if its own loss was not finite, else none: `join_ranks` joins what the ranks know.
        """
        self._drain()
        found, self._found = self._found, []
        return list({anomaly.step: anomaly for anomaly in reversed(found)}.values())[::-1]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to judge alike; waits for the device."""
        self._drain()
        return {"losses": list(self._window.losses), "last_good": self._last_good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`, after a rollback too; what nobody has looked at is forgotten."""
        self._waiting, self._found, self._hold = [], [], False
        self._window.fill([float(loss) for loss in state["losses"]])
        if self._device_window is not None:
            self._device_window.fill(list(self._window.losses))
        last_good = state["last_good"]
        self._last_good = None if last_good is None else (int(last_good[0]), float(last_good[1]))

    def _keep(self, call: _Step) -> None:
        if self.is_recording:
            self._recorded.append(call)
            return
        self._waiting.append(call)
        if len(self._waiting) >= _MOST_WAITING:
            self._drain()

    def _drain(self) -> None:
        """Brings what waits to the host, in one copy, and judges it there."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        values = _to_host([value for call in waiting for value in call[1:5]])
        for number, call in enumerate(waiting):
            loss, grad_norm, own_is_finite, hold = values[4 * number : 4 * number + 4]
            says_hold = bool(hold) if self._device_window is not None else None
            self._take(call, loss, grad_norm, bool(own_is_finite), says_hold=says_hold)

    def _take(self, call: _Step, loss: float, grad_norm: float, own_is_finite: bool, *, says_hold: bool | None) -> bool:
        """Judges one update by its numbers and notes what comes of it; returns whether it is to be held back.

        `says_hold` is the device's answer, where it had one: what was done is what counts.
        """
        is_finite = math.isfinite(loss) and (math.isfinite(grad_norm) or not call.judges_norm)
        is_spike, measure = False, None
        if is_finite and call.is_first and self._sees_spikes:
            measure = self._window.measure()
            is_spike = measure is not None and loss > measure.limit(self._section.spike_threshold)
            is_spike = is_spike if says_hold is None else says_hold
        if is_spike or not is_finite:
            self._note(call, loss, grad_norm, own_is_finite, measure if is_spike else None)
            return not is_finite or self._holds_spikes
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
                places=call.places,
            )
        )


def _is_not_finite(loss: torch.Tensor, grad_norm: torch.Tensor | None) -> torch.Tensor:
    """A bool on the device, in four kernels: only what is finite is 0 when taken from itself."""
    zero = loss - loss if grad_norm is None else (loss - loss) + (grad_norm - grad_norm)
    return zero != 0


def _to_host(values: Sequence[torch.Tensor | bool]) -> list[float]:
    """Returns all values as numbers; those on the device come in one copy."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            kinds.setdefault(value.dtype, []).append(value if value.ndim == 0 else value.reshape(()))
    copied = iter(torch.cat([torch.stack(some).to(torch.float64) for some in kinds.values()]).tolist())
    arrived = {dtype: iter(list(islice(copied, len(some)))) for dtype, some in kinds.items()}
    return [next(arrived[value.dtype]) if isinstance(value, torch.Tensor) else float(value) for value in values]
