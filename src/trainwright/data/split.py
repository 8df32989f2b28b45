"""Cuts one dataset into disjoint parts that cover it, without an id list.

A part is a range of places under a keyed permutation, so membership depends on (seed, sizes) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from trainwright.data.fetch import draws_nothing, fetch
from trainwright.data.order import Indices, mix_seed, permute
from trainwright.errors import DataError

_SPLIT_STREAM = 0x5311  # keeps the split's permutation apart from the epochs' ones of the same seed
_OF_THE_WHOLE = ("make_order", "source_of", "plan", "fill", "sizes")


class Part(Dataset[Any]):
    """The samples of `dataset` at places start … stop−1 of the split's permutation."""

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
        """Fetches a batch at once where the dataset can."""
        return fetch(self.dataset, self.indices_in_whole(indices))

    def __getattr__(self, name: str) -> Any:
        # What else a dataset offers (its tokenizer, tokens_per_sample) it offers through its parts too, but not what
        # it says of its samples by their number.
        if name.startswith("__") or name in ("dataset", *_OF_THE_WHOLE):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    @property
    def lengths(self) -> Any:
        """The length of each sample of the part, where the dataset knows them."""
        return np.asarray(self.dataset.lengths)[self._locate(np.arange(len(self), dtype=np.int64))]

    def indices_in_whole(self, indices: Sequence[int]) -> list[int]:
        """Returns where samples of this part stand in the whole; a call costs about 200 µs, however many they are."""
        result: list[int] = self._locate(np.asarray(indices, dtype=np.int64)).tolist()
        return result

    def _locate(self, places: Indices) -> Indices:
        # Checked, for the next place belongs to another part; and iterating ends at an IndexError.
        if places.size and not -len(self) <= places.min() <= places.max() < len(self):
            raise IndexError(f"index {places.tolist()} is outside of a part of {len(self)} samples")
        places = np.where(places < 0, self.stop, self.start) + places
        return permute(places, len(self.dataset), key=mix_seed(self.seed, _SPLIT_STREAM))


def sizes_by_ratio(size: int, ratios: Sequence[float]) -> list[int]:
    """Returns how many samples each part gets; the first at least one, the others none where there are too few."""
    total = sum(ratios)
    edges = [0, *(max(1, round(size * sum(ratios[:count]) / total)) for count in range(1, len(ratios) + 1))]
    return [stop - start for start, stop in pairwise(edges)]


def split(dataset: Any, sizes: Sequence[int], *, seed: int) -> list[Part]:
    """Cuts a dataset into parts of these sizes, which together are the whole: disjoint and exhaustive."""
    if sum(sizes) != len(dataset) or min(sizes) < 0:
        raise DataError(f"data.split: parts of {' + '.join(map(str, sizes))} samples do not make {len(dataset)}.")
    edges = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    return [Part(dataset, start, stop, seed=seed) for start, stop in pairwise(edges)]
