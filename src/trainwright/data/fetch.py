"""Fetches the samples at given positions, each with randomness of its own.

A sample's generators (torch's, Python's, numpy's) are seeded from (seed, position), so it comes out the
same on any rank, in any worker and after a resume; a collator's from (seed, first position), the same in
any worker. Step randomness is the loop's. Batching is loader.py's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from trainwright.data.order import Order, mix_seed
from trainwright.errors import DataError

Collator = Callable[[list[Any]], Any]

_SAMPLE_STREAM, _BATCH_STREAM = 0xDA7A, 0xBA7C  # keep samples', batches' and steps' seeds of a run apart


def count_samples(dataset: Any, label: str) -> int:
    """Returns the number of samples, or says why the dataset cannot be used."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{label}: {type(dataset).__name__} has no `__getitem__`, so its order could not be resumed exactly. "
            "Use a map-style dataset, which has `__len__` and `__getitem__`."
        )
    try:
        size = len(dataset)
    except TypeError as error:
        raise DataError(f"{label}: {type(dataset).__name__} has no length. Give it a `__len__`.") from error
    if size == 0:
        raise DataError(f"{label}: {type(dataset).__name__} is empty. Check the path or filter that makes it.")
    return size


class SampleFetcher(Dataset[Any]):
    """Fetches the samples at global positions, each with its own randomness; runs in workers too."""

    def __init__(self, dataset: Any, order: Order, collator: Collator, seed: int) -> None:
        self.dataset = dataset
        self.order = order
        self.collator = collator
        self.seed = seed
        self._dataset_draws = not draws_nothing(dataset)
        self._collator_draws = not getattr(collator, "draws_nothing", False)

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Returns the samples at consecutive positions, with the generators ready for the collator."""
        indices: list[int] = self.order.indices(positions[0], positions[-1] + 1).tolist()
        if self._dataset_draws:
            dataset, indices = _locate(self.dataset, indices)
            samples = [self._fetch_seeded(dataset, *place) for place in zip(indices, positions, strict=True)]
        else:
            samples = fetch(self.dataset, indices)
        if self._collator_draws:
            # Here, for a worker's loader calls the collator next and nothing of ours in between.
            _seed_generators(mix_seed(self.seed, _BATCH_STREAM, positions[0]))
        return samples

    def _fetch_seeded(self, dataset: Any, index: int, position: int) -> Any:
        _seed_generators(mix_seed(self.seed, _SAMPLE_STREAM, position))
        return dataset[index]

    def fetch_batch(self, start: int, stop: int) -> Any:
        """Fetches and collates in this process, leaving its generators as they were."""
        if not (self._dataset_draws or self._collator_draws):
            return self.collator(self.__getitems__(range(start, stop)))
        torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            return self.collator(self.__getitems__(range(start, stop)))
        finally:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _locate(dataset: Any, indices: list[int]) -> tuple[Any, list[int]]:
    """Returns the dataset that a split's part is cut from and the indices there, for all samples in one call."""
    if hasattr(type(dataset), "indices_in_whole"):
        return _locate(dataset.dataset, dataset.indices_in_whole(indices))
    return dataset, indices


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def fetch(dataset: Any, indices: list[int]) -> list[Any]:
    """Returns the samples, with one call where the dataset offers `__getitems__`."""
    if hasattr(dataset, "__getitems__"):
        samples: list[Any] = dataset.__getitems__(indices)
        return samples
    return [dataset[index] for index in indices]


def draws_nothing(dataset: Any) -> bool:
    """Does fetching from this dataset surely use no randomness? Then seeding each sample is saved (8 µs each).

    A dataset may say so itself with the attribute `draws_nothing = True`.
    """
    declared = getattr(dataset, "draws_nothing", None)
    if declared is not None:
        return bool(declared)
    if isinstance(dataset, Subset):
        return draws_nothing(dataset.dataset)
    return type(dataset) is TensorDataset
