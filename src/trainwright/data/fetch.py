"""Fetches the samples at given positions, each with randomness of its own.

A sample's generators (torch's, Python's, numpy's) are seeded from (seed, position), so it comes out the
same on any rank, in any worker and after a resume; a collator's from (seed, first position), the same in
any worker. Step randomness is the loop's. Batching is loader.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from trainwright import registry
from trainwright.data.order import Order, mix_seed
from trainwright.data.randomness import Watch, seed_generators
from trainwright.errors import DataError

Collator = Callable[[list[Any]], Any]

_SAMPLE_STREAM, _BATCH_STREAM = 0xDA7A, 0xBA7C  # keep samples', batches' and steps' seeds of a run apart


def count_samples(dataset: Any, label: str) -> int:
    """Returns the number of samples, or says why the dataset cannot be used."""
    if isinstance(dataset, DataLoader):
        raise DataError(f"{label}: this is a DataLoader. Give its dataset: batches are made by the run itself.")
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
    """Fetches the samples at global positions, each with its own randomness; runs in workers too.

    Seeding changes nothing where nobody draws, so it is done only for a dataset or collator that was seen drawing.
    """

    def __init__(self, dataset: Any, order: Order, collator: Collator, seed: int) -> None:
        self.dataset = dataset
        self.order = order
        self.collator = collator
        self.seed = seed
        self._watch = Watch()
        self._dataset_may_draw = not draws_nothing(dataset)
        self._collator_may_draw = not getattr(collator, "draws_nothing", False)
        self._was_seen_drawing = False

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker unpickles the dataset, which is in the state, after it has called the function.
        return _make_in_project, (registry.project_folder(),), self.__dict__

    def fetch_batch(self, start: int, stop: int) -> Any:
        """Fetches and collates in this process, leaving its generators as they were."""
        positions = range(start, stop)
        if not (self._dataset_may_draw or self._collator_may_draw):
            return self.collator(self._fetch(positions))
        watch = self._watch
        watch.begin()
        if not self._was_seen_drawing:
            try:
                batch = self.collator(self._fetch(positions))
            except BaseException:
                watch.restore()
                raise
            if not watch.saw_a_draw():
                return batch
            self._was_seen_drawing = True
        try:
            return self.collator(self._fetch_seeded(positions))
        finally:
            watch.restore()

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Returns the samples at consecutive positions, with the generators ready for the collator.

        A worker's loader calls this, then the collator, and nothing of ours in between. The worker's own
        generators are nobody's, so they need no restoring.
        """
        if not self._was_seen_drawing:
            self._watch.begin()
            samples = self._fetch(positions)
            if not self._dataset_may_draw or not self._watch.saw_a_draw():
                self._seed_for_collator(positions)
                return samples
            self._was_seen_drawing = True
        return self._fetch_seeded(positions)

    def _fetch(self, positions: Sequence[int]) -> list[Any]:
        return fetch(self.dataset, self.order.indices(positions[0], positions[-1] + 1).tolist())

    def _fetch_seeded(self, positions: Sequence[int]) -> list[Any]:
        indices: list[int] = self.order.indices(positions[0], positions[-1] + 1).tolist()
        if self._dataset_may_draw:
            dataset, indices = _locate(self.dataset, indices)
            samples = []
            for position, index in zip(positions, indices, strict=True):
                seed_generators(mix_seed(self.seed, _SAMPLE_STREAM, position))
                samples.append(_read(dataset, index))
        else:
            samples = fetch(self.dataset, indices)
        self._seed_for_collator(positions)
        return samples

    def _seed_for_collator(self, positions: Sequence[int]) -> None:
        if self._collator_may_draw:
            seed_generators(mix_seed(self.seed, _BATCH_STREAM, positions[0]))


def _make_in_project(folder: Path | None) -> SampleFetcher:
    if folder is not None:
        registry.enter_project(folder)
    return SampleFetcher.__new__(SampleFetcher)


def _locate(dataset: Any, indices: list[int]) -> tuple[Any, list[int]]:
    """Returns the dataset that a split's part is cut from and the indices there, for all samples in one call."""
    if hasattr(type(dataset), "indices_in_whole"):
        return _locate(dataset.dataset, dataset.indices_in_whole(indices))
    return dataset, indices


def fetch(dataset: Any, indices: list[int]) -> list[Any]:
    """Returns the samples, with one call where the dataset offers `__getitems__`."""
    if hasattr(dataset, "__getitems__"):
        samples: list[Any] = dataset.__getitems__(indices)
        return samples
    return [_read(dataset, index) for index in indices]


def _read(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:
        error.add_note(f"while reading sample {index} of {type(dataset).__name__}")
        raise


def draws_nothing(dataset: Any) -> bool:
    """Does fetching from this dataset surely use no randomness? Then not even watching it is needed (25 µs a batch).

    A dataset may say so itself with the attribute `draws_nothing = True`.
    """
    declared = getattr(dataset, "draws_nothing", None)
    if declared is not None:
        return bool(declared)
    if isinstance(dataset, Subset):
        return draws_nothing(dataset.dataset)
    return type(dataset) is TensorDataset
