"""Fetches places of a stream's lanes and collates them, in the run's process or in workers.

A batch's places are dealt to lanes: contiguous columns of each batch to the lanes of its group, groups in turn from
batch to batch. A rank reads the columns of its own places and a worker the groups of its own batches, so that where
lanes divide evenly nobody reads what another one needs. How one lane is read is lanes.py's; which batches are asked
for, and when the data has ended, stream_loader.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from trainwright import registry
from trainwright.data.fetch import Collator, Fetched, draws_nothing, make_in_project
from trainwright.data.lanes import Cursor, Lane, Reading, Run
from trainwright.data.order import mix_seed
from trainwright.data.randomness import preserve_generators, seed_generators
from trainwright.data.source_pass import own_copy
from trainwright.data.workers import without_worker_info
from trainwright.errors import DataError

logger = logging.getLogger(__name__)

_COLLATOR_STREAM = 0xC011  # keeps the collator's seeds apart from those of rows


class Layout(NamedTuple):
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


def choose_layout(stream: Any, num_ranks: int, num_workers: int) -> Layout:
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
    return Layout(columns, groups)


class LaneFetcher(Dataset[Any]):
    """Fetches and collates places of lanes; runs in workers too, each with lanes opened as they are needed."""

    def __init__(
        self, stream: Any, *, layout: Layout, reading: Reading, cursors: Mapping[int, Cursor], collator: Collator
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
