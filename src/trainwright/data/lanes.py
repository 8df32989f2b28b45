"""Reads a stream in lanes: row after row, shuffled within blocks, from a cursor.

A lane is a part of the stream that is read in one go; its n-th sample is a pure function of (seed, pass, lane, n),
because rows are shuffled in blocks of fixed size by a keyed permutation and each row is read with generators seeded
for it. So nothing of a buffer needs saving: a cursor at the start of a block is enough, and going on costs at most
one block. Which lane a place of a batch comes from is stream_loader.py's.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainwright.data.fetch import Failure, draws_nothing
from trainwright.data.order import mix_seed, permute
from trainwright.data.randomness import seed_generators
from trainwright.data.source_pass import SourcePass
from trainwright.data.stream import StreamBrokenError

logger = logging.getLogger(__name__)

_ROW_STREAM, _BLOCK_STREAM = 0x20FF, 0xB10C  # keep the seeds of rows and of blocks apart

ENDED = object()
"""What `Lane.read` returns behind the last row."""


@dataclass(frozen=True)
class Cursor:
    """Where a lane can be entered again: at this row, which the stream finds by its own state."""

    row: int = 0
    state: Any = None
    """The stream's `state_dict()` there; None where it has none, and all rows before are read again."""


@dataclass(frozen=True)
class Reading:
    """How every lane of a stream is read."""

    seed: int
    epoch: int
    """Which pass over the stream this is."""
    block_size: int
    shuffle: bool
    skips_errors: bool = False
    num_lanes: int = 1


class Lane:
    """One lane, read by this process."""

    def __init__(self, stream: Any, number: int, cursor: Cursor, reading: Reading) -> None:
        self._entered = cursor if cursor.state is not None else Cursor()
        self.cursors: list[tuple[int, Cursor]] = [(number, self._entered)]
        """Block starts that were passed since somebody last took this list, with the lane's number."""
        self._number = number
        self._reading = reading
        self._may_draw = not draws_nothing(stream)
        self._source = type(stream).__name__
        self._can_resume = hasattr(stream, "state_dict")
        self._row = self._entered.row
        self._rows: list[Any] = []
        self._sources: list[str] | None = [] if hasattr(stream, "source_names") else None
        """The source of each row, where the stream is a mixture of several."""
        self.latest_source: str | None = None
        """The source of the sample that was returned last."""
        self._block = self._row // reading.block_size
        self._order: list[int] | None = None
        self._has_ended = False
        self._pass = SourcePass(stream, state=copy.deepcopy(self._entered.state), epoch=reading.epoch)
        if self._row < cursor.row:
            logger.info(
                "%s has no state_dict: its first %d rows are read again to go on.", type(stream).__name__, cursor.row
            )

    def read(self, place: int) -> Any:
        """Returns the sample at a place of the lane, a Failure where its row cannot be read, or ENDED.

        Places must not go back beyond the block in hand.
        """
        found = self._find(place)
        if found is None:
            return ENDED
        self.latest_source = None if self._sources is None else self._sources[found]
        return self._rows[found]

    def _find(self, place: int) -> int | None:
        """Returns where in the block in hand a place is, or None behind the end."""
        block, place = divmod(place, self._reading.block_size)
        while self._block < block:
            self._read_up_to(self._reading.block_size)  # the rest of the block in hand, which nobody asked for
            if self._has_ended:
                return None
            self._enter_next_block()
        if self._reading.shuffle:
            self._read_up_to(self._reading.block_size)
            return self._shuffled(place) if place < len(self._rows) else None
        self._read_up_to(place + 1)
        return place if place < len(self._rows) else None

    def _enter_next_block(self) -> None:
        self._block += 1
        self._rows, self._order = [], None
        self._sources = None if self._sources is None else []
        state = copy.deepcopy(self._pass.state()) if self._can_resume else None
        self.cursors.append((self._number, Cursor(self._row, state)))

    def _read_up_to(self, count: int) -> None:
        while len(self._rows) < count and not self._has_ended:
            if self._may_draw:
                reading = self._reading
                seed_generators(mix_seed(reading.seed, _ROW_STREAM, reading.epoch, self._number, self._row))
            try:
                sample = self._pass.take()
            except StopIteration:
                self._has_ended = True
                return
            except Exception as error:
                sample = self._take(error)
            self._rows.append(sample)
            if self._sources is not None:
                self._sources.append(self._pass.source.latest_source)
            self._row += 1

    def _take(self, error: Exception) -> Failure:
        lane = self._number if self._reading.num_lanes > 1 else None
        failure = Failure.of(error, source=self._source, row=self._row, lane=lane)
        if not self._reading.skips_errors or isinstance(error, StreamBrokenError):
            failure.annotate(error)
            raise error
        return failure

    def _shuffled(self, place: int) -> int:
        if self._order is None:  # the block has been read, so its length is known
            reading, size = self._reading, len(self._rows)
            key = mix_seed(reading.seed, _BLOCK_STREAM, reading.epoch, self._number, self._block)
            self._order = permute(np.arange(size, dtype=np.int64), size, key=key).tolist()
        return self._order[place]
