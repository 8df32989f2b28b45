"""Reads a stream in lanes: block after block, shuffled within blocks, from a cursor.

A lane is a part of the stream that is read in one go; its n-th sample is a pure function of (seed, pass, lane, n): rows
are read in blocks of fixed size, each with generators seeded at its start, and shuffled in it by a keyed permutation.
So nothing of a buffer needs saving: a cursor at the start of a block is enough, and going on costs at most one block.
Which lane a place of a batch comes from is lane_fetcher.py's.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainwright.data.fetch import Failure, draws_nothing
from trainwright.data.order import chain_seed, mix_seed, permute
from trainwright.data.randomness import seed_generators
from trainwright.data.source_pass import SourcePass
from trainwright.data.stream import StreamBrokenError

logger = logging.getLogger(__name__)

_ROW_STREAM, _BLOCK_STREAM = 0x20FF, 0xB10C  # keep the seeds of rows and of blocks' orders apart


@dataclass(frozen=True)
class Cursor:
    """Where a lane can be entered again: at this row, which the stream finds by its own state."""

    row: int = 0
    state: Any = None
    """What a SourcePass says there; None where the stream has no state, and all rows before are read again."""


@dataclass(frozen=True, kw_only=True)
class Reading:
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
    failures: list[Failure] = field(default_factory=list)
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
            if isinstance(row, Failure):
                self.failures.append(row)
            else:
                self.samples.append(row)
                self.sources += sources[number : number + 1]


class Lane:
    """One lane, read by this process."""

    def __init__(self, stream: Any, *, number: int, cursor: Cursor, reading: Reading) -> None:
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

    def _take(self, error: Exception) -> Failure | Exception:
        """Returns what stands in the row's place: the error itself, to be raised when its turn comes, or a Failure."""
        lane = self._number if self._reading.num_lanes > 1 else None
        failure = Failure.from_error(error, source=self._source, row=self._row + len(self._rows), lane=lane)
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
