"""An order in which the samples of a batch have about equal lengths: less padding, and few shapes with buckets.

    order of an epoch → windows of many batches → sorted by length → cut into batches → batches shuffled

Still a pure function of (seed, position). Windows end with their epoch, so each epoch covers every sample once, and
begin where batches do: what an epoch has before its first whole batch is a small window of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainwright.data.order import Indices, Order, mix_seed, permute
from trainwright.errors import DataError

_WINDOW_STREAM = 0x714D  # keeps the seeds of windows apart from those of epochs

BATCHES_PER_WINDOW = 64
"""More make batches more equal, and less random."""


class LengthOrder:
    """The order of a dataset whose samples' lengths are known, window by window."""

    def __init__(self, lengths: Any, *, seed: int, shuffle: bool, global_batch_size: int) -> None:
        self.size = len(lengths)
        self._lengths = np.asarray(lengths)
        self._order = Order(self.size, seed=seed, shuffle=shuffle)
        self._seed = seed
        self._batch_size = global_batch_size
        self._window_size = BATCHES_PER_WINDOW * global_batch_size
        self._window = (-1, -1)
        self._sorted: Indices = np.empty(0, dtype=np.int64)

    def indices(self, start: int, stop: int) -> Indices:
        """Returns the sample index at each global position of start … stop−1."""
        pieces = []
        while start < stop:
            first, last = self._find_window(start)
            piece = self._sort(first, last)[start - first : stop - first]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _find_window(self, position: int) -> tuple[int, int]:
        """Returns the first position of a window and the one behind its last."""
        begin = position // self.size * self.size
        aligned = -(-begin // self._batch_size) * self._batch_size
        if position < aligned:
            return begin, min(aligned, begin + self.size)
        first = aligned + (position - aligned) // self._window_size * self._window_size
        return first, min(first + self._window_size, begin + self.size)

    def _sort(self, first: int, last: int) -> Indices:
        if (first, last) != self._window:
            indices = self._order.indices(first, last)
            indices = indices[np.argsort(self._lengths[indices], kind="stable")]
            batches = [indices[begin : begin + self._batch_size] for begin in range(0, len(indices), self._batch_size)]
            # The last one may be short: it stays last, so that the others begin where batches begin.
            num_whole, key = len(batches) - 1, mix_seed(self._seed, _WINDOW_STREAM, first)
            turns = permute(np.arange(num_whole), num_whole, key=key)
            self._sorted = np.concatenate([*(batches[turn] for turn in turns.tolist()), batches[-1]])
            self._window = (first, last)
        return self._sorted


def lengths_of(dataset: Any, label: str) -> Any:
    """Returns the lengths of a dataset's samples, or says how it could know them."""
    lengths = getattr(dataset, "lengths", None)
    if lengths is None:
        raise DataError(
            f"data.group_by_length: {label} is a {type(dataset).__name__}, which does not know the lengths of its "
            "samples. Give it an attribute `lengths`, or tokenize it with data.process, whose result has them."
        )
    return lengths
