"""Splits one dataset into disjoint parts that cover it, without an id list.

A part is a range of positions under a keyed permutation, so membership depends only on (seed, sizes).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from trainwright.data.fetch import draws_nothing, fetch, positive_indices
from trainwright.data.order import Indices, mix_seed, permute
from trainwright.errors import DataError

_SPLIT_STREAM = 0x5311  # separates the permutation of the split from those of the epochs
_OF_THE_WHOLE = ("make_order", "source_of", "plan", "fill", "sizes")


class SplitDataset(Dataset[Any]):
    """The samples of `dataset` at positions start … stop−1 of the split's permutation."""

    def __init__(self, dataset: Any, start: int, stop: int, *, seed: int) -> None:
        self.dataset = dataset
        self.start = start
        self.stop = stop
        self.seed = seed
        self.draws_nothing = draws_nothing(dataset)

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices_in_whole([index])[0]]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Fetches a batch with one call if the dataset supports it."""
        return fetch(self.dataset, self.indices_in_whole(indices))

    def __getattr__(self, name: str) -> Any:
        # Other attributes of the dataset (its tokenizer, tokens_per_sample), but not those by sample index.
        if name.startswith("__") or name in ("dataset", *_OF_THE_WHOLE):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    @property
    def lengths(self) -> Any:
        """The length of each sample, if the dataset has `lengths`."""
        return np.asarray(self.dataset.lengths)[self._locate(np.arange(len(self), dtype=np.int64))]

    def indices_in_whole(self, indices: Sequence[int]) -> list[int]:
        """Returns the samples' indices in the whole dataset; a call takes about 200 µs for any number of them."""
        result: list[int] = self._locate(indices).tolist()
        return result

    def _locate(self, indices: Sequence[int] | Indices) -> Indices:
        # Checked, because the next position belongs to another part.
        positions = positive_indices(indices, size=len(self), of="samples of a split") + self.start
        return permute(positions, len(self.dataset), key=mix_seed(self.seed, _SPLIT_STREAM))


def sizes_by_ratio(size: int, ratios: Sequence[float]) -> list[int]:
    """Returns the number of samples of each part; the first has at least one, the others may have none."""
    total = sum(ratios)
    edges = [0, *(max(1, round(size * sum(ratios[:count]) / total)) for count in range(1, len(ratios) + 1))]
    return [stop - start for start, stop in pairwise(edges)]


def split(dataset: Any, sizes: Sequence[int], *, seed: int) -> list[SplitDataset]:
    """Splits a dataset into disjoint parts of these sizes, which must add up to its length."""
    if sum(sizes) != len(dataset) or min(sizes) < 0:
        raise DataError(f"data.split: {' + '.join(map(str, sizes))} samples are not {len(dataset)}.")
    edges = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    return [SplitDataset(dataset, start, stop, seed=seed) for start, stop in pairwise(edges)]
