"""The search for the largest micro-batch that fits: its candidates, its order, and a guess at what the next one takes.

Nothing here runs a model; what tries a candidate is loop/fitting.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trainwright.backends import Backend

HEADROOM = 0.05
"""The share of the memory that stays free: later batches, collectives and a fragmented allocator need some."""


def micro_batch_sizes(rank_batch_size: int) -> list[int]:
    """Returns the sizes into which a rank's batch can be cut evenly, ascending: its divisors."""
    small = [size for size in range(1, int(rank_batch_size**0.5) + 1) if rank_batch_size % size == 0]
    return sorted({*small, *(rank_batch_size // size for size in small)})


def largest_that_fits(candidates: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Returns the largest of the ascending candidates that fits, or None if not even the first does.

    Where one fits, all before it must. It goes up in strides that double and then halves what is left, so that a
    candidate much larger than one that is known to fit is never the next: 2 log₂ n trials at most, most of them small.
    """
    fitting, too_large, stride = -1, len(candidates), 1
    while fitting + 1 < too_large:
        goes_up = too_large == len(candidates)
        probe = min(fitting + stride, too_large - 1) if goes_up else (fitting + too_large) // 2
        if fits(candidates[probe]):
            fitting, stride = probe, stride * 2
        else:
            too_large = probe
    return candidates[fitting] if fitting >= 0 else None


class Growth:
    """Guesses what a larger micro-batch takes from what a smaller one took, where trying it could end the process.

    A GPU refuses what it does not have. The system's main memory is promised freely, and who then uses too much of it
    is killed, so there a candidate is tried only if as much again for each sample would leave room.
    """

    def __init__(self, backend: Backend, *, num_fixed_bytes: int = 0, num_sharing: int = 1) -> None:
        """`num_fixed_bytes` are taken by each step whatever its samples are: the gradients.

        `num_sharing` processes, this one included, take from the same memory at the same time.
        """
        self._backend = backend
        self._num_fixed_bytes = num_fixed_bytes
        self._num_sharing = num_sharing
        self._taken_per_sample: float | None = None

    def leaves_room(self, num_samples: int) -> bool:
        """Would a micro-batch of so many samples probably fit? Yes where nothing is known."""
        room = self._backend.memory_room()
        if room is None or self._taken_per_sample is None:
            return True
        taken = self._num_fixed_bytes + self._taken_per_sample * num_samples
        return taken <= (1.0 - HEADROOM) * room / self._num_sharing

    @contextmanager
    def measuring(self, num_samples: int) -> Iterator[None]:
        """Notes what is taken within, by a micro-batch of so many samples."""
        self._backend.begin_peak()
        before = self._backend.memory().in_use
        yield
        peak = self._backend.memory().peak
        if before is not None and peak is not None:
            # What else does not grow with the samples is counted as if it did: on the safe side, and less and less.
            self._taken_per_sample = max(peak - before - self._num_fixed_bytes, 0) / num_samples
