"""FileStream: reads the rows of text files in order, in place, from any position at the same cost.

RangeStream, its base, has the shards and the state of every stream over ranges of files (see parquet.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from trainwright.data.fetch import StreamBrokenError
from trainwright.data.sources.formats import BYTE_ORDER_MARK, FileFormat, RowError
from trainwright.data.sources.locations import FileLocation, Paths, find_files, list_locations
from trainwright.errors import ConfigError, DataError


@dataclass(frozen=True)
class FileRange:
    """A range of a file: bytes, or row groups of a Parquet file."""

    location: FileLocation
    begin: int = 0
    end: int | None = None
    """None means up to the end of the file."""

    def __str__(self) -> str:
        limits = f" from {self.begin} to {self.end}" if self.begin or self.end is not None else ""
        return f"{self.location.label} ({self.location.size} bytes){limits}"


class RangeStream(IterableDataset[dict[str, Any]]):
    """A stream over ranges of files, which is sharded by range and resumed from any position.

    A subclass defines `_split(location)`, which returns the ranges of a file, `_iterate(start)`, which returns an
    iterator with an attribute `position`, and the class of its positions.
    """

    draws_nothing = True  # the loader need not seed each sample
    position_type: type[Any]

    def __init__(self, path: Paths, *, suffixes: tuple[str, ...], project_dir: str | Path | None = None) -> None:
        self.path = path
        self._suffixes = suffixes
        self._project_dir = Path(project_dir or ".").absolute()  # a worker may run in another folder
        self._ranges: list[FileRange] | None = None
        self._start: Any = None
        self._iterator: Any = None

    @property
    def num_shards(self) -> int:
        """The largest number of shards."""
        return len(self.file_ranges)

    @property
    def file_ranges(self) -> list[FileRange]:
        """The ranges of the stream, in order; the file systems are accessed at first use."""
        if self._ranges is None:
            self._ranges = self._find_ranges(
                find_files(self.path, suffixes=self._suffixes, project_dir=self._project_dir)
            )
        return self._ranges

    def list_files(self) -> list[str]:
        """Returns the names and sizes of the files."""
        return list_locations([each.location for each in self.file_ranges])

    def shard(self, num_shards: int, index: int) -> RangeStream:
        """Returns one of `num_shards` disjoint contiguous shards."""
        count = len(self.file_ranges)
        if not 0 <= index < num_shards <= count:
            raise ConfigError(f"Shard {index} of {num_shards} was requested of a stream with at most {count} shards.")
        shard = copy.copy(self)
        shard._ranges = self.file_ranges[count * index // num_shards : count * (index + 1) // num_shards]
        shard._start = shard._iterator = None
        return shard

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the latest iteration, and the range that it is in."""
        position = (self._start or self.position_type()) if self._iterator is None else self._iterator.position
        number = min(position.file_range, len(self.file_ranges) - 1)
        return {**vars(position), "in": [number, str(self.file_ranges[number])]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iteration begin at a saved position; rejects one whose range of files has changed.

        If a file before it is added or missing, rows would be repeated or omitted.
        """
        start = self.position_type(**{name: value for name, value in state.items() if name != "in"})
        number, saved = state["in"]
        found = str(self.file_ranges[number]) if number < len(self.file_ranges) else "missing"
        if start != self.position_type() and found != saved:
            raise StreamBrokenError(
                f"The stream cannot be resumed: its file range {number} (counted from 0) was {saved} and is now "
                f"{found}. Restore the files, or start a run without this state."
            )
        self._start, self._iterator = start, None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start, self._start = self._start or self.position_type(), None
        self._iterator = self._iterate(start)
        return self._iterator  # type: ignore[no-any-return]  # an iterator

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None}  # an open file cannot be pickled

    def _find_ranges(self, files: list[FileLocation]) -> list[FileRange]:
        raise NotImplementedError

    def _iterate(self, start: Any) -> Any:
        raise NotImplementedError


SHARD_MEGABYTES = 64.0
"""The size of a shard of a large file, in units of 2**20 bytes."""


@dataclass(frozen=True)
class _FilePosition:
    """The position of an iteration: the next row begins at or after this byte of this range."""

    file_range: int = 0
    offset: int | None = None
    """None: at the start of the range."""
    line: int = 0
    """The lines before it in the range, for messages."""


class FileStream(RangeStream):
    """The rows of text files as a stream."""

    position_type = _FilePosition

    def __init__(
        self,
        path: Paths,
        file_format: FileFormat,
        *,
        shard_megabytes: float = SHARD_MEGABYTES,
        project_dir: str | Path | None = None,
    ) -> None:
        if not shard_megabytes > 0:
            raise ConfigError(f"shard_megabytes is {shard_megabytes}. Use a positive number.")
        super().__init__(path, suffixes=file_format.suffixes, project_dir=project_dir)
        self.format = file_format
        self._shard_bytes = max(1, round(shard_megabytes * 2**20))

    def _iterate(self, start: _FilePosition) -> FileStreamIterator:
        return FileStreamIterator(self.file_ranges, self.format, start)

    def _find_ranges(self, files: list[FileLocation]) -> list[FileRange]:
        records, ranges = self.format.records, []
        for location in files:
            edges: list[int | None] = [0]
            if records is not None and records.can_be_split and not location.compression and location.size:
                edges = list(range(0, location.size, self._shard_bytes))
            ranges += [FileRange(location, begin or 0, end) for begin, end in pairwise([*edges, None])]
        return ranges


class FileStreamIterator:
    """One iteration. After a row that raised or a file that cannot be opened it continues with the next one."""

    def __init__(self, file_ranges: list[FileRange], file_format: FileFormat, position: _FilePosition) -> None:
        self._ranges = file_ranges
        self._format = file_format
        self.position = position
        self._opened: _OpenRange | None = None

    def __iter__(self) -> FileStreamIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        while self.position.file_range < len(self._ranges):
            file_range = self._ranges[self.position.file_range]
            try:
                if self._opened is None:
                    self._opened = _OpenRange(file_range, self._format, self.position)
                opened = self._opened
                record = opened.read()
            except Exception as error:  # a missing file, a broken archive, a lost connection
                self._leave_range()
                if isinstance(error, DataError):
                    raise
                name = file_range.location.name
                raise DataError(f"{name} cannot be read: {type(error).__name__}: {error}") from error
            if record is None:
                self._leave_range()
                continue
            if self._format.records is None:
                self._leave_range()  # before decoding, because an error must not return the same file again
            else:
                self.position = _FilePosition(self.position.file_range, opened.offset, opened.line)
            try:
                return self._format.decode(record, opened.header)
            except RowError as error:
                raise DataError(f"{opened.describe()}: {error}") from error.__cause__
        raise StopIteration

    def describe(self) -> str:
        """Returns the file and the position of the last row, for errors."""
        if self._opened is not None:
            return self._opened.describe()
        return self._ranges[self.position.file_range - 1].location.name  # the row was the whole file

    def _leave_range(self) -> None:
        if self._opened is not None:
            self._opened.file.close()
            self._opened = None
        self.position = _FilePosition(self.position.file_range + 1)


class _OpenRange:
    """A range that is being read."""

    def __init__(self, file_range: FileRange, file_format: FileFormat, position: _FilePosition) -> None:
        self.file_range = file_range
        self.file = file_range.location.open_content()
        self.header = b""
        self.offset = 0
        self.line = 0
        self._records = file_format.records
        self._lines: list[bytes] = []
        self._end: int | None = None
        try:
            self._seek_start(file_format, position)
        except BaseException:
            self.file.close()
            raise

    def read(self) -> bytes | None:
        """Returns the next record, or None at the end of the range."""
        if self._records is None:
            return self.file.read()
        self._lines = self._records.take(self._next_line)
        return self._records.record(self._lines) or None

    def describe(self) -> str:
        """Returns the file and the position of the last record."""
        name = self.file_range.location.name
        if self._records is None:
            return name
        skipped = next((number for number, line in enumerate(self._lines) if line.strip(b"\r\n")), 0)
        if self.file_range.begin:  # the number of lines before the range is unknown
            return f"{name} byte {self.offset - sum(map(len, self._lines[skipped:]))}"
        return f"{name} line {self.line - len(self._lines) + skipped + 1}"

    def _seek_start(self, file_format: FileFormat, position: _FilePosition) -> None:
        """Moves to the first record to read, after the header and the records that were read before."""
        records, file_range = self._records, self.file_range
        if records is not None and (file_range.begin or file_range.end is not None):
            self._end = None if file_range.end is None else records.find_start(self.file, file_range.end)
            self.offset = records.find_start(self.file, file_range.begin)
            self.file.seek(self.offset)
        if self.offset == 0 and self.file.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK):
            self.offset += len(self.file.read(len(BYTE_ORDER_MARK)))
        if records is not None and file_format.has_header:
            self.header = records.record(records.take(self._next_line))
        if position.offset is not None and position.offset > self.offset:
            self.offset, self.line = position.offset, position.line
            try:
                self.file.seek(self.offset)
            except ValueError:
                # For a server that sends only complete files, the bytes in between are read and discarded.
                while (left := self.offset - self.file.tell()) > 0 and self.file.read(min(left, 1 << 20)):
                    pass

    def _next_line(self) -> bytes:
        if self._end is not None and self.offset >= self._end:
            return b""  # the next range begins here
        line = self.file.readline()
        self.offset += len(line)
        self.line += bool(line)
        return line
