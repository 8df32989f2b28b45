"""Fetches the samples at given positions, each with its own randomness, and applies `data.on_error` to bad rows.

Positions come from order.py; loader.py and streams.py ask for them, in the process or in workers (workers.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from trainwright.data.order import Indices, chain_seed
from trainwright.data.randomness import SEEDERS, DrawDetector, preserve_generators, seed_generators
from trainwright.errors import DataError
from trainwright.registry import resolve as registry

logger = logging.getLogger(__name__)


class StreamBrokenError(DataError):
    """An error after which a stream cannot go on: no row that could be left out."""


def is_stream(dataset: Any) -> bool:
    """Can this dataset only be iterated? One that offers both, an index and iteration, is read by its index."""
    return hasattr(dataset, "__iter__") and not (has_index(dataset) and hasattr(dataset, "__len__"))


def has_index(dataset: Any) -> bool:
    """Has the dataset a `__getitem__` of its own? torch gives every Dataset one that only raises."""
    own = getattr(type(dataset), "__getitem__", None)
    return own is not None and own is not Dataset.__getitem__


@dataclass(frozen=True)
class View:
    """Which data rank this process is, of how many."""

    rank: int = 0
    size: int = 1

    def part(self, start: int, stop: int) -> tuple[int, int]:
        """Returns this rank's contiguous share of positions; ranks in order give the whole again."""
        length = stop - start
        return start + length * self.rank // self.size, start + length * (self.rank + 1) // self.size


def positive_indices(indices: Sequence[int], *, size: int, of: str) -> npt.NDArray[np.int64]:
    """Returns the indices as an array; one below 0 counts from the end, as in a list.

    One outside raises IndexError, at which iterating ends; `of` is what the dataset holds, in the plural, for the
    message. The whole batch costs about 5 µs.

    >>> positive_indices([0, -1], size=10, of="rows").tolist()
    [0, 9]
    """
    places = np.asarray(indices)
    if not places.size:
        return np.empty(0, np.int64)
    if places.dtype.kind not in "iu":  # 1.5 would be cut to 1
        raise TypeError(f"An index of the {size} {of} is no whole number: {list(indices)[:10]}.")
    least = int(places.min())
    if least < -size or int(places.max()) >= size:
        outside = next(int(place) for place in places.tolist() if not -size <= place < size)
        raise IndexError(f"Index {outside} is outside of the {size} {of}.")
    places = places.astype(np.int64, copy=False)
    return places if least >= 0 else np.where(places < 0, places + size, places)


SKIPPED_ROWS = "skipped_rows.json"
"""The list in the run folder: one JSON object a line, as metrics.json."""


class OnError:
    """Takes note of rows that were left out."""

    def __init__(self, *, skips: bool = False, at_most: int = 100, folder: Path | None = None) -> None:
        self.skips = skips
        self._at_most = at_most
        self._file = None if folder is None else folder / SKIPPED_ROWS
        self._known: set[RowFailure] | None = None

    def note(self, failures: Sequence[RowFailure], *, of: str = "data.train") -> None:
        """Lists rows of a set that were left out; raises where they are too many."""
        if not failures:
            return
        if self._known is None:
            self._known = self._read()
        for failure in (replace(each, of=of) for each in failures):
            if failure in self._known:
                continue
            self._known.add(failure)
            self._list(failure)
            if len(self._known) > self._at_most:
                raise DataError(
                    f"data.on_error: skip, but {failure.describe()}, which makes {len(self._known)} such rows, and "
                    f"data.max_skipped is {self._at_most}. They are listed in {self._file}. Mend the data or raise it."
                )
            logger.warning("Left out: %s.", failure.describe())

    def _list(self, failure: RowFailure) -> None:
        if self._file is not None:
            # One write of one short line, appended: ranks may list rows at the same time.
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(failure.to_dict()) + "\n")

    def _read(self) -> set[RowFailure]:
        if self._file is None or not self._file.exists():
            return set()
        known = set()
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                known.add(RowFailure(**json.loads(line)))
            except (ValueError, TypeError):
                continue  # the last line of a run that was killed
        return known


Collator = Callable[[list[Any]], Any]

_SAMPLE_STREAM, _BATCH_STREAM = 0xDA7A, 0xBA7C  # keep samples', batches' and steps' seeds of a run apart


@dataclass(frozen=True)
class RowFailure:
    """A row that cannot be read. Two are the same if the row is: messages may hold addresses."""

    source: str
    row: int
    error: str = field(compare=False)
    lane: int | None = None
    """The lane of a stream that has several."""
    of: str = "data.train"
    """The set that the row belongs to."""

    @classmethod
    def from_error(cls, error: Exception, *, source: str, row: int, lane: int | None = None) -> RowFailure:
        """Describes an exception."""
        return cls(source, row, f"{type(error).__name__}: {error}", lane)

    def describe(self) -> str:
        """Says in words which row it is, and what is wrong with it."""
        lane = "" if self.lane is None else f" of lane {self.lane}"
        return f"row {self.row}{lane} of {self.source} cannot be read ({self.error})"

    def annotate(self, error: Exception) -> None:
        """Notes the row on the exception itself, for its traceback."""
        lane = "" if self.lane is None else f" of lane {self.lane}"
        error.add_note(f"while reading sample {self.row}{lane} of {self.source}")

    def to_dict(self) -> dict[str, Any]:
        """Returns what is known, as one line of a list of failures."""
        facts = {"of": self.of, **asdict(self)}
        return {name: value for name, value in facts.items() if value is not None}


class Span(NamedTuple):
    """A rank's positions of one batch: what a SampleFetcher is asked for."""

    start: int
    stop: int
    is_stand_in: bool = False
    """Has the rank no position of its own here? Then it fetches one before, and takes part with weight 0."""
    batch: tuple[int, int] = (0, 0)
    """The positions of the whole batch, over all ranks: its first, and the one behind its last."""

    @classmethod
    def of(cls, start: int, stop: int, view: View) -> Span:
        """Returns a rank's span of the batch at these positions."""
        own_start, own_stop = view.part(start, stop)
        if own_stop > own_start:
            return cls(own_start, own_stop, batch=(start, stop))
        return cls(max(own_start - 1, 0), max(own_start, 1), is_stand_in=True, batch=(start, stop))


class Fetched(NamedTuple):
    """A rank's share of one batch."""

    batch: Any
    num_samples: int
    """How many samples count; 0 for a stand-in, which only takes part."""
    failures: tuple[RowFailure, ...] = ()
    """Rows that were left out because they cannot be read."""
    cursors: tuple[tuple[int, Any], ...] = ()
    """Where a stream can be entered again: (lane, cursor)."""
    sources: tuple[str, ...] = ()
    """Which source of a mixed stream each sample is from."""
    ended: tuple[int, ...] = ()
    """The lanes of a stream that the reader knows to have ended."""


class OrderLike(Protocol):
    """What the fetcher asks of an order (order.py, mix.py): which sample stands at which position."""

    size: int
    """Samples per epoch."""

    def indices(self, start: int, stop: int) -> Indices:
        """Returns the sample at each global position of start … stop−1."""
        ...


def reject_loader(dataset: Any, label: str) -> None:
    """Rejects torch's DataLoader, which would look like a stream of samples."""
    if isinstance(dataset, DataLoader):
        raise DataError(f"{label}: this is a DataLoader. Give its dataset: batches are made by the run itself.")


def count_samples(dataset: Any, label: str) -> int:
    """Returns the number of samples, or says why the dataset cannot be used."""
    reject_loader(dataset, label)
    if not has_index(dataset):
        raise DataError(
            f"{label}: {type(dataset).__name__} has neither `__getitem__` nor `__iter__`. Give it `__len__` and "
            "`__getitem__`, or `__iter__` where it can only be read as a stream."
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

    Seeding changes nothing where nobody draws, so only generators are seeded that were seen drawn from: samples are
    fetched, and where they or the collator drew from another one, fetched again with that one seeded too.
    """

    def __init__(
        self, dataset: Any, order: OrderLike, collator: Collator, seed: int, *, skips_errors: bool = False
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.collator = collator
        self._sample_seeds, self._batch_seeds = chain_seed(seed, _SAMPLE_STREAM), chain_seed(seed, _BATCH_STREAM)
        self._skips_errors = skips_errors
        self._detector = DrawDetector()
        self._dataset_may_draw = not draws_nothing(dataset)
        self._collator_may_draw = not getattr(collator, "draws_nothing", False)
        self._drawn_by_samples: frozenset[str] = frozenset()
        self._drawn_by_collator: frozenset[str] = frozenset()

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker unpickles the dataset, which is in the state, after it has called the function.
        return make_in_project, (SampleFetcher, registry.project_folder()), self.__dict__

    def fetch(self, span: Span) -> Fetched:
        """Fetches and collates in this process, leaving its generators as they were."""
        if not (self._dataset_may_draw or self._collator_may_draw):
            return self.__getitems__(span)
        with preserve_generators():
            return self.__getitems__(span)

    def __getitems__(self, span: Span) -> Fetched:
        """Fetches and collates in a worker, whose own generators are nobody's and need no restoring."""
        while (fetched := self._attempt(span)) is None:
            pass
        return fetched

    def describe(self, span: Span) -> str:
        """Names the samples at these positions."""
        indices = self._indices(span)
        shown = ", ".join(map(str, indices[:16])) + (", …" if len(indices) > 16 else "")
        return f"positions {span.start} to {span.stop - 1}, which are samples {shown}"

    def _attempt(self, span: Span) -> Fetched | None:
        """Fetches and collates; None where a generator was drawn from that was not seeded, and is noted now."""
        if self._dataset_may_draw:
            self._detector.start()
        samples, failures = self._read(span)
        if self._dataset_may_draw:
            surprise = self._detector.drawn() - self._drawn_by_samples
            if surprise:
                self._drawn_by_samples |= surprise
                return None
        if not self._collator_may_draw:
            return self._collate(span, samples, failures)
        self._detector.start()
        seeded = self._drawn_by_samples | self._drawn_by_collator
        seed_generators(chain_seed(span.start, state=self._batch_seeds) >> 1, seeded)
        fetched = self._collate(span, samples, failures)
        surprise = self._detector.drawn() - seeded
        if surprise:
            self._drawn_by_collator |= surprise
            return None
        return fetched

    def _indices(self, span: Span) -> list[int]:
        found: list[int] = self.order.indices(span.start, span.stop).tolist()
        return found

    def _collate(self, span: Span, samples: list[Any], failures: list[RowFailure]) -> Fetched:
        num_samples = 0 if span.is_stand_in else len(samples)
        return Fetched(self.collator(samples or self._find_stand_in(span)), num_samples, tuple(failures))

    def _find_stand_in(self, span: Span) -> list[Any]:
        """Returns a sample for a span of which none can be read: it takes part in the step, and counts nothing."""
        for distance in range(1, self.order.size):
            for position in (span.start - distance, span.stop - 1 + distance):
                if position >= 0:
                    near = Span(position, position + 1)
                    samples, _ = self._read_one_by_one(near, self._indices(near))
                    if samples:
                        return samples
        raise DataError(f"data.on_error: skip, but no sample of {type(self.dataset).__name__} can be read.")

    def _read(self, span: Span) -> tuple[list[Any], list[RowFailure]]:
        indices = self._indices(span)
        if not self._drawn_by_samples:
            try:
                return fetch(self.dataset, indices), []
            except Exception:
                if not self._skips_errors:
                    raise
        return self._read_one_by_one(span, indices)

    def _read_one_by_one(self, span: Span, indices: list[int]) -> tuple[list[Any], list[RowFailure]]:
        """Reads each sample with generators of its own, and leaves out what cannot be read where that is wished."""
        samples, failures = [], []
        dataset, indices = _locate(self.dataset, indices)
        seeders = [SEEDERS[name] for name in self._drawn_by_samples]
        for position, index in zip(range(span.start, span.stop), indices, strict=True):
            seed = chain_seed(position, state=self._sample_seeds) >> 1
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
    """Makes an empty object in a spawned worker, where the project's own classes must be found first."""
    if folder is not None:
        registry.enter_project(folder)
    return object.__new__(kind)


def _locate(dataset: Any, indices: list[int]) -> tuple[Any, list[int]]:
    """Returns the dataset that a split's part is cut from and the indices there, for all samples in one call."""
    if hasattr(type(dataset), "indices_in_whole"):
        return _locate(dataset.dataset, dataset.indices_in_whole(indices))
    return dataset, indices


def fetch(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Returns the samples, with one call where the dataset offers `__getitems__`."""
    if hasattr(dataset, "__getitems__"):
        try:
            samples: list[Any] = dataset.__getitems__(indices)
        except Exception as error:
            _name_the_row(error, *_locate(dataset, list(indices)))
            raise
        return samples
    samples = []
    try:
        for index in indices:
            samples.append(dataset[index])  # how many there are tells which one failed
    except Exception as error:
        _failure(error, dataset, indices[len(samples)]).annotate(error)
        raise
    return samples


def _name_the_row(error: Exception, dataset: Any, indices: list[int]) -> None:
    """Notes on an error which of several samples it is about: the first that fails alone too."""
    for index in indices:
        try:
            dataset[index]
        except Exception as again:
            _failure(again, dataset, index).annotate(error)
            return


def _failure(error: Exception, dataset: Any, index: int) -> RowFailure:
    """Describes a row by its source: one in a mixture of several is counted in that."""
    name, row = dataset.locate(index) if hasattr(type(dataset), "locate") else (type(dataset).__name__, index)
    return RowFailure.from_error(error, source=name, row=row)


def draws_nothing(dataset: Any) -> bool:
    """Does fetching from this dataset surely use no randomness? Then nobody looks for draws (80 µs a batch in-process).

    A dataset may say so itself with the attribute `draws_nothing = True`.
    """
    declared = getattr(dataset, "draws_nothing", None)
    if declared is not None:
        return bool(declared)
    if isinstance(dataset, Subset):
        return draws_nothing(dataset.dataset)
    return type(dataset) is TensorDataset
