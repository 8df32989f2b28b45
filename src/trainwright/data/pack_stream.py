"""Packs the documents of a stream: one after the other, cut at every `length` tokens, the last row padded.

The state is a cursor: the source's state at the document in hand and how much of that is used, so that a resumed run
reads at most this one document again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from trainwright.data.fetch import draws_nothing
from trainwright.data.pack_rows import Document, DocumentReader, Row, RowFormat
from trainwright.data.source_pass import SourcePass
from trainwright.errors import DataError

State = dict[str, Any]

_START: State = {"source": None, "offset": 0, "ended": False, "replay": 0}


class PackedStream:
    """Rows of `length` tokens from a stream of documents, in the stream's order.

    It has `num_shards`, `shard`, `state_dict` and `load_state_dict` where the source has them.
    """

    def __init__(self, source: Any, *, row_format: RowFormat, reader: DocumentReader) -> None:
        self.source = source
        self.row_format = row_format
        self.reader = reader
        self.tokens_per_sample = row_format.length
        self.draws_nothing = draws_nothing(source)
        self._epoch: int | None = None
        self._seed: int | None = None
        self._start: State | None = None
        self._pass: PackedPass | None = None

    @property
    def tokenizer(self) -> Any:
        """What shows the tokens as text: the tokenizer given, else the source's."""
        return self.source.tokenizer if self.reader.tokenizer is None else self.reader.tokenizer

    @property
    def num_shards(self) -> int:
        """The most parts that the source can be read in."""
        return int(self.source.num_shards)

    @property
    def shard(self) -> Callable[..., PackedStream]:
        """`shard(num_shards=, index=)` packs one of disjoint parts of the source."""
        self._require("shard")
        return self._shard

    @property
    def state_dict(self) -> Callable[[], State]:
        """`state_dict()` returns where the pass begun last stands."""
        self._require("state_dict")
        return self._state_dict

    @property
    def load_state_dict(self) -> Callable[[Mapping[str, Any]], None]:
        """`load_state_dict(state)` lets the next pass go on from there."""
        self._require("load_state_dict")
        return self._load_state_dict

    def set_epoch(self, epoch: int) -> None:
        """Tells the source which pass begins next, where it wants to know."""
        self._epoch = epoch

    def seed_rows(self, seed: int) -> None:
        """Says with which randomness documents are read: each with its own, so that one can be read again."""
        self._seed = seed

    def __iter__(self) -> PackedPass:
        start, self._start = self._start, None
        self._pass = PackedPass(self, start or _START, epoch=self._epoch, seed=self._seed)
        return self._pass

    def _shard(self, num_shards: int, index: int) -> PackedStream:
        part = self.source.shard(num_shards=num_shards, index=index)
        packed = PackedStream(part, row_format=self.row_format, reader=self.reader)
        packed._epoch = self._epoch
        return packed

    def _state_dict(self) -> State:
        if self._start is not None:
            return dict(self._start)
        return dict(_START) if self._pass is None else self._pass.state()

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = dict(state)

    def _require(self, name: str) -> None:
        if not hasattr(self.source, name):
            raise AttributeError(f"{type(self.source).__name__} has no {name}")


class PackedPass:
    """One pass over the rows, from a state of the stream.

    A document that cannot be read raises and is left out; the next row goes on with the one behind it. In between
    the state is that of the row's beginning and the number of documents to read again, so that the error is not
    reported twice.
    """

    def __init__(self, packed: PackedStream, state: Mapping[str, Any], *, epoch: int | None, seed: int | None) -> None:
        self._format = packed.row_format
        self._reader = packed.reader
        self._source = SourcePass(packed.source, state=state["source"], epoch=epoch, seed=seed)
        self._has_state = hasattr(packed.source, "state_dict")
        self._row = Row(self._format)
        self._row_start: State = {name: state[name] for name in ("source", "offset", "ended")}
        self._num_read = 0  # documents read since the row's start, those that failed included
        self._has_failed = False
        self._to_replay = int(state["replay"])
        self._to_skip = int(state["offset"])
        self._has_ended = bool(state["ended"])
        self._document: Document | None = None
        self._offset = 0
        self._before: Any = None  # the source's state before the document in hand

    def __iter__(self) -> PackedPass:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self._to_skip:
            self._reopen_document()
        while self._to_replay:
            self._to_replay -= 1
            with suppress(Exception):  # reported when it was read for the first time
                self._read_document()
            self._use_document()
        while self._row.room and not self._has_ended:
            if self._document is None:
                self._read_document()
            self._use_document()
        row, self._row = self._row, Row(self._format)
        self._row_start, self._num_read, self._has_failed = self._here(), 0, False
        if row.room == self._format.length:
            raise StopIteration
        return row.finish()

    def state(self) -> State:
        """Returns where the next row begins."""
        replay = self._to_replay or (self._num_read if self._has_failed else 0)
        return {**self._row_start, "replay": replay}

    def _here(self) -> State:
        if self._document is not None:
            return {"source": self._before, "offset": self._offset, "ended": False}
        state = self._source.state() if self._has_state and not self._has_ended else None
        return {"source": state, "offset": 0, "ended": self._has_ended}

    def _read_document(self) -> None:
        """Takes the next document in hand, unless it is empty or the source has ended."""
        self._before = self._source.state() if self._has_state else None
        self._num_read += 1
        try:
            [document] = self._reader.read([self._source.take()])
        except StopIteration:
            self._has_ended = True
            return
        except Exception:
            self._has_failed = True
            self._has_ended = self._source.has_ended
            raise
        self._document, self._offset = (document if len(document.tokens) else None), 0

    def _reopen_document(self) -> None:
        """Reads the document that was in hand again and goes to the place in it."""
        skip, self._to_skip = self._to_skip, 0
        self._read_document()
        self._num_read = 0  # it belongs to the row's start
        length = 0 if self._document is None else len(self._document.tokens)
        if length <= skip:
            raise DataError(
                f"pack: the run goes on at token {skip} of a document, which now has only {length}. The data or the "
                "tokenizer has changed: put the former back, or start afresh."
            )
        self._offset = skip
        self._use_document()

    def _use_document(self) -> None:
        """Moves as much of the document in hand into the row as there is room for."""
        if self._document is None:
            return
        left = len(self._document.tokens) - self._offset
        size = min(left, self._row.room)
        self._row.add(self._document, self._offset, size)
        self._offset += size
        if size == left:
            self._document = None
