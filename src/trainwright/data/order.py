"""Which sample stands at which global position: a pure function of (seed, position).

A keyed permutation (a Feistel network with cycle walking) visits every sample of an epoch exactly once,
in O(1) memory, so a billion rows shuffle without an id list and any rank, worker or resumed run can
compute its own part alone. `mix_seed` makes independent seeds from several numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_MASK64 = (1 << 64) - 1

Indices = npt.NDArray[np.int64]


def mix_seed(*numbers: int) -> int:
    """Returns a 63-bit seed that depends on all numbers and their order (splitmix64, chained)."""
    return chain_seed(*numbers) >> 1


def chain_seed(*numbers: int, state: int = 0x9E3779B97F4A7C15) -> int:
    """Returns the state of a chain of numbers, to which others can be added; halved it is a seed."""
    for number in numbers:
        state = (state ^ (number & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state


def permute(places: Indices, size: int, *, key: int) -> Indices:
    """Returns where each place of 0 … size−1 goes under the key's permutation.

    The network permutes the smallest power of two that holds `size`; values that land outside are sent through
    again until they land inside, which keeps it a permutation and takes fewer than 2 passes on average.
    """
    if size <= 1:
        return np.zeros_like(places)
    num_bits = (size - 1).bit_length()
    # Processors multiply four numbers of 32 bits in the time of one of 64.
    number = np.uint32 if num_bits <= 32 else np.uint64
    keys = [number(mix_seed(key, round_) & int(np.iinfo(number).max)) for round_ in range(_ROUNDS)]
    values = _feistel(places.astype(number), num_bits, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], num_bits, keys)
        outside = outside[values[outside] >= size]
    found: Indices = values.astype(np.int64)
    return found


def _feistel(values: Any, num_bits: int, keys: list[Any]) -> Any:
    """Sends each value through the network; with an odd number of bits the halves differ by one, and change places."""
    number = values.dtype.type
    multiplier, width = number(0xD6E8FEB86659FD93 >> (64 - 8 * values.itemsize) | 1), 8 * values.itemsize
    right_bits, left_bits = num_bits // 2, num_bits - num_bits // 2
    masks = (number((1 << left_bits) - 1), number((1 << right_bits) - 1))
    left, right = values >> number(right_bits), values & masks[1]
    for round_, key in enumerate(keys):
        # A multiply-xorshift hash of the right half, of which the upper bits are taken; overflow is meant.
        mixed = (right + key) * multiplier
        mixed ^= mixed >> number(width // 2)
        mixed *= multiplier
        mixed >>= number(width // 2 - 3)
        mixed &= masks[round_ % 2]
        left, right = right, left ^ mixed
    return (left << number(right_bits)) | right


class Order:
    """The endless order of a dataset's samples: epoch after epoch, each a permutation of its own.

    `indices(start, stop)` gives the samples of those global positions. Positions are computed in chunks
    and the current chunk is kept, for numpy costs about 100 µs an epoch whatever the length.
    """

    CHUNK = 8192
    CHUNK_EPOCHS = 16
    """The most epochs of a chunk, so that a set of a few samples does not wait for thousands of them."""

    def __init__(self, size: int, *, seed: int, shuffle: bool = True) -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._chunk_start = 0
        self._chunk: Indices = np.empty(0, dtype=np.int64)

    def indices(self, start: int, stop: int) -> Indices:
        """Returns the sample index at each global position of start … stop−1."""
        begin = start - self._chunk_start
        if begin < 0 or stop - self._chunk_start > len(self._chunk):
            length = max(min(self.CHUNK, self.CHUNK_EPOCHS * self.size), stop - start)
            self._chunk_start, begin = start, 0
            self._chunk = self._compute(np.arange(start, start + length, dtype=np.int64))
        return self._chunk[begin : begin + stop - start]

    def _compute(self, positions: Indices) -> Indices:
        epochs, places = np.divmod(positions, self.size)
        if not self.shuffle:
            return places
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permute(places[here], self.size, key=mix_seed(self.seed, int(epoch)))
        return indices
