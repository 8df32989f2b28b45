"""Reads a stream in lanes: block by block, shuffled within blocks, from a cursor that is saved in checkpoints.

A stream has no index; it can only be read from the start. A lane is the stream or one shard of it. stream_loader.py
builds batches from lanes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from inspect import isgenerator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from trainwright.data.collators import plain_mappings, returns_dicts
from trainwright.data.fetch import Collator, Fetched, RowFailure, StreamBrokenError, draws_nothing, make_in_project
from trainwright.data.order import chain_seed, mix_seed, permute
from trainwright.data.randomness import preserve_generators, seed_generators
from trainwright.data.workers import without_worker_info
from trainwright.errors import DataError
from trainwright.registry import resolve as registry

logger = logging.getLogger(__name__)


def copy_stream(stream: Any) -> Any:
    """Returns a copy with its own position, because a `state_dict` describes only the latest iteration."""
    if type(stream).__module__.startswith("datasets."):
        return stream.shard(num_shards=1, index=0)  # plain copies of Hugging Face's streams share their position
    return copy.copy(stream)


class DerivedStream:
    """A stream whose rows are computed from those of other streams, such as a mixture, or packed or processed rows.

    A subclass defines `_read(start)`, which returns an iterator with a method `state()`, and `_shard`. `num_shards`,
    `shard`, `state_dict` and `load_state_dict` exist only if all sources have them.
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        self._sources = sources
        self.draws_nothing = all(map(draws_nothing, sources))
        self.epoch: int | None = None
        self.seed: int | None = None
        self._start: Mapping[str, Any] | None = None
        self.current_pass: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in ("shard", "state_dict", "load_state_dict", "num_shards"):
            offered = [getattr(source, name) for source in self._sources]  # raises AttributeError
            return min(offered) if name == "num_shards" else getattr(self, f"_{name}")
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        self.epoch = epoch

    def seed_rows(self, seed: int) -> None:
        """Sets the seed of the rows; each row is seeded separately, so that it can be read again."""
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, None
        self.current_pass = self._read(start)
        return self.current_pass  # type: ignore[no-any-return]  # an iterator

    def _read(self, start: Mapping[str, Any] | None) -> Any:
        raise NotImplementedError

    def _shard(self, num_shards: int, index: int) -> Any:
        raise NotImplementedError

    def _state_dict(self) -> Any:
        return self._start if self._start is not None or self.current_pass is None else self.current_pass.state()

    def _load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self._start = state


class SourcePass:
    """Reads the samples of one pass from a source, which is opened when its first sample is needed.

    `state` is the result of `state` of an earlier pass, or None for the start; `epoch` may be None. With `seed` each
    row is read with generators seeded for it.
    """

    def __init__(self, source: Any, *, state: Any = None, epoch: int | None = None, seed: int | None = None) -> None:
        self.has_ended = False
        self.source = copy_stream(source) if hasattr(source, "state_dict") else source
        self._row: int = 0 if state is None else state["row"]
        self._start: Any = None if state is None else state["source"]
        self._epoch = epoch
        self._seed = seed
        # A source that is derived from others seeds their rows itself.
        self._seeds_rows = seed is not None and not hasattr(source, "seed_rows") and not draws_nothing(source)
        self._iterator: Iterator[Any] | None = None
        self._has_begun = False

    def take(self) -> Any:
        """Returns the next sample, or raises StopIteration at the end; it can continue after any other error."""
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
            if isgenerator(self._iterator):  # it is finished, and the next call would look like the end of the data
                self.has_ended = True
                raise StreamBrokenError(
                    f"{type(self.source).__name__} raised {type(error).__name__}: {error}. Its `__iter__` is a "
                    "generator, which cannot continue after an error. Catch the error in it, or return an object "
                    "with `__next__`."
                ) from error
            raise
        self._has_begun = True
        self._row += 1
        return sample

    def describe(self) -> str:
        """Names the last sample for errors: its file and line if the source provides them, otherwise its number."""
        describe = getattr(self._iterator, "describe", None)
        return f"row {self._row - 1} of {type(self.source).__name__}" if describe is None else str(describe())

    def state(self) -> Any:
        """Returns the position of the next sample, from which another pass can start."""
        # Before its first sample a source may still report the previous pass.
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


_ROW_STREAM, _BLOCK_STREAM, _COLLATOR_STREAM = 0x20FF, 0xB10C, 0xC011  # separate the uses of the seed


@dataclass(frozen=True)
class Cursor:
    """A row of a lane from which it can be read again."""

    row: int = 0
    state: Any = None
    """The state of a SourcePass there; None if the stream has no state and is read again from the start."""


@dataclass(frozen=True, kw_only=True)
class StreamReading:
    """The settings for reading every lane of a stream."""

    seed: int
    epoch: int
    """The number of the pass over the stream."""
    block_size: int
    shuffle: bool
    skips_errors: bool = False
    num_lanes: int = 1


@dataclass
class LaneSamples:
    """The samples that were read from lanes for one batch."""

    samples: list[Any] = field(default_factory=list)
    failures: list[RowFailure] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """The source of each sample of a mixture."""

    def add(self, rows: list[Any], sources: list[str]) -> None:
        """Adds rows of a block; raises an error and separates failures that are among them."""
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
        """The block starts that were passed since this list was last cleared, with the lane's number."""
        self._number = number
        self._reading = reading
        self._source = type(stream).__name__
        self._can_resume = hasattr(stream, "state_dict")
        self._row = entered.row
        self._block = self._row // reading.block_size - 1
        self._rows: list[Any] = []
        self._sources: list[str] = []
        """The source of each row of a mixture."""
        self._has_ended = False
        self._error: Exception | None = None
        self._seed = chain_seed(reading.seed, _ROW_STREAM, reading.epoch, number)
        # A derived stream seeds its sources row by row; the others are seeded block by block.
        is_derived = hasattr(stream, "seed_rows")
        self._may_draw = not is_derived and not draws_nothing(stream)
        self._pass = SourcePass(
            stream,
            state=copy.deepcopy(entered.state),
            epoch=reading.epoch,
            seed=self._seed if is_derived else None,
        )
        if entered.row < cursor.row:
            logger.info("%s has no state_dict: reading its first %d rows again to resume.", self._source, cursor.row)

    def read(self, first: int, count: int, found: LaneSamples) -> bool:
        """Adds the `count` rows from `first` on; returns False if the lane ends before or with them.

        Rows must not precede the current block.
        """
        row, stop, size = first, first + count, self._reading.block_size
        while row < stop:
            block = row // size
            while self._block < block:
                if self._error is not None:
                    raise self._error
                if self._has_ended:
                    return False
                self._read_block()
            begin, end = row - block * size, min(stop - block * size, size)
            found.add(self._rows[begin:end], self._sources[begin:end])
            if end > len(self._rows):
                return False
            row = block * size + end
        return True

    def _read_block(self) -> None:
        """Reads the whole next block, so that its random draws do not depend on other draws in between."""
        reading = self._reading
        self._block += 1
        if self._row:
            state = copy.deepcopy(self._pass.state()) if self._can_resume else None
            self.cursors.append((self._number, Cursor(self._row, state)))
        if self._may_draw:
            seed_generators(chain_seed(self._block, state=self._seed) >> 1)
        rows: list[Any] = []
        sources: list[str] = []
        is_mixed = hasattr(self._pass.source, "source_names")
        while len(rows) < reading.block_size and not self._has_ended:
            try:
                rows.append(self._pass.take())
            except StopIteration:
                self._has_ended = True
                break
            except Exception as error:
                rows.append(self._failure(error, self._row + len(rows)))
            if is_mixed:
                sources.append(self._pass.source.latest_source or "")
        self._row += len(rows)
        if reading.shuffle:
            key = mix_seed(reading.seed, _BLOCK_STREAM, reading.epoch, self._number, self._block)
            order = permute(np.arange(len(rows), dtype=np.int64), len(rows), key=key).tolist()
            rows = [rows[number] for number in order]
            sources = [sources[number] for number in order] if is_mixed else []
        self._rows, self._sources = rows, sources

    def _failure(self, error: Exception, row: int) -> RowFailure | Exception:
        """Returns the replacement of a row: a RowFailure if errors are skipped, otherwise the error, which is raised in
        turn."""
        lane = self._number if self._reading.num_lanes > 1 else None
        failure = RowFailure.from_error(error, source=self._source, row=row, lane=lane)
        if self._reading.skips_errors and not isinstance(error, StreamBrokenError):
            return failure
        failure.annotate(error)
        self._error, self._has_ended = error, True
        return error


class LaneLayout(NamedTuple):
    """The number of lanes: columns across a batch, and groups that alternate from batch to batch."""

    columns: int = 1
    groups: int = 1

    @property
    def num_lanes(self) -> int:
        """Columns times groups."""
        return self.columns * self.groups

    def lane(self, batch: int, column: int) -> int:
        """Returns the lane that a column of a batch is read from."""
        return batch % self.groups * self.columns + column


class LaneRequest(NamedTuple):
    """This rank's rows of one batch."""

    batch: int
    size: int
    """The size of the whole batch."""
    runs: tuple[tuple[int, int, int], ...]
    """(lane, first row in it, number of rows)."""


def choose_layout(stream: Any, num_ranks: int, num_workers: int) -> LaneLayout:
    """Returns one lane per reader if the stream's shards can be distributed about evenly, otherwise fewer lanes."""
    shards = int(getattr(stream, "num_shards", 1)) if hasattr(stream, "shard") else 1
    fair = [num for num in range(1, num_ranks * max(num_workers, 1) + 1) if shards % num == 0 or shards >= 8 * num]
    columns = max(each for each in fair if num_ranks % each == 0)
    workers = max(num_workers, 1)
    groups = max(each for each in range(1, workers + 1) if workers % each == 0 and columns * each in fair)
    readers = num_ranks * workers
    if columns * groups < readers:
        why = f"{shards} shards" if shards > 1 else "no `num_shards` and `shard`"
        logger.info(
            "%s has %s: its %d readers also read and discard the rows of other readers.",
            type(stream).__name__, why, readers,
        )  # fmt: skip
    return LaneLayout(columns, groups)


class LaneFetcher(Dataset[Any]):
    """Fetches and collates rows of lanes, which are opened when they are needed; runs in workers too."""

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
        self._returns_dicts = returns_dicts(collator)
        self._collator_may_draw = not getattr(collator, "draws_nothing", False)
        self._may_draw = self._collator_may_draw or not draws_nothing(stream)

    def __reduce__(self) -> tuple[Any, ...]:
        return make_in_project, (LaneFetcher, registry.project_folder()), self.__dict__

    def __getitems__(self, request: LaneRequest) -> Fetched:
        """Fetches a batch in a worker. A stream that distributes its samples over torch's workers returns all."""
        with without_worker_info():
            return self.fetch(request)

    def describe(self, request: LaneRequest) -> str:
        """Names the rows of the lanes, in the order within blocks of `data.shuffle_buffer`."""
        runs = [f"{first} to {first + count - 1} of lane {lane}" for lane, first, count in request.runs]
        return f"batch {request.batch}, positions {', '.join(runs)}"

    def fetch(self, request: LaneRequest) -> Fetched:
        """Fetches and collates the rows; preserves the states of the global generators."""
        found = LaneSamples()
        with preserve_generators() if self._may_draw else nullcontext():
            for number, first, count in request.runs:
                if number not in self._lanes:
                    self._lanes[number] = self._open(self._shard(number), number, self._cursors.get(number, Cursor()))
                if not self._lanes[number].read(first, count, found):
                    self._ended.add(number)
            if found.samples:
                self._stand_in = found.samples[-1]
            samples = found.samples or [self._find_stand_in()]
            if self._collator_may_draw:
                reading, first_row = self._reading, request.runs[0][1] if request.runs else 0
                seed_generators(mix_seed(reading.seed, _COLLATOR_STREAM, reading.epoch, request.batch, first_row))
            try:
                batch = self._collator(samples)
            except Exception as error:
                if not any(sample is None for sample in samples):
                    raise
                raise DataError(
                    f"{type(self._stream).__name__} returned None for a row of {self.describe(request)}. Omit such "
                    "rows from the stream, or use a collator that accepts None."
                ) from error
        cursors = tuple(cursor for lane in self._lanes.values() for cursor in lane.cursors)
        for lane in self._lanes.values():
            lane.cursors = []
        return Fetched(
            batch if self._returns_dicts else plain_mappings(batch),
            num_samples=len(found.samples),
            failures=tuple(found.failures),
            cursors=cursors,
            sources=tuple(found.sources),
            ended=tuple(self._ended),
        )

    def _open(self, stream: Any, number: int, cursor: Cursor) -> Lane:
        return Lane(stream, number=number, cursor=cursor, reading=self._reading)

    def _shard(self, number: int) -> Any:
        if self._layout.num_lanes == 1:
            return self._stream
        return self._stream.shard(num_shards=self._layout.num_lanes, index=number)

    def _find_stand_in(self) -> Any:
        """Returns a sample for a rank that has none: its last one, or the first one of any lane."""
        for number in range(self._layout.num_lanes):
            if self._stand_in is not None:
                break
            lane = self._open(copy_stream(self._shard(number)), number, Cursor())
            found, row = LaneSamples(), 0
            while not found.samples and lane.read(row, 1, found):
                row += 1
            self._stand_in = found.samples[0] if found.samples else None
        if self._stand_in is None:
            raise DataError(
                f"{type(self._stream).__name__} returned no sample in pass {self._reading.epoch + 1}. Check its path "
                "or filter; if it can be iterated only once, return a new iterator from each `__iter__`."
            )
        return self._stand_in
