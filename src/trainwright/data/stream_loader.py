"""Batches from a stream, for training (shuffled in blocks, pass after pass) and evaluation (once, in order).

The state is small: the number of used rows of each lane, and a cursor from which the lane can be read again. The number
of lanes is chosen at the start of a run and saved, so the order does not change with the number of ranks or workers.
The positions of a lane that has ended stay empty until all lanes have ended; the ranks exchange these counts with one
small message per batch. loader.py is for data with an index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

from trainwright.data.collators import reject_lists
from trainwright.data.fetch import Fetched, View
from trainwright.data.file_list import reject_changed_files
from trainwright.data.loader import (
    BatchLoader,
    EvalData,
    MadeBatches,
    SkippedPositions,
    ToDevice,
    TrainData,
    host_batches,
    reject_made_batches,
)
from trainwright.data.streams import Cursor, LaneFetcher, LaneLayout, LaneRequest, StreamReading, choose_layout
from trainwright.errors import DataError

TrainingData: TypeAlias = "TrainData | StreamData | MadeBatches"
EvaluationData: TypeAlias = "EvalData | EvalStream"

SumCounts = Callable[..., tuple[int, ...]]
"""Sums counts over the ranks."""

BLOCK_SIZE = 1000
"""Rows that are shuffled together; a resumed run reads at most as many again."""
UNSHUFFLED_BLOCK_SIZE = 100
"""Rows that are read at once if nothing is shuffled."""


def _single_process_counts(*counts: int) -> tuple[int, ...]:
    return counts


class _Progress:
    """The progress of a pass over a stream: the rows of each lane that were returned."""

    def __init__(self, layout: LaneLayout, *, block_size: int) -> None:
        self.layout = layout
        self.block_size = block_size
        self.batch = 0
        self.num_positions = 0
        """The positions of all batches so far, with empty ones."""
        self.used = [0] * layout.num_lanes
        self.cursors: dict[int, dict[int, Cursor]] = {lane: {} for lane in range(layout.num_lanes)}

    def requests(self, view: View, batch_size: int, limit: int | None) -> Iterator[LaneRequest]:
        """Yields this rank's request for each further batch, endlessly unless there is a `limit` of positions."""
        batch, position, used = self.batch, self.num_positions, list(self.used)
        while limit is None or position < limit:
            size = batch_size - position % batch_size  # short after a ragged end, as for data with an index
            size = size if limit is None else min(size, limit - position)
            share_start, share_stop = view.share(0, size)
            runs = []
            for column, (start, stop) in self._columns(size):
                lane = self.layout.lane(batch, column)
                first, last = max(start, share_start), min(stop, share_stop)
                if first < last:
                    runs.append((lane, used[lane] + first - start, last - first))
                used[lane] += stop - start
            yield LaneRequest(batch, size, tuple(runs))
            batch, position = batch + 1, position + size

    def note(self, request: LaneRequest, fetched: Fetched) -> None:
        """Counts a batch that is returned, and keeps the cursors that a resumed run may need."""
        for column, (start, stop) in self._columns(request.size):
            self.used[self.layout.lane(request.batch, column)] += stop - start
        self.batch, self.num_positions = request.batch + 1, self.num_positions + request.size
        for lane, cursor in fetched.cursors:
            self.cursors[lane][cursor.row] = cursor
        for lane in {lane for lane, _ in fetched.cursors}:
            needed = self.entry(lane).row
            self.cursors[lane] = {row: each for row, each in self.cursors[lane].items() if row >= needed}

    def entry(self, lane: int) -> Cursor:
        """Returns the last known cursor from which the rest of a lane can be read."""
        block_start = self.used[lane] // self.block_size * self.block_size
        rows = [row for row in self.cursors[lane] if row <= block_start]
        return self.cursors[lane][max(rows)] if rows else Cursor()

    def num_alive(self, view: View, batch_size: int, ended: Collection[int]) -> int:
        """Counts the lanes that have not ended among those of columns that begin in this rank's share of a batch."""
        first, last = view.share(0, batch_size)
        columns = [column for column, (start, _) in self._columns(batch_size) if first <= start < last]
        lanes = [self.layout.lane(group, column) for group in range(self.layout.groups) for column in columns]
        return sum(lane not in ended for lane in lanes)

    def _columns(self, size: int) -> Iterator[tuple[int, tuple[int, int]]]:
        for column in range(self.layout.columns):
            yield column, View(column, self.layout.columns).share(0, size)

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress as plain values."""
        entries = {lane: self.entry(lane) for lane in range(self.layout.num_lanes)}
        return {
            "batch": self.batch,
            "places": self.num_positions,
            "columns": self.layout.columns,
            "block_size": self.block_size,
            "used": list(self.used),
            "cursors": {str(lane): {"row": each.row, "state": each.state} for lane, each in entries.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _Progress:
        """Restores a saved progress, with its lanes and block size."""
        used = [int(number) for number in state["used"]]
        layout = LaneLayout(state["columns"], len(used) // state["columns"])
        progress = cls(layout, block_size=int(state["block_size"]))
        progress.batch, progress.num_positions, progress.used = int(state["batch"]), int(state["places"]), used
        for lane, cursor in state["cursors"].items():
            progress.cursors[int(lane)] = {int(cursor["row"]): Cursor(int(cursor["row"]), cursor["state"])}
        return progress


class _ReadBatch(NamedTuple):
    """A batch that was read but is not yet counted."""

    batch: Any
    request: LaneRequest
    fetched: Fetched
    total: int
    """Its samples over all ranks."""
    shares: Sequence[int]
    """The samples of each source of a mixture."""
    is_returned: bool
    """False if it is empty, or skipped after a rollback."""


class StreamData(BatchLoader):
    """The training batches of a stream, from any progress; ends after `num_passes` or `num_samples`."""

    def __init__(
        self,
        stream: Any,
        *,
        shuffle: bool = True,
        block_size: int = BLOCK_SIZE,
        sum_counts: SumCounts | None = None,
        drops_short: bool = False,
        **common: Any,
    ) -> None:
        """If it `drops_short` batches, those at the end of a pass with fewer samples are read, but not returned."""
        super().__init__(stream, **common)
        self.num_samples: int | None = None
        """The position at which the run stops, also within a pass; None: at the end of the stream."""
        self.num_passes = 1
        self.looks_ahead = False
        """Whether a batch is returned only after the next one was read, so that `epoch` changes with the last batch."""
        self.samples_seen = 0
        """Samples returned so far, over all ranks."""
        self.epoch = 0
        """The number of the pass over the stream; `num_passes` when all have ended."""
        self.batch_positions = (0, 0)
        """The positions of the last batch over all ranks: start and stop."""
        self.counts: dict[str, int] = dict.fromkeys(getattr(stream, "source_names", ()), 0)
        """The number of samples seen of each source of a mixture; empty for a single source."""
        self._shuffle = shuffle
        self._drops_short = drops_short
        self._block_size = block_size if shuffle else min(block_size, UNSHUFFLED_BLOCK_SIZE)
        self._sum_counts = sum_counts or _single_process_counts
        self._positions_before = 0
        self._skipped = SkippedPositions()
        self._is_exhausted = False
        layout = choose_layout(stream, self.view.size, self.options.num_workers)
        self._progress = _Progress(layout, block_size=self._block_size)

    def batches(self, to_device: ToDevice) -> Generator[Any, None, None]:
        """Yields the batches from here on; each is counted when it is returned."""
        # An iterator cannot return the same rows twice in this process; a worker reads a copy.
        self._is_exhausted |= hasattr(type(self.dataset), "__next__") and not self.options.num_workers
        while self.epoch < self.num_passes:
            reading = self._read_pass(to_device)
            has_ended = yield from self._hold_back(reading) if self.looks_ahead else self._return_all(reading)
            if not has_ended:
                return

    def _return_all(self, reading: Generator[_ReadBatch, None, bool]) -> Generator[Any, None, bool]:
        """Yields the batches of a pass; returns True if the pass has ended, False at the limit."""
        while True:
            try:
                read = next(reading)
            except StopIteration as stop:
                return self._end_pass(has_ended=stop.value)
            self._count(read)
            if read.is_returned:
                yield read.batch

    def _hold_back(self, reading: Generator[_ReadBatch, None, bool]) -> Generator[Any, None, bool]:
        """Yields the batches like `_return_all`, each after the next one was read, so that the last one is known."""
        waiting: list[_ReadBatch] = []
        while True:
            failure: Exception | None = None
            read: _ReadBatch | None = None
            has_ended = False
            try:
                read = next(reading)
            except StopIteration as stop:
                has_ended = stop.value
            except Exception as error:  # the batch before it comes first
                failure = error
            if read is not None and not (read.is_returned and any(each.is_returned for each in waiting)):
                waiting.append(read)
                continue
            returned = next((each for each in waiting if each.is_returned), None)
            for each in waiting:
                self._count(each)
            waiting = [] if read is None else [read]
            if read is None and failure is None:
                self._end_pass(has_ended=has_ended)
            if returned is not None:
                yield returned.batch
            if failure is not None:
                raise failure
            if read is None:
                return has_ended

    def _count(self, read: _ReadBatch) -> None:
        """Counts a batch that is returned or skipped."""
        first = self.order_position
        self._progress.note(read.request, read.fetched)
        self.counts = {name: self.counts[name] + share for name, share in zip(self.counts, read.shares, strict=True)}
        self.samples_seen += read.total
        if read.is_returned:
            self.batch_num_samples, self.batch_positions = read.fetched.num_samples, (first, self.order_position)
            self.batch_ignored = read.fetched.count_ignored()

    def _end_pass(self, *, has_ended: bool) -> bool:
        """Begins the next pass if this one has ended and has not reached the limit; returns whether it has."""
        if has_ended:
            self.epoch += 1
            self._positions_before += self._progress.num_positions
            self._progress = _Progress(self._progress.layout, block_size=self._block_size)
        return has_ended

    def _read_pass(self, to_device: ToDevice) -> Generator[_ReadBatch, None, bool]:
        """Reads the rest of a pass without counting it; returns True if the pass has ended, False at the limit."""
        progress, layout = self._progress, self._progress.layout
        reading = StreamReading(
            seed=self.seed,
            epoch=self.epoch,
            block_size=progress.block_size,
            shuffle=self._shuffle,
            skips_errors=self.on_error.skips,
            num_lanes=layout.num_lanes,
        )
        cursors = {lane: progress.entry(lane) for lane in range(layout.num_lanes)}
        fetcher = LaneFetcher(self.dataset, layout=layout, reading=reading, cursors=cursors, collator=self.collator)
        limit = None if self.num_samples is None else self.num_samples - self._positions_before
        requests = progress.requests(self.view, self.global_batch_size, limit)
        queue: deque[tuple[Any, Fetched]] = deque()
        ended: set[int] = set()
        position = self.order_position
        for batch in to_device(host_batches(fetcher, requests, self.options, queue, label="data.train")):
            request, fetched = queue.popleft()
            if request.batch == 0:
                reject_lists(batch)
            self.on_error.note(fetched.failures)
            is_skipped = position in self._skipped
            position += request.size
            ended.update(fetched.ended)
            num_alive = progress.num_alive(self.view, self.global_batch_size, ended)
            by_source = [0 if is_skipped else fetched.sources.count(name) for name in self.counts]
            total, num_alive, *shares = self._sum_counts(fetched.num_samples, num_alive, *by_source)
            is_dropped = self._drops_short and total < request.size
            yield _ReadBatch(batch, request, fetched, total, shares, bool(total) and not (is_skipped or is_dropped))
            if not total and not num_alive:
                return True
        return False

    def skip_positions(self, start: int, stop: int) -> None:
        """Skips the batches that begin at positions start … stop−1: they are read, but not returned.

        They count as seen, but not in `counts`. The ranges are saved.
        """
        self._skipped.add(start, stop)

    def samples_at(self, start: int, stop: int) -> list[int] | None:
        """Returns None: the rows of a stream have no index."""
        return None

    @property
    def is_at_end(self) -> bool:
        """True if no batch is left, as far as that is known."""
        return self.epoch >= self.num_passes or (
            self.num_samples is not None and self.order_position >= self.num_samples
        )

    def epochs_at(self, position: int) -> Fraction:
        """Not called: the length of a stream is unknown, so fractions of an epoch are rejected."""
        raise AssertionError("a position of a stream is not a fraction of an epoch")

    @property
    def order_position(self) -> int:
        """The positions of all batches so far, with those that are empty because a lane has ended."""
        return self._positions_before + self._progress.num_positions

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state; `merge_states` merges the states of all ranks."""
        return {
            "position": self.samples_seen,
            "epoch": self.epoch,
            "places_before": self._positions_before,
            "counts": dict(self.counts),
            "files": self.files,
            "left_out": [list(each) for each in self._skipped.ranges],
            "progress": self._progress.state_dict(),
        }

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merges the ranks' states: each has cursors of the lanes that it reads; the other values are equal."""
        merged = {**states[0], "progress": dict(states[0]["progress"])}
        merged["progress"]["cursors"] = {
            lane: max((each["progress"]["cursors"][lane] for each in states), key=lambda cursor: cursor["row"])
            for lane in merged["progress"]["cursors"]
        }
        return merged

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changes: bool = False) -> None:
        """Continues from a saved state, with its lanes; another `shuffle_buffer` applies from the next pass on.

        After a rollback in the same process, positions that were skipped since the state was saved stay skipped.
        """
        reject_made_batches(state)
        if "progress" not in state:
            raise DataError("data.train is a stream, but the checkpoint was saved with data that has an index.")
        if self.global_batch_size < state["progress"]["columns"]:
            raise DataError(
                f"trainer.global_batch_size: {self.global_batch_size} is less than the {state['progress']['columns']} "
                "lanes of this run, each of which is in every batch. Use at least that many."
            )
        if self._is_exhausted:
            raise DataError(
                f"data.train: {type(self.dataset).__name__} can be iterated only once, so the run cannot go back. "
                "Return a new iterator from each `__iter__`."
            )
        reject_changed_files(state.get("files", self.files), self.files, accept_changes=accept_changes)
        self.samples_seen, self.epoch = int(state["position"]), int(state["epoch"])
        self._positions_before = int(state["places_before"])
        self.counts = {name: int(count) for name, count in state["counts"].items()}
        self._skipped.add_all(state.get("left_out", ()))
        self._progress = _Progress.from_state(state["progress"])


class EvalStream(BatchLoader):
    """One evaluation set that is a stream: each sample once, in order, for any number of ranks."""

    def __init__(
        self,
        stream: Any,
        *,
        name: str,
        sum_counts: SumCounts | None = None,
        max_batches: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(stream, **common)
        self.name = name
        self._limit = None if max_batches is None else max_batches * self.global_batch_size
        self._sum_counts = sum_counts or _single_process_counts

    def batches(self, to_device: ToDevice) -> Generator[Any, None, None]:
        """Yields this rank's batches, the same number on every rank; a rank without samples has a placeholder."""
        # One lane, read by every rank: the ranks' results are joined in the stream's order.
        progress = _Progress(LaneLayout(), block_size=UNSHUFFLED_BLOCK_SIZE)
        skips_errors = self.on_error.skips
        reading = StreamReading(
            seed=self.seed, epoch=0, block_size=progress.block_size, shuffle=False, skips_errors=skips_errors
        )
        fetcher = LaneFetcher(self.dataset, layout=progress.layout, reading=reading, cursors={}, collator=self.collator)
        requests = progress.requests(self.view, self.global_batch_size, self._limit)
        label = f"data.eval.{self.name}"
        queue: deque[tuple[Any, Fetched]] = deque()
        has_ended = False
        try:
            for batch in to_device(host_batches(fetcher, requests, self.options, queue, label=label)):
                _, fetched = queue.popleft()
                self.on_error.note(fetched.failures, of=label)
                self.batch_num_samples = fetched.num_samples
                rank_alive = progress.num_alive(self.view, self.global_batch_size, fetched.ended)
                total, num_alive, num_failed = self._sum_counts(fetched.num_samples, rank_alive, 0)
                has_ended = num_failed > 0 or (not total and not num_alive)
                if has_ended:
                    return
                if total:
                    yield batch
            self._sum_counts(0, 0, 0)
            has_ended = True
        finally:
            # A rank that stops early, because its batch or its step failed, reports it in the others' next exchange.
            if not has_ended:
                self._sum_counts(0, 0, 1)
