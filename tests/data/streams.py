"""Streams for the tests: of different abilities, all of numbered rows."""

import random

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Plain(IterableDataset):
    """Can only be iterated; deals its rows to torch's workers by itself, as torch's documentation shows."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for row in range(start, self.size, step):
            yield torch.tensor(row)


class Noisy(Plain):
    """Draws from all three generators."""

    def __iter__(self):
        for row in range(self.size):
            values = [row, torch.rand(()).item(), random.random(), np.random.rand()]
            yield torch.tensor(values, dtype=torch.float64)


class Seeking(IterableDataset):
    """Rows in shards of unequal length; goes on from a state without reading what came before."""

    draws_nothing = True

    def __init__(self, shards, rows_read=None):
        self.shards = shards
        self.rows_read = [] if rows_read is None else rows_read
        self.start = (0, 0)
        self.place = (0, 0)

    @classmethod
    def of(cls, size, num_shards):
        """Numbers 0 … size−1, cut where a fixed generator says."""
        edges = sorted(np.random.default_rng(size * 31 + num_shards).integers(0, size + 1, num_shards - 1).tolist())
        return cls([list(range(a, b)) for a, b in zip([0, *edges], [*edges, size], strict=True)])

    @property
    def num_shards(self):
        return len(self.shards)

    def shard(self, num_shards, index):
        return Seeking(self.shards[index::num_shards], self.rows_read)

    def state_dict(self):
        return {"place": list(self.place)}

    def load_state_dict(self, state):
        self.start = tuple(state["place"])

    def __iter__(self):
        (first, skipped), self.start = self.start, (0, 0)
        self.place = (first, skipped)
        for number in range(first, len(self.shards)):
            for row in range(skipped, len(self.shards[number])):
                self.place = (number, row + 1)
                self.rows_read.append(self.shards[number][row])
                yield torch.tensor(self.shards[number][row])
            skipped = 0


class Fragile:
    """Rows of which some cannot be read; the iteration goes on behind them."""

    draws_nothing = True

    def __init__(self, size, broken):
        self.size, self.broken = size, broken

    def __iter__(self):
        return _FragileRows(self)


class _FragileRows:
    def __init__(self, stream):
        self.stream, self.row = stream, 0

    def __next__(self):
        if self.row >= self.stream.size:
            raise StopIteration
        self.row += 1
        if self.row - 1 in self.stream.broken:
            raise ValueError(f"row {self.row - 1} is torn")
        return torch.tensor(self.row - 1)
