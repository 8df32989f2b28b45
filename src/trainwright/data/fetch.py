"""Fetches the samples at given positions, each with its own randomness, and applies `data.on_error` to bad rows.

Positions come from order.py; loader.py requests them, in the process or in workers (workers.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from trainwright.data.collators import plain_mappings, returns_dicts
from trainwright.data.order import Order, chain_seed
from trainwright.data.randomness import SEEDERS, DrawDetector, preserve_generators, seed_generators
from trainwright.errors import DataError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.registry import resolve as registry
from trainwright.safe_text import mask_secrets

logger = logging.getLogger(__name__)

Collator = Callable[[list[Any]], Any]

SKIPPED_ROWS = "skipped_rows.json"
"""The list of skipped rows in the run folder: one JSON object per line, like metrics.json."""

_SAMPLE_STREAM, _BATCH_STREAM = 0xDA7A, 0xBA7C  # separate the seeds of samples, batches and steps of a run


class StreamBrokenError(DataError):
    """An error after which a stream cannot continue, in contrast to a row that could be skipped."""


def is_stream(dataset: Any) -> bool:
    """Returns True if the dataset can only be iterated. A dataset with both an index and iteration is read by its
    index."""
    return hasattr(dataset, "__iter__") and not (has_index(dataset) and hasattr(dataset, "__len__"))


def has_index(dataset: Any) -> bool:
    """Returns True if the dataset defines `__getitem__`; the one that torch's Dataset defines only raises."""
    method = getattr(type(dataset), "__getitem__", None)
    return method is not None and method is not Dataset.__getitem__


def draws_nothing(dataset: Any) -> bool:
    """Returns True if fetching from this dataset uses no randomness, so that draws need not be detected.

    A dataset declares it with the attribute `draws_nothing = True`. Lists and tensors never do. Detection costs about
    80 µs per batch.
    """
    declared = getattr(dataset, "draws_nothing", None)
    if declared is not None:
        return bool(declared)
    if isinstance(dataset, Subset):
        return draws_nothing(dataset.dataset)
    return type(dataset) in (TensorDataset, list, tuple)


def reject_loader(dataset: Any, label: str) -> None:
    """Rejects torch's DataLoader, which would look like a stream of samples."""
    if isinstance(dataset, DataLoader):
        raise DataError(f"{label}: a DataLoader is not a dataset. Pass its dataset: the run creates the batches.")


def count_samples(dataset: Any, label: str) -> int:
    """Returns the number of samples, or raises DataError with the reason why the dataset cannot be used."""
    reject_loader(dataset, label)
    name = type(dataset).__name__
    if not has_index(dataset):
        raise DataError(
            f"{label}: {name} has neither `__getitem__` nor `__iter__`. Define `__len__` and `__getitem__`, or "
            "`__iter__` for a stream."
        )
    try:
        size = len(dataset)
    except TypeError as error:
        raise DataError(f"{label}: {name} has no length. Define `__len__`.") from error
    if size == 0:
        raise DataError(f"{label}: {name} is empty. Check its path or filter.")
    return size


def positive_indices(indices: Sequence[int] | npt.NDArray[np.int64], *, size: int, of: str) -> npt.NDArray[np.int64]:
    """Returns the indices as an array; a negative index counts from the end, as in a list.

    An index out of range raises IndexError, which also ends an iteration. `of` names the elements in the message.

    >>> positive_indices([0, -1], size=10, of="rows").tolist()
    [0, 9]
    """
    found = np.asarray(indices) if len(indices) else np.empty(0, np.int64)
    if found.dtype.kind not in "iu":  # 1.5 would be truncated to 1
        raise TypeError(f"Indices into the {size} {of} must be integers, not {list(indices)[:10]}.")
    outside = found[(found < -size) | (found >= size)]
    if outside.size:
        raise IndexError(f"Index {outside[0]} is out of range for the {size} {of}.")
    return np.where(found < 0, found + size, found).astype(np.int64, copy=False)


@dataclass(frozen=True)
class View:
    """The data rank of this process and the number of data ranks."""

    rank: int = 0
    size: int = 1

    def share(self, start: int, stop: int) -> tuple[int, int]:
        """Returns this rank's contiguous range of positions start … stop−1; the ranks' ranges cover all of them."""
        length = stop - start
        return start + length * self.rank // self.size, start + length * (self.rank + 1) // self.size


class Span(NamedTuple):
    """A rank's positions of one batch: what a SampleFetcher fetches."""

    start: int
    stop: int
    is_stand_in: bool = False
    """True if the rank has no position in this batch: it fetches an earlier one, with weight 0."""
    batch: tuple[int, int] = (0, 0)
    """The positions of the whole batch over all ranks: start and stop."""
    indices: tuple[int, ...] = ()
    """The sample at each position if a sampler has drawn them in the run's process; empty if the order defines them."""


@dataclass(frozen=True)
class RowFailure:
    """A row that cannot be read. Two failures of one row are equal, because messages may contain addresses."""

    source: str
    row: int
    error: str = field(compare=False)
    lane: int | None = None
    """The lane of a stream with several lanes."""
    of: str = "data.train"
    """The dataset that the row belongs to."""

    @classmethod
    def from_error(cls, error: Exception, *, source: str, row: int, lane: int | None = None) -> RowFailure:
        """Creates a failure from an exception."""
        return cls(source, row, mask_secrets(f"{type(error).__name__}: {error}"), lane)

    def describe(self) -> str:
        """Returns the row and its error as text."""
        lane = "" if self.lane is None else f" of lane {self.lane}"
        return f"row {self.row}{lane} of {self.source} cannot be read ({self.error})"

    def annotate(self, error: Exception) -> None:
        """Adds the row to the exception as a note."""
        lane = "" if self.lane is None else f" of lane {self.lane}"
        error.add_note(f"while reading sample {self.row}{lane} of {self.source}")


class OnError:
    """Counts and lists the rows that are skipped because they cannot be read."""

    def __init__(self, *, skips: bool = False, at_most: int = 100, folder: Path | None = None) -> None:
        self.skips = skips
        self._at_most = at_most
        self._file = None if folder is None else folder / SKIPPED_ROWS
        self._known: set[RowFailure] | None = None

    def note(self, failures: Sequence[RowFailure], *, of: str = "data.train") -> None:
        """Lists skipped rows of a dataset; raises if there are more than `data.max_skipped`."""
        if self._known is None:
            self._known = self._read()
        for failure in (replace(each, of=of) for each in failures):
            if failure in self._known:
                continue
            self._known.add(failure)
            if self._file is not None:
                line = {name: value for name, value in {"of": of, **asdict(failure)}.items() if value is not None}
                # One write of one short line in append mode: several ranks may write at the same time.
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            if len(self._known) > self._at_most:
                raise DataError(
                    f"data.on_error: {failure.describe()}, which is skipped row number {len(self._known)}, but "
                    f"data.max_skipped is {self._at_most}. The rows are listed in {self._file}. Repair the data or "
                    "raise data.max_skipped."
                )
            logger.warning("Skipped %s.", failure.describe())

    def _read(self) -> set[RowFailure]:
        known = set()
        if self._file is not None and self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                try:
                    known.add(RowFailure(**json.loads(line)))
                except (ValueError, TypeError):
                    continue  # the incomplete last line of a killed run
        return known


class Fetched(NamedTuple):
    """A rank's share of one batch."""

    batch: Any
    num_samples: int
    """The number of samples that count; 0 for a placeholder."""
    failures: tuple[RowFailure, ...] = ()
    """Rows that were skipped because they cannot be read."""
    cursors: tuple[tuple[int, Any], ...] = ()
    """The position from which a stream can be resumed: (lane, cursor)."""
    sources: tuple[str, ...] = ()
    """The source of each sample of a mixed stream."""
    ended: tuple[int, ...] = ()
    """The lanes of a stream that have ended, as far as the reader knows."""

    def count_ignored(self) -> tuple[int, int]:
        """Returns the number of labels of -100, and the number of rows in which all labels are -100.

        These rows stay in the batch, with weight 0 in a loss that counts labels, because removing them would change the
        position of every later sample.
        """
        labels = self.batch.get("labels") if isinstance(self.batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32) or not self.num_samples:
            return 0, 0
        # The batch is still on the host, and numpy is faster than torch on small arrays.
        ignored = labels.numpy() == IGNORED_LABEL
        num_ignored = int(np.count_nonzero(ignored))
        if not num_ignored or len(labels) != self.num_samples:
            return num_ignored, 0
        return num_ignored, int(np.count_nonzero(ignored.reshape(len(labels), -1).all(1)))


class SampleFetcher(Dataset[Any]):
    """Fetches and collates the samples at global positions, each with its own randomness; runs in workers too.

    Only generators that were drawn from are seeded: if the samples or the collator drew from another one, the batch
    is fetched again with that one seeded too.
    """

    def __init__(
        self, dataset: Any, order: Order, collator: Collator, seed: int, *, skips_errors: bool = False
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.collator = collator
        self._sample_seeds, self._batch_seeds = chain_seed(seed, _SAMPLE_STREAM), chain_seed(seed, _BATCH_STREAM)
        self._skips_errors = skips_errors
        self._detector = DrawDetector()
        self._returns_dicts = returns_dicts(collator)
        self._collator_may_draw = not getattr(collator, "draws_nothing", False)
        self._may_draw = self._collator_may_draw or not draws_nothing(dataset)
        self._drawn_by_samples: frozenset[str] = frozenset()
        self._drawn_by_collator: frozenset[str] = frozenset()

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker unpickles the dataset, which is in the state, after it has called the function.
        return make_in_project, (SampleFetcher, registry.project_folder()), self.__dict__

    def __getitems__(self, span: Span) -> Fetched:
        """Fetches a batch in a worker."""
        return self.fetch(span)

    def fetch(self, span: Span) -> Fetched:
        """Fetches and collates the samples; preserves the states of the global generators."""
        indices = list(span.indices) or self.order.indices(span.start, span.stop).tolist()
        with preserve_generators() if self._may_draw else nullcontext():
            while True:
                if self._may_draw:
                    self._detector.start()
                samples: list[Any] | None = None
                failures: list[RowFailure] = []
                if not self._drawn_by_samples:
                    try:
                        samples = fetch(self.dataset, indices)
                    except Exception:
                        if not self._skips_errors:
                            raise
                if samples is None:
                    samples, failures = self._fetch_one_by_one(span.start, indices)
                if self._may_draw:
                    unseeded = self._detector.drawn() - self._drawn_by_samples
                    if unseeded:
                        self._drawn_by_samples |= unseeded
                        continue
                num_samples = 0 if span.is_stand_in else len(samples)
                samples = samples or self._find_stand_in(span)
                try:
                    if self._collator_may_draw:
                        batch, is_seeded = self._collate_seeded(span, samples)
                    else:
                        batch, is_seeded = self.collator(samples), True
                except Exception as error:
                    self._explain_none(error, samples, indices, failures)
                    raise
                if is_seeded:
                    batch = batch if self._returns_dicts else plain_mappings(batch)
                    return Fetched(batch, num_samples, tuple(failures))

    def describe(self, span: Span) -> str:
        """Names the samples at these positions."""
        indices = list(span.indices) or self.order.indices(span.start, span.stop).tolist()
        shown = ", ".join(map(str, indices[:16])) + (", …" if len(indices) > 16 else "")
        return f"positions {span.start} to {span.stop - 1}, which are samples {shown}"

    def _collate_seeded(self, span: Span, samples: list[Any]) -> tuple[Any, bool]:
        """Returns the batch, and whether all generators that the collator drew from were seeded."""
        self._detector.start()
        seeded = self._drawn_by_samples | self._drawn_by_collator
        seed_generators(chain_seed(span.start, state=self._batch_seeds) >> 1, seeded)
        batch = self.collator(samples)
        unseeded = self._detector.drawn() - seeded
        self._drawn_by_collator |= unseeded
        return batch, not unseeded

    def _explain_none(
        self, error: Exception, samples: list[Any], indices: list[int], failures: list[RowFailure]
    ) -> None:
        """Raises an error that names a sample that is None, if there is one; a collator may accept such samples."""
        number = next((number for number, sample in enumerate(samples) if sample is None), None)
        if number is None:
            return
        dataset, located = _locate(self.dataset, indices)
        skipped = {failure.row for failure in failures}
        rows = [_failure(error, dataset, index) for index in located]
        readable = [row for row in rows if row.row not in skipped]
        if number < len(readable):  # otherwise a placeholder
            row = readable[number]
            raise DataError(
                f"Sample {row.row} of {row.source} is None. Return a sample for every index, or use a collator that "
                "accepts None."
            ) from error

    def _find_stand_in(self, span: Span) -> list[Any]:
        """Returns a readable sample near a span that has none; it is in the batch with weight 0."""
        for distance in range(1, self.order.size):
            for position in (span.start - distance, span.stop - 1 + distance):
                if position >= 0:
                    indices = self.order.indices(position, position + 1).tolist()
                    samples, _ = self._fetch_one_by_one(position, indices)
                    if samples:
                        return samples
        raise DataError(f"data.on_error: skip, but no sample of {type(self.dataset).__name__} can be read.")

    def _fetch_one_by_one(self, position: int, indices: list[int]) -> tuple[list[Any], list[RowFailure]]:
        """Fetches each sample with seeded generators, and skips unreadable ones if `data.on_error` is skip."""
        samples, failures = [], []
        dataset, indices = _locate(self.dataset, indices)
        seeders = [SEEDERS[name] for name in self._drawn_by_samples]
        for offset, index in enumerate(indices):
            seed = chain_seed(position + offset, state=self._sample_seeds) >> 1
            for seed_one in seeders:
                seed_one(seed)
            try:
                samples.append(dataset[index])
            except Exception as error:
                failure = _failure(error, dataset, index)
                if not self._skips_errors:
                    failure.annotate(error)
                    raise
                failures.append(failure)
        return samples, failures


def make_in_project(kind: type[Any], folder: Path | None) -> Any:
    """Creates an empty object in a spawned worker, where the project's classes must be importable first."""
    if folder is not None:
        registry.enter_project(folder)
    return object.__new__(kind)


def fetch(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Returns the samples, with one call if the dataset has `__getitems__`."""
    samples: list[Any] = []
    try:
        if hasattr(dataset, "__getitems__"):
            return list(dataset.__getitems__(indices))
        for index in indices:
            samples.append(dataset[index])  # their number identifies the one that failed
    except Exception as error:
        if hasattr(dataset, "__getitems__"):
            _annotate_first_failure(error, *_locate(dataset, list(indices)))
        else:
            _failure(error, dataset, indices[len(samples)]).annotate(error)
        raise
    return samples


def _locate(dataset: Any, indices: list[int]) -> tuple[Any, list[int]]:
    """Returns the dataset of a split and the indices there, for all samples in one call."""
    if hasattr(type(dataset), "indices_in_whole"):
        return _locate(dataset.dataset, dataset.indices_in_whole(indices))
    return dataset, indices


def _annotate_first_failure(error: Exception, dataset: Any, indices: list[int]) -> None:
    """Adds the sample to an error about several samples: the first one that also fails alone."""
    for index in indices:
        try:
            dataset[index]
        except Exception as again:
            _failure(again, dataset, index).annotate(error)
            return


def _failure(error: Exception, dataset: Any, index: int) -> RowFailure:
    """Describes a row; one of a mixture is counted within its source."""
    name, row = dataset.locate(index) if hasattr(type(dataset), "locate") else (type(dataset).__name__, index)
    return RowFailure.from_error(error, source=name, row=row)
