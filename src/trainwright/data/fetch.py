"""Fetches the samples at given positions, each with randomness of its own.

A sample's generators (torch's, Python's, numpy's) are seeded from (seed, position), so it comes out the
same on any rank, in any worker and after a resume; a collator's from (seed, first position), the same in
any worker. Step randomness is the loop's. Which positions make a batch is loader.py's; workers are workers.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from trainwright import registry
from trainwright.data.order import Indices, chain_seed
from trainwright.data.randomness import SEEDERS, DrawDetector, preserve_generators, seed_generators
from trainwright.data.stream import has_index
from trainwright.data.view import View
from trainwright.errors import DataError

Collator = Callable[[list[Any]], Any]

_SAMPLE_STREAM, _BATCH_STREAM = 0xDA7A, 0xBA7C  # keep samples', batches' and steps' seeds of a run apart


@dataclass(frozen=True)
class Failure:
    """A row that cannot be read. Two are the same if the row is: messages may hold addresses."""

    source: str
    row: int
    error: str = field(compare=False)
    lane: int | None = None
    """The lane of a stream that has several."""
    of: str = "data.train"
    """The set that the row belongs to."""

    @classmethod
    def from_error(cls, error: Exception, *, source: str, row: int, lane: int | None = None) -> Failure:
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
    failures: tuple[Failure, ...] = ()
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


def refuse_loader(dataset: Any, label: str) -> None:
    """Refuses torch's DataLoader, which would look like a stream of samples."""
    if isinstance(dataset, DataLoader):
        raise DataError(f"{label}: this is a DataLoader. Give its dataset: batches are made by the run itself.")


def count_samples(dataset: Any, label: str) -> int:
    """Returns the number of samples, or says why the dataset cannot be used."""
    refuse_loader(dataset, label)
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

    def _collate(self, span: Span, samples: list[Any], failures: list[Failure]) -> Fetched:
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

    def _read(self, span: Span) -> tuple[list[Any], list[Failure]]:
        indices = self._indices(span)
        if not self._drawn_by_samples:
            try:
                return fetch(self.dataset, indices), []
            except Exception:
                if not self._skips_errors:
                    raise
        return self._read_one_by_one(span, indices)

    def _read_one_by_one(self, span: Span, indices: list[int]) -> tuple[list[Any], list[Failure]]:
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


def _failure(error: Exception, dataset: Any, index: int) -> Failure:
    """Describes a row by its source: one in a mixture of several is counted in that."""
    name, row = dataset.locate(index) if hasattr(type(dataset), "locate") else (type(dataset).__name__, index)
    return Failure.from_error(error, source=name, row=row)


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
