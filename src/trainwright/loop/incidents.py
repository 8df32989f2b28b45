"""Sees updates whose loss or gradient is not finite, or whose loss is far above those before: incidents.

Every update is judged, and where the config asks for it held back, without the host waiting for the device; `look` is
where it waits, whenever the loop wants to know. The loss judged is that of all ranks together, so all of them come to
the same answer without a message. What is done about an incident is the trainer's; what is written about it
incident_files.py's; how a spike is measured loss_window.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch

from trainwright.backends import reads_at_once
from trainwright.config import IncidentsSection
from trainwright.loop.loss_window import DeviceLossWindow, LossWindow, Measure

_MOST_WAITING = 1000  # steps that are remembered on the device if nobody looks; then it is waited for once


@dataclass(frozen=True)
class Incident:
    """An update that went wrong: what a hook's `on_incident` gets."""

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


def join_ranks(found: Sequence[Sequence[Incident]]) -> list[Incident]:
    """Makes one list of what `look` returned on each rank: the same incidents, each rank knowing of itself."""
    joined = []
    for same in zip(*found, strict=True):
        ranks = tuple(sorted({rank for incident in same for rank in incident.ranks}))
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


class IncidentWatch:
    """Judges every update on the device; nothing waits for it until `look`.

    Where reading waits for nothing, on a CPU, the host judges at once, in 2 µs (with spikes 6). Else, where nothing is
    held back (`raise`, `ignore`), the device has nothing to do: values are kept and judged when somebody looks.
    """

    def __init__(
        self, section: IncidentsSection, *, device: torch.device, rank: int, is_recorded: bool = False
    ) -> None:
        self._section = section
        self._rank = rank
        self._holds_spikes = section.spike in ("skip", "rollback")
        self._sees_spikes = section.spike != "ignore"
        self.gates = section.non_finite != "raise" or self._holds_spikes
        """Does any policy need updates to be held back?"""
        self.places: tuple[int, int] | None = None
        """The places of the data in hand; the loop says so before each update, and incidents tell it."""
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
        self._found: list[Incident] = []
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

        `own_is_finite` is about this rank's own part of the loss. With a loss scale an infinite norm is no incident:
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

    def look(self) -> list[Incident]:
        """Returns the incidents since the last look, one a step; waits for the device.

        Each names this rank if its own loss was not finite, else none: `join_ranks` joins what the ranks know.
        """
        self._drain()
        found, self._found = self._found, []
        return list({incident.step: incident for incident in reversed(found)}.values())[::-1]

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
            Incident(
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
