"""The losses of the last good steps, and how far above them a loss is a spike: on the host, and on the device.

Robust: a loss is measured by the window's median and its median distance from that (MAD), which a few odd values
move little. Both classes do the same arithmetic in the same order in 64 bits, so they give the same answers. Who
asks, and what is done about a spike, is incidents.py's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

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
