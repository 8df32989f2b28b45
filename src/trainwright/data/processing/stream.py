"""Sends each row of a stream through a function, as it is read; data with an index is processed once (process.py)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainwright.data.fetch import draws_nothing
from trainwright.data.source_pass import SourcePass
from trainwright.data.stream import StreamBrokenError

logger = logging.getLogger(__name__)

# Asking a source for its state may cost as much as a row, so it is asked once for this many of them.
_ROWS_PER_ANCHOR = 64

Function = Callable[..., Any]


def outputs_of(returned: Any) -> list[Any]:
    """Returns the samples that a row became: one, several of a list, or none for None."""
    if returned is None:
        return []
    return list(returned) if isinstance(returned, list) else [returned]


class ProcessedStream:
    """A stream of what `function(row, **arguments)` returns: a sample, a list of samples, or None to drop the row.

    It is cut and resumed as its source is: where that can go on from a state, so can this, for at most 64 rows again.
    """

    def __init__(self, source: Any, function: Function, arguments: Mapping[str, Any]) -> None:
        self.source = source
        self.function = function
        self.arguments = dict(arguments)
        self.epoch: int | None = None
        self.seed: int | None = None
        self.draws_nothing = draws_nothing(source) and bool(getattr(function, "draws_nothing", False))
        self._start: Mapping[str, Any] | None = None
        self._rows: _Rows | None = None

    def __getattr__(self, name: str) -> Any:
        # Only what the source can do: a method that is always there would promise too much.
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        own = {"state_dict": self._state, "load_state_dict": self._load_state, "shard": self._shard}
        offered = getattr(self.source, name)
        return own.get(name, offered)

    def set_epoch(self, epoch: int) -> None:
        """Tells the source which pass begins next."""
        self.epoch = epoch

    def seed_rows(self, seed: int) -> None:
        """Says with which randomness rows are read: each with its own, so that one can be read again."""
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, None
        self._rows = _Rows(self, start)
        return self._rows

    def _shard(self, num_shards: int, index: int) -> ProcessedStream:
        part = self.source.shard(num_shards=num_shards, index=index)
        return ProcessedStream(part, self.function, self.arguments)

    def _state(self) -> dict[str, Any] | None:
        return None if self._rows is None else self._rows.state()

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._start = state


class _Rows:
    """One iteration; after a row that raised it goes on with the next, if its source does."""

    def __init__(self, stream: ProcessedStream, start: Mapping[str, Any] | None) -> None:
        self._stream = stream
        self._can_resume = hasattr(stream.source, "state_dict")
        self._anchor: Any = None if start is None else start["source"]
        self._rows_since = self._num_given = 0
        self._outputs: list[Any] = []
        self._source = SourcePass(
            stream.source, state=copy.deepcopy(self._anchor), epoch=stream.epoch, seed=stream.seed
        )
        if start is not None:
            for _ in range(start["rows"]):
                self._read_again()
            self._num_given = int(start["given"])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._num_given >= len(self._outputs):
            self._next_row()
        self._num_given += 1
        return self._outputs[self._num_given - 1]

    def _next_row(self) -> None:
        if self._can_resume and self._rows_since >= _ROWS_PER_ANCHOR:
            self._anchor, self._rows_since = copy.deepcopy(self._source.state()), 0
        try:
            row = self._source.take()
        except StopIteration:
            raise  # the last row stays the last
        except Exception:
            self._pass_over()
            raise
        self._pass_over()
        self._outputs = outputs_of(self._stream.function(row, **self._stream.arguments))

    def _read_again(self) -> None:
        """Reads a row that was read before; what was wrong with it has been said."""
        try:
            self._next_row()
        except StreamBrokenError:
            raise
        except Exception as error:
            logger.debug("Passed over again: %s", error)

    def _pass_over(self) -> None:
        self._rows_since += 1
        self._outputs, self._num_given = [], 0

    def state(self) -> dict[str, Any]:
        """Returns where the source was last asked, the rows since, and how many samples of the last were given."""
        return {"source": self._anchor, "rows": self._rows_since, "given": self._num_given}
