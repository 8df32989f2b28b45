"""Maps global positions to samples, as a pure function of (seed, position).

A keyed permutation (a Feistel network with cycle walking) visits every sample of an epoch exactly once in O(1)
memory, so a billion rows are shuffled without an id list and any rank, worker or resumed run can compute its own
positions. `mix_seed` derives independent seeds from several numbers.
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
    """Returns the state of a chain of numbers, which further calls can extend; shifted right by 1 it is a seed."""
    for number in numbers:
        state = (state ^ (number & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state


def permute(positions: Indices, size: int, *, key: int) -> Indices:
    """Returns the image of each position of 0 … size−1 under the key's permutation.

    The network permutes the smallest power of two that is at least `size`; values outside are permuted again until
    they are inside, which keeps it a permutation and takes fewer than 2 passes on average.
    """
    if size <= 1:
        return np.zeros_like(positions)
    num_bits = (size - 1).bit_length()
    # Processors multiply four 32-bit numbers in the time of one 64-bit number.
    number = np.uint32 if num_bits <= 32 else np.uint64
    keys = [number(mix_seed(key, round_) & int(np.iinfo(number).max)) for round_ in range(_ROUNDS)]
    values = _feistel(positions.astype(number), num_bits, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], num_bits, keys)
        outside = outside[values[outside] >= size]
    found: Indices = values.astype(np.int64)
    return found


def _feistel(values: Any, num_bits: int, keys: list[Any]) -> Any:
    """Applies the network to each value; with an odd number of bits the halves differ by one bit and are swapped."""
    number = values.dtype.type
    multiplier, width = number(0xD6E8FEB86659FD93 >> (64 - 8 * values.itemsize) | 1), 8 * values.itemsize
    right_bits, left_bits = num_bits // 2, num_bits - num_bits // 2
    masks = (number((1 << left_bits) - 1), number((1 << right_bits) - 1))
    left, right = values >> number(right_bits), values & masks[1]
    for round_, key in enumerate(keys):
        # A multiply-xorshift hash of the right half, of which the upper bits are used; overflow is intended.
        mixed = (right + key) * multiplier
        mixed ^= mixed >> number(width // 2)
        mixed *= multiplier
        mixed >>= number(width // 2 - 3)
        mixed &= masks[round_ % 2]
        left, right = right, left ^ mixed
    return (left << number(right_bits)) | right


class Order:
    """The endless order of a dataset's samples: epoch after epoch, each with a different permutation.

    With a smaller `epoch_size` an epoch is the beginning of a permutation. Positions are computed in chunks and the
    current chunk is kept, because numpy takes about 100 µs per epoch for any length.
    """

    CHUNK = 8192
    CHUNK_EPOCHS = 16
    """The largest number of epochs in a chunk, which limits the time for a small dataset."""

    def __init__(self, size: int, *, seed: int, shuffle: bool = True, epoch_size: int | None = None) -> None:
        self.size = size
        self.epoch_size = size if epoch_size is None else epoch_size
        """The positions of an epoch."""
        self.seed = seed
        self.shuffle = shuffle
        self._chunk_start = 0
        self._chunk: Indices = np.empty(0, dtype=np.int64)

    def indices(self, start: int, stop: int) -> Indices:
        """Returns the sample index at each global position of start … stop−1."""
        begin = start - self._chunk_start
        if begin < 0 or stop - self._chunk_start > len(self._chunk):
            length = max(min(self.CHUNK, self.CHUNK_EPOCHS * self.epoch_size), stop - start)
            self._chunk_start, begin = start, 0
            self._chunk = self._compute(np.arange(start, start + length, dtype=np.int64))
        return self._chunk[begin : begin + stop - start]

    def epoch_span(self, position: int) -> tuple[int, int]:
        """Returns the first position of the epoch of a position, and the first one after it."""
        begin = position // self.epoch_size * self.epoch_size
        return begin, begin + self.epoch_size

    def _compute(self, positions: Indices) -> Indices:
        epochs, offsets = np.divmod(positions, self.epoch_size)
        if not self.shuffle:
            return offsets
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permute(offsets[here], self.size, key=mix_seed(self.seed, int(epoch)))
        return indices
