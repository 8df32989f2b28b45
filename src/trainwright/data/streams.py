"""Reads a stream in lanes: block after block, shuffled within blocks, from a cursor that a checkpoint can keep.

A stream has no index; it can only be read from the start. stream_loader.py makes batches of lanes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import isgenerator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from trainwright.data.fetch import Collator, Fetched, RowFailure, StreamBrokenError, draws_nothing, make_in_project
from trainwright.data.order import chain_seed, mix_seed, permute
from trainwright.data.randomness import preserve_generators, seed_generators
from trainwright.data.workers import without_worker_info
from trainwright.errors import DataError
from trainwright.registry import resolve as registry

logger = logging.getLogger(__name__)


def own_copy(stream: Any) -> Any:
    """Returns a stream that shares no position with this one: a `state_dict` tells only of the iteration begun last."""
    if type(stream).__module__.startswith("datasets."):
        return stream.shard(num_shards=1, index=0)  # Hugging Face's streams share their position with plain copies
    return copy.copy(stream)


class SourcePass:
    """Takes the samples of one pass from a source that may be opened only when its first sample is needed.

    `state` is what an earlier pass's `state` returned, None for the start; `epoch` is None where nobody set one. With
    `seed` each row is taken with generators seeded for it; without, with those that it finds.
    """

    def __init__(self, source: Any, *, state: Any = None, epoch: int | None = None, seed: int | None = None) -> None:
        self.has_ended = False
        self.source = own_copy(source) if hasattr(source, "state_dict") else source
        self._row: int = 0 if state is None else state["row"]
        self._start: Any = None if state is None else state["source"]
        self._epoch = epoch
        self._seed = seed
        # A source that is made of others seeds their rows, and needs no seeding of its own.
        self._seeds_rows = seed is not None and not hasattr(source, "seed_rows") and not draws_nothing(source)
        self._iterator: Iterator[Any] | None = None
        self._has_begun = False

    def take(self) -> Any:
        """Returns the next sample, or raises StopIteration at the end; after any other error it can go on."""
        if self._seeds_rows:
            seed_generators(chain_seed(self._row, state=self._seed or 0) >> 1)
        if self._iterator is None:
            self._iterator = self._open()
        try:
            sample = next(self._iterator)
        except StopIteration:
            self.has_ended = True
            raise
        except Exception as error:
            self._has_begun = True
            self._row += 1
            self._reject_to_go_on(error)
            raise
        self._has_begun = True
        self._row += 1
        return sample

    def take_into(self, rows: list[Any], size: int, *, sources: list[str]) -> None:
        """Appends samples until there are `size` rows, and their sources where this is a mixture.

        Raises StopIteration at the end and any error of a row; what came before it has been appended. Faster than
        `take` by a microsecond a row where no row is seeded by itself.
        """
        is_mixed = hasattr(self.source, "source_names")
        # An iterator should have an `__iter__`, too; one that has not can only be asked for one sample after the other.
        if self._seeds_rows or is_mixed or not self._has_begun or not hasattr(self._iterator, "__iter__"):
            rows.append(self.take())
            if is_mixed:
                sources.append(self.source.latest_source)
            return
        before = len(rows)
        append = rows.append
        try:
            for sample in islice(self._iterator, size - before):  # type: ignore[arg-type]  # it has begun
                append(sample)
        except Exception as error:
            self._row += len(rows) - before + 1
            self._reject_to_go_on(error)
            raise
        self._row += len(rows) - before
        if len(rows) < size:
            self.has_ended = True
            raise StopIteration

    def _reject_to_go_on(self, error: Exception) -> None:
        """Raises where nothing can follow: a generator that raised is finished; asking on would look like the end."""
        if isgenerator(self._iterator):
            self.has_ended = True
            raise StreamBrokenError(
                f"{type(self.source).__name__} raised {type(error).__name__}: {error}. Its iteration is a "
                "generator, which cannot go on after an error, so what follows in it is lost. Catch the error in "
                "it, or return an object with `__next__` from `__iter__`."
            ) from error

    def state(self) -> Any:
        """Returns where the next sample is, for another pass to begin there; the source must have a `state_dict`."""
        # Before its first sample a source may still tell of the pass before.
        source = self.source.state_dict() if self._has_begun else self._start
        return None if source is None else {"row": self._row, "source": source}

    def _open(self) -> Iterator[Any]:
        if self._epoch is not None and hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self._epoch)
        if self._seed is not None and hasattr(self.source, "seed_rows"):
            self.source.seed_rows(self._seed)
        if self._start is not None:
            self.source.load_state_dict(self._start)
        return iter(self.source)


_ROW_STREAM, _BLOCK_STREAM = 0x20FF, 0xB10C  # keep the seeds of rows and of blocks' orders apart


@dataclass(frozen=True)
class Cursor:
    """Where a lane can be entered again: at this row, which the stream finds by its own state."""

    row: int = 0
    state: Any = None
    """What a SourcePass says there; None where the stream has no state, and all rows before are read again."""


@dataclass(frozen=True, kw_only=True)
class StreamReading:
    """How every lane of a stream is read."""

    seed: int
    epoch: int
    """Which pass over the stream this is."""
    block_size: int
    shuffle: bool
    skips_errors: bool = False
    num_lanes: int = 1


@dataclass
class Run:
    """What lanes have at runs of places; it grows as they are read."""

    samples: list[Any] = field(default_factory=list)
    failures: list[RowFailure] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """The source of each sample, where the stream is a mixture."""

    def add(self, rows: list[Any], sources: list[str], *, looks_closer: bool) -> None:
        """Takes rows of a block, among which there may be failures and one error to be raised."""
        if not looks_closer:
            self.samples += rows
            self.sources += sources
            return
        for number, row in enumerate(rows):
            if isinstance(row, Exception):
                raise row
            if isinstance(row, RowFailure):
                self.failures.append(row)
            else:
                self.samples.append(row)
                self.sources += sources[number : number + 1]


class Lane:
    """One lane, read by this process."""

    def __init__(self, stream: Any, *, number: int, cursor: Cursor, reading: StreamReading) -> None:
        entered = cursor if cursor.state is not None else Cursor()
        self.cursors: list[tuple[int, Cursor]] = [(number, entered)]
        """Block starts that were passed since somebody last took this list, with the lane's number."""
        self._number = number
        self._reading = reading
        self._source = type(stream).__name__
        self._can_resume = hasattr(stream, "state_dict")
        self._row = entered.row
        self._block = self._row // reading.block_size - 1
        self._rows: list[Any] = []
        self._sources: list[str] = []
        """The source of each row, where the stream is a mixture of several."""
        self._has_failures = False
        self._has_ended = False
        self._error: Exception | None = None
        self._seed = chain_seed(reading.seed, _ROW_STREAM, reading.epoch, number)
        # A stream that is made of others seeds their rows one by one; the rest is seeded block by block.
        is_made_of_others = hasattr(stream, "seed_rows")
        self._may_draw = not is_made_of_others and not draws_nothing(stream)
        self._pass = SourcePass(
            stream,
            state=copy.deepcopy(entered.state),
            epoch=reading.epoch,
            seed=self._seed if is_made_of_others else None,
        )
        if entered.row < cursor.row:
            logger.info("%s has no state_dict: its first %d rows are read again to go on.", self._source, cursor.row)

    def read(self, first: int, count: int, run: Run) -> bool:
        """Adds what stands at `count` places from `first` on; returns whether the lane goes on behind them.

        Places must not go back beyond the block in hand.
        """
        place, stop, size = first, first + count, self._reading.block_size
        while place < stop:
            block = place // size
            if not self._go_to(block):
                return False
            begin, end = place - block * size, min(stop - block * size, size)
            run.add(self._rows[begin:end], self._sources[begin:end], looks_closer=self._has_failures)
            if end > len(self._rows):
                return False
            place = block * size + end
        return True

    def _go_to(self, block: int) -> bool:
        """Reads on until a block is in hand; False where the lane ends before it."""
        while self._block < block:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                return False
            self._read_block()
        return True

    def _read_block(self) -> None:
        """Reads the next block in one go: what its rows draw then depends on nothing else that draws meanwhile."""
        self._block += 1
        if self._row:
            state = copy.deepcopy(self._pass.state()) if self._can_resume else None
            self.cursors.append((self._number, Cursor(self._row, state)))
        if self._may_draw:
            seed_generators(chain_seed(self._block, state=self._seed) >> 1)
        self._rows, self._sources, self._has_failures = [], [], False
        while len(self._rows) < self._reading.block_size and not self._has_ended:
            try:
                self._pass.take_into(self._rows, self._reading.block_size, sources=self._sources)
            except StopIteration:
                self._has_ended = True
            except Exception as error:
                self._rows.append(self._take(error))
                self._sources += [""] if self._sources else []
                self._has_failures = True
        self._row += len(self._rows)
        if self._reading.shuffle:
            order = self._order(len(self._rows))
            self._rows = [self._rows[number] for number in order]
            self._sources = [self._sources[number] for number in order] if self._sources else []

    def _take(self, error: Exception) -> RowFailure | Exception:
        """Returns what stands in the row's place: the error itself, to be raised when its turn comes, or a Failure."""
        lane = self._number if self._reading.num_lanes > 1 else None
        failure = RowFailure.from_error(error, source=self._source, row=self._row + len(self._rows), lane=lane)
        if self._reading.skips_errors and not isinstance(error, StreamBrokenError):
            return failure
        failure.annotate(error)
        self._error, self._has_ended = error, True  # nobody goes on behind it
        return error

    def _order(self, size: int) -> list[int]:
        reading = self._reading
        key = mix_seed(reading.seed, _BLOCK_STREAM, reading.epoch, self._number, self._block)
        order: list[int] = permute(np.arange(size, dtype=np.int64), size, key=key).tolist()
        return order


_COLLATOR_STREAM = 0xC011  # keeps the collator's seeds apart from those of rows


class LaneLayout(NamedTuple):
    """How many lanes there are: columns across a batch, groups that take turns from batch to batch."""

    columns: int = 1
    groups: int = 1

    @property
    def num_lanes(self) -> int:
        """Columns times groups."""
        return self.columns * self.groups

    def lane(self, batch: int, column: int) -> int:
        """Returns the lane that a column of a batch is read from."""
        return batch % self.groups * self.columns + column


class Request(NamedTuple):
    """This rank's places of one batch, as runs of places of lanes."""

    batch: int
    size: int
    """Places of the whole batch."""
    runs: tuple[tuple[int, int, int], ...]
    """(lane, first place in it, number of places)."""


def choose_layout(stream: Any, num_ranks: int, num_workers: int) -> LaneLayout:
    """Returns as many lanes as there are readers, where the stream's shards can be dealt to them about evenly."""
    shards = int(getattr(stream, "num_shards", 1)) if hasattr(stream, "shard") else 1

    def is_fair(num_lanes: int) -> bool:
        return shards % num_lanes == 0 or shards >= 8 * num_lanes

    columns = max(each for each in range(1, num_ranks + 1) if num_ranks % each == 0 and is_fair(each))
    workers = max(num_workers, 1)
    groups = max(each for each in range(1, workers + 1) if workers % each == 0 and is_fair(columns * each))
    readers = num_ranks * workers
    if columns * groups < readers:
        why = f"{shards} shards" if shards > 1 else "no `num_shards` and `shard`"
        logger.info(
            "%s has %s: its %d readers read rows that others use, and drop them.", type(stream).__name__, why, readers
        )
    return LaneLayout(columns, groups)


class LaneFetcher(Dataset[Any]):
    """Fetches and collates places of lanes; runs in workers too, each with lanes opened as they are needed."""

    def __init__(
        self,
        stream: Any,
        *,
        layout: LaneLayout,
        reading: StreamReading,
        cursors: Mapping[int, Cursor],
        collator: Collator,
    ) -> None:
        self._stream = stream
        self._layout = layout
        self._reading = reading
        self._cursors = dict(cursors)
        self._collator = collator
        self._lanes: dict[int, Lane] = {}
        self._ended: set[int] = set()
        self._stand_in: Any = None
        self._stream_may_draw = not draws_nothing(stream)
        self._collator_may_draw = not getattr(collator, "draws_nothing", False)

    def __reduce__(self) -> tuple[Any, ...]:
        return make_in_project, (LaneFetcher, registry.project_folder()), self.__dict__

    def fetch(self, request: Request) -> Fetched:
        """Serves in the run's own process, leaving its generators as they were."""
        if not (self._stream_may_draw or self._collator_may_draw):
            return self._fetch(request)
        with preserve_generators():
            return self._fetch(request)

    def __getitems__(self, request: Request) -> Fetched:
        """Serves in a worker. A stream that deals its samples to torch's workers by itself is asked for all of them."""
        with without_worker_info():
            return self._fetch(request)

    def describe(self, request: Request) -> str:
        """Names the places of the lanes, which are rows in blocks of `data.shuffle_buffer`."""
        runs = [f"{first} to {first + count - 1} of lane {lane}" for lane, first, count in request.runs]
        return f"batch {request.batch}, places {', '.join(runs)}"

    def _fetch(self, request: Request) -> Fetched:
        run = Run()
        for number, first, num_places in request.runs:
            if not self._lane(number).read(first, num_places, run):
                self._ended.add(number)
        if run.samples:
            self._stand_in = run.samples[-1]
        samples = run.samples or [self._find_stand_in()]
        if self._collator_may_draw:
            reading, first_place = self._reading, request.runs[0][1] if request.runs else 0
            seed_generators(mix_seed(reading.seed, _COLLATOR_STREAM, reading.epoch, request.batch, first_place))
        batch = self._collator(samples)
        return Fetched(
            batch,
            num_samples=len(run.samples),
            failures=tuple(run.failures),
            cursors=self._take_cursors(),
            sources=tuple(run.sources),
            ended=tuple(self._ended),
        )

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            cursor = self._cursors.get(number, Cursor())
            self._lanes[number] = Lane(self._part(number), number=number, cursor=cursor, reading=self._reading)
        return self._lanes[number]

    def _part(self, number: int) -> Any:
        if self._layout.num_lanes == 1:
            return self._stream
        return self._stream.shard(num_shards=self._layout.num_lanes, index=number)

    def _find_stand_in(self) -> Any:
        """Returns a sample for a rank that has none: its last, or the first that any lane gives."""
        for number in range(self._layout.num_lanes):
            if self._stand_in is not None:
                break
            lane = Lane(own_copy(self._part(number)), number=number, cursor=Cursor(), reading=self._reading)
            run, place = Run(), 0
            while not run.samples and lane.read(place, 1, run):
                place += 1
            self._stand_in = run.samples[0] if run.samples else None
        if self._stand_in is None:
            advice = (
                "Check the path or filter that makes it; if it can be iterated only once, return a fresh iterator from "
                "each `__iter__`."
            )
            raise DataError(f"{type(self._stream).__name__} gave no sample in pass {self._reading.epoch + 1}. {advice}")
        return self._stand_in

    def _take_cursors(self) -> tuple[tuple[int, Cursor], ...]:
        taken = tuple(cursor for lane in self._lanes.values() for cursor in lane.cursors)
        for lane in self._lanes.values():
            lane.cursors = []
        return taken
