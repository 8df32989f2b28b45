"""Batches from a stream, for training (shuffled in blocks, pass after pass) and evaluation (once, in order).

The state is small: how far each lane has been used, and a cursor from which it can be read again. Lanes are counted
once, at the start of a run, and saved with it, so another number of ranks or workers later changes nothing in the
order. Where a lane has ended its places stay empty, until all have ended; ranks agree on that at each batch, by one
small message between hosts. Data with an index is loader.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from trainwright.data.collators import reject_lists
from trainwright.data.fetch import Collator, Fetched, OnError, View
from trainwright.data.loader import EvalData, LeftOut, TrainData
from trainwright.data.streams import Cursor, LaneFetcher, LaneLayout, Request, StreamReading, choose_layout
from trainwright.data.workers import LoaderOptions, ToDevice, deliver
from trainwright.errors import DataError

TrainingData: TypeAlias = "TrainData | StreamData"
EvaluationData: TypeAlias = "EvalData | EvalStream"

Agree = Callable[..., tuple[int, ...]]
"""Sums counts over the ranks."""

BLOCK_SIZE = 1000
"""Rows that are shuffled with each other, and at most read again by a run that goes on."""
UNSHUFFLED_BLOCK_SIZE = 100
"""Rows that are read at once where nothing is shuffled."""


def _alone(*counts: int) -> tuple[int, ...]:
    return counts


class _Progress:
    """How far a pass over a stream has come: what has been returned of each lane."""

    def __init__(self, layout: LaneLayout, *, block_size: int) -> None:
        self.layout = layout
        self.block_size = block_size
        self.batch = 0
        self.places = 0
        """Places of all batches so far, empty ones included."""
        self.used = [0] * layout.num_lanes
        self.cursors: dict[int, dict[int, Cursor]] = {lane: {} for lane in range(layout.num_lanes)}

    def requests(self, view: View, batch_size: int, limit: int | None) -> Iterator[Request]:
        """Yields this rank's request for each further batch, without an end unless `limit` places are given."""
        batch, places, used = self.batch, self.places, list(self.used)
        while limit is None or places < limit:
            size = batch_size - places % batch_size  # short after a ragged end, as with data that has an index
            size = size if limit is None else min(size, limit - places)
            own = view.part(0, size)
            runs = []
            for column, (start, stop) in self._columns(size):
                lane = self.layout.lane(batch, column)
                first, last = max(start, own[0]), min(stop, own[1])
                if first < last:
                    runs.append((lane, used[lane] + first - start, last - first))
                used[lane] += stop - start
            yield Request(batch, size, tuple(runs))
            batch, places = batch + 1, places + size

    def note(self, request: Request, fetched: Fetched) -> None:
        """Counts a batch that is returned, and keeps the cursors that a resumed run could need."""
        for column, (start, stop) in self._columns(request.size):
            self.used[self.layout.lane(request.batch, column)] += stop - start
        self.batch, self.places = request.batch + 1, self.places + request.size
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
        """Counts the lanes that a rank answers for, those of columns that begin in its places, and that go on."""
        first, last = view.part(0, batch_size)
        columns = [column for column, (start, _) in self._columns(batch_size) if first <= start < last]
        lanes = [self.layout.lane(group, column) for group in range(self.layout.groups) for column in columns]
        return sum(lane not in ended for lane in lanes)

    def _columns(self, size: int) -> Iterator[tuple[int, tuple[int, int]]]:
        for column in range(self.layout.columns):
            yield column, View(column, self.layout.columns).part(0, size)

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress as plain values."""
        entries = {lane: self.entry(lane) for lane in range(self.layout.num_lanes)}
        return {
            "batch": self.batch,
            "places": self.places,
            "columns": self.layout.columns,
            "block_size": self.block_size,
            "used": list(self.used),
            "cursors": {str(lane): {"row": each.row, "state": each.state} for lane, each in entries.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _Progress:
        """Takes up a saved progress, with the lanes and blocks that it had."""
        used = [int(number) for number in state["used"]]
        layout = LaneLayout(state["columns"], len(used) // state["columns"])
        progress = cls(layout, block_size=int(state["block_size"]))
        progress.batch, progress.places, progress.used = int(state["batch"]), int(state["places"]), used
        for lane, cursor in state["cursors"].items():
            progress.cursors[int(lane)] = {int(cursor["row"]): Cursor(int(cursor["row"]), cursor["state"])}
        return progress


class StreamData:
    """The training batches of a stream, from where a run stands; ends after `num_passes` or `num_samples`."""

    def __init__(
        self,
        stream: Any,
        *,
        collator: Collator,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        block_size: int = BLOCK_SIZE,
        view: View | None = None,
        options: LoaderOptions | None = None,
        on_error: OnError | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.dataset = stream
        self.collator = collator
        self.global_batch_size = global_batch_size
        self.num_samples: int | None = None
        """Places after which the stream is left, in the middle of a pass too; None: when it ends."""
        self.num_passes = 1
        self.position = 0
        """Samples returned so far, over all ranks."""
        self.epoch = 0
        """The pass over the stream; `num_passes` when all have ended."""
        self.samples_in_hand = 0
        self.places_in_hand = (0, 0)
        """The places of the batch that was returned last, over all ranks: its first, and the one behind its last."""
        self.counts: dict[str, int] = dict.fromkeys(getattr(stream, "source_names", ()), 0)
        """How many of the samples so far came from each source of a mixture; empty where there is but one."""
        self._seed, self._shuffle = seed, shuffle
        self._block_size = block_size if shuffle else min(block_size, UNSHUFFLED_BLOCK_SIZE)
        self.view = view or View()
        self.options = options or LoaderOptions()
        self.on_error = on_error or OnError()
        self._agree: Agree = agree or _alone
        self._places_before = 0
        self._left_out = LeftOut()
        self._is_used_up = False
        layout = choose_layout(stream, self.view.size, self.options.num_workers)
        self._progress = _Progress(layout, block_size=self._block_size)

    def batches(self, to_device: ToDevice) -> Generator[Any, None, None]:
        """Returns the batches from here on, each counted when it is returned."""
        # What is its own iterator has given away for good what it gave in this process; a worker reads a copy.
        self._is_used_up |= hasattr(type(self.dataset), "__next__") and not self.options.num_workers
        while self.epoch < self.num_passes:
            has_ended = yield from self._one_pass(to_device)
            if not has_ended:
                return
            self.epoch += 1
            self._places_before += self._progress.places
            self._progress = _Progress(self._progress.layout, block_size=self._block_size)

    def _one_pass(self, to_device: ToDevice) -> Generator[Any, None, bool]:
        """Yields the rest of a pass; returns whether it has ended, rather than met the limit."""
        progress, layout = self._progress, self._progress.layout
        reading = StreamReading(
            seed=self._seed,
            epoch=self.epoch,
            block_size=progress.block_size,
            shuffle=self._shuffle,
            skips_errors=self.on_error.skips,
            num_lanes=layout.num_lanes,
        )
        cursors = {lane: progress.entry(lane) for lane in range(layout.num_lanes)}
        fetcher = LaneFetcher(self.dataset, layout=layout, reading=reading, cursors=cursors, collator=self.collator)
        limit = None if self.num_samples is None else self.num_samples - self._places_before
        requests = progress.requests(self.view, self.global_batch_size, limit)
        ended: set[int] = set()
        for batch, request, fetched in deliver(fetcher, requests, self.options, to_device, label="data.train"):
            if request.batch == 0:
                reject_lists(batch)
            self.on_error.note(fetched.failures)
            first = self.places
            is_left_out = first in self._left_out
            progress.note(request, fetched)
            ended.update(fetched.ended)
            num_alive = progress.num_alive(self.view, self.global_batch_size, ended)
            total, num_alive = self._agree_on(fetched, num_alive, is_left_out=is_left_out)
            self.position += total
            if total and not is_left_out:
                self.samples_in_hand, self.places_in_hand = fetched.num_samples, (first, self.places)
                yield batch
            elif not total and not num_alive:
                return True
        return False

    def leave_out(self, start: int, stop: int) -> None:
        """Never again returns the batches that begin at the places start … stop−1, though they are read.

        They count as consumed, but not in `counts`. The windows are saved.
        """
        self._left_out.add(start, stop)

    def samples_at(self, start: int, stop: int) -> list[int] | None:
        """Returns None: the rows of a stream have no numbers."""
        return None

    def _agree_on(self, fetched: Fetched, num_alive: int, *, is_left_out: bool) -> tuple[int, int]:
        """Counts the batch over all ranks; returns its samples, and the lanes that have not ended."""
        own = [0 if is_left_out else fetched.sources.count(name) for name in self.counts]
        total, num_alive, *shares = self._agree(fetched.num_samples, num_alive, *own)
        self.counts = {name: self.counts[name] + share for name, share in zip(self.counts, shares, strict=True)}
        return total, num_alive

    @property
    def places(self) -> int:
        """Places of all batches so far, those included that stayed empty where a lane had ended."""
        return self._places_before + self._progress.places

    def state_dict(self) -> dict[str, Any]:
        """Returns where this rank stands; `merge_states` joins the ranks' states."""
        return {
            "position": self.position,
            "epoch": self.epoch,
            "places_before": self._places_before,
            "counts": dict(self.counts),
            "left_out": self._left_out.to_list(),
            "progress": self._progress.state_dict(),
        }

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Joins the ranks' states: each knows cursors of the lanes that it reads, all agree on the rest."""
        merged = {**states[0], "progress": dict(states[0]["progress"])}
        merged["progress"]["cursors"] = {
            lane: max((each["progress"]["cursors"][lane] for each in states), key=lambda cursor: cursor["row"])
            for lane in merged["progress"]["cursors"]
        }
        return merged

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changes: bool = False) -> None:
        """Goes on where a run stood, with its lanes; another `shuffle_buffer` holds from the next pass on.

        After a rollback in the same process, what was left out since the state was saved stays left out.
        """
        if "progress" not in state:
            raise DataError("data.train is a stream now, but the checkpoint was made with data that has an index.")
        if self.global_batch_size < state["progress"]["columns"]:
            raise DataError(
                f"trainer.global_batch_size: {self.global_batch_size} is less than the {state['progress']['columns']} "
                "lanes that the run was begun with, and a batch takes from each. Use at least as many."
            )
        if self._is_used_up:
            raise DataError(
                f"data.train: {type(self.dataset).__name__} can be iterated only once, so the run cannot go back. "
                "Return a fresh iterator from each `__iter__`."
            )
        self.position, self.epoch = int(state["position"]), int(state["epoch"])
        self._places_before = int(state["places_before"])
        self.counts = {name: int(count) for name, count in state["counts"].items()}
        self._left_out.add_all(state.get("left_out", ()))
        self._progress = _Progress.from_state(state["progress"])


class EvalStream:
    """One evaluation set that is a stream: each sample once, in its order, whatever the number of ranks."""

    def __init__(
        self,
        stream: Any,
        *,
        name: str,
        collator: Collator,
        global_batch_size: int,
        seed: int,
        view: View | None = None,
        options: LoaderOptions | None = None,
        on_error: OnError | None = None,
        agree: Agree | None = None,
        max_batches: int | None = None,
    ) -> None:
        self.dataset = stream
        self.name = name
        self.collator = collator
        self.samples_in_hand = 0
        self.on_error = on_error or OnError()
        self._seed = seed
        self.global_batch_size = global_batch_size
        self._limit = None if max_batches is None else max_batches * global_batch_size
        self.view = view or View()
        self.options = options or LoaderOptions()
        self._agree: Agree = agree or _alone

    def batches(self, to_device: ToDevice) -> Generator[Any, None, None]:
        """Returns this rank's batches; every rank gets as many, a stand-in where it has no sample."""
        # One lane, read by every rank: samples keep the stream's order, in which ranks' results are joined.
        progress = _Progress(LaneLayout(), block_size=UNSHUFFLED_BLOCK_SIZE)
        reading = StreamReading(
            seed=self._seed,
            epoch=0,
            block_size=progress.block_size,
            shuffle=False,
            skips_errors=self.on_error.skips,
        )
        fetcher = LaneFetcher(self.dataset, layout=progress.layout, reading=reading, cursors={}, collator=self.collator)
        requests = progress.requests(self.view, self.global_batch_size, self._limit)
        label = f"data.eval.{self.name}"
        is_settled = False
        try:
            for batch, _, fetched in deliver(fetcher, requests, self.options, to_device, label=label):
                self.on_error.note(fetched.failures, of=label)
                self.samples_in_hand = fetched.num_samples
                own_alive = progress.num_alive(self.view, self.global_batch_size, fetched.ended)
                total, num_alive, num_gone = self._agree(fetched.num_samples, own_alive, 0)
                is_settled = num_gone > 0 or (not total and not num_alive)
                if is_settled:
                    return
                if total:
                    yield batch
            self._agree(0, 0, 0)
            is_settled = True
        finally:
            # A rank that leaves before the others, because its batch or its step failed, says so where they ask next.
            if not is_settled:
                self._agree(0, 0, 1)
