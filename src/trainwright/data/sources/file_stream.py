"""FileStream: the rows of text files in order, read where the files are, from any position at the same cost."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.utils.data import IterableDataset

from trainwright.data.fetch import StreamBrokenError
from trainwright.data.sources.formats import BYTE_ORDER_MARK, FileFormat, RowError
from trainwright.data.sources.locations import FileLocation, Paths, find_files
from trainwright.errors import ConfigError, DataError


@dataclass(frozen=True)
class FileRange:
    """A stretch of a file."""

    location: FileLocation
    begin: int = 0
    end: int | None = None
    """None: up to the end of the file."""

    def identify(self) -> dict[str, Any]:
        """Returns what tells this piece from others, wherever the folder that holds the file may be."""
        return {"file": self.location.label, "size": self.location.size, "begin": self.begin, "end": self.end}


def share_of(file_ranges: Sequence[FileRange], *, num_shards: int, index: int) -> list[FileRange]:
    """Returns a contiguous share of the pieces; the shares in order are all of them."""
    if not 0 <= index < num_shards <= len(file_ranges):
        raise ConfigError(
            f"Shard {index} of {num_shards} was asked for, of a stream that can be cut into {len(file_ranges)} shards."
        )
    count = len(file_ranges)
    return list(file_ranges[count * index // num_shards : count * (index + 1) // num_shards])


def identify_range(file_ranges: Sequence[FileRange], number: int) -> dict[str, Any]:
    """Returns what a state says of the piece that it lies in; behind the last one, of that one."""
    place = min(number, len(file_ranges) - 1)
    return {"number": place, **file_ranges[place].identify()}


def check_range(file_ranges: Sequence[FileRange], saved: Mapping[str, Any]) -> None:
    """Rejects to go on where another piece is in the place of the one that a state lies in.

    With a file more or less before it, rows would be read twice or never.
    """
    place = saved["number"]
    found = identify_range(file_ranges, place)
    if found != dict(saved):
        now = f"it is {_show(found)}" if found["number"] == place else f"there are only {len(file_ranges)}"
        raise StreamBrokenError(
            f"The stream cannot go on where it stopped: its piece {place} (counted from 0) was {_show(saved)}, and now "
            f"{now}. Put the files back as they were, or start a run without this state."
        )


def _show(file_range: Mapping[str, Any]) -> str:
    stretch = (
        ""
        if not file_range["begin"] and file_range["end"] is None
        else f" from {file_range['begin']} to {file_range['end']}"
    )
    return f"{file_range['file']} ({file_range['size']} bytes){stretch}"


SHARD_MEGABYTES = 64.0
"""How much of a large file one shard holds, in units of 2**20 bytes."""


@dataclass(frozen=True)
class _FilePosition:
    """Where an iteration stands: the next row begins at or behind this byte of this piece."""

    file_range: int = 0
    offset: int | None = None
    """None: at the start of the piece."""
    line: int = 0
    """The lines of the piece before, for messages."""


class FileStream(IterableDataset[dict[str, Any]]):
    """The rows of text files as a stream, which can be cut into `num_shards` shards and entered anywhere."""

    draws_nothing = True  # the loader need not seed each sample

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
        self.path = path
        self.format = file_format
        self._shard_bytes = max(1, round(shard_megabytes * 2**20))
        self._project_dir = Path(project_dir or ".").absolute()  # a worker may stand in another folder
        self._file_ranges: list[FileRange] | None = None
        self._start: _FilePosition | None = None
        self._iterator: FileStreamIterator | None = None

    @property
    def num_shards(self) -> int:
        """How many shards there can be at most."""
        return len(self.file_ranges)

    @property
    def file_ranges(self) -> list[FileRange]:
        """What the stream reads, in order; the file systems are asked at first use."""
        if self._file_ranges is None:
            found = find_files(self.path, suffixes=self.format.suffixes, project_dir=self._project_dir)
            self._file_ranges = [file_range for location in found for file_range in self._cut(location)]
        return self._file_ranges

    def shard(self, num_shards: int, index: int) -> FileStream:
        """Returns one of `num_shards` disjoint parts, which one after the other are the whole."""
        part = FileStream(self.path, self.format, project_dir=self._project_dir)
        part._shard_bytes = self._shard_bytes
        part._file_ranges = share_of(self.file_ranges, num_shards=num_shards, index=index)
        return part

    def state_dict(self) -> dict[str, Any]:
        """Returns where the iteration begun last stands."""
        place = (self._start or _FilePosition()) if self._iterator is None else self._iterator.place
        return {**vars(place), "in": identify_range(self.file_ranges, place.file_range)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iteration begin there, unless the files before that place are others now."""
        start = _FilePosition(state["file_range"], state["offset"], state["line"])
        if start != _FilePosition():  # before the first row any files will do
            check_range(self.file_ranges, state["in"])
        self._start = start
        self._iterator = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start, self._start = self._start or _FilePosition(), None
        self._iterator = FileStreamIterator(self.file_ranges, self.format, start)
        return self._iterator

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None}  # an open file cannot be pickled

    def _cut(self, location: FileLocation) -> list[FileRange]:
        records, size = self.format.records, location.size
        if records is None or not records.can_be_cut or location.compression or not size or size <= self._shard_bytes:
            return [FileRange(location)]
        borders = list(range(0, size, self._shard_bytes))
        return [FileRange(location, begin, end) for begin, end in zip(borders, [*borders[1:], None], strict=True)]


class FileStreamIterator:
    """One iteration. After a row that raised, it goes on with the next; after a file that cannot be opened, too."""

    def __init__(self, file_ranges: list[FileRange], file_format: FileFormat, place: _FilePosition) -> None:
        self._file_ranges = file_ranges
        self._format = file_format
        self.place = place
        self._opened: _OpenRange | None = None

    def __iter__(self) -> FileStreamIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        while self.place.file_range < len(self._file_ranges):
            if self._opened is None:
                self._open()
            opened = self._opened
            assert opened is not None
            record = self._read(opened)
            if record is None:
                self._leave_range()
                continue
            if self._format.records is None:
                self._leave_range()  # before decoding: an error must not bring the same file again
            else:
                self.place = _FilePosition(self.place.file_range, opened.place, opened.line)
            try:
                return self._format.decode(record, opened.header)
            except RowError as error:
                raise DataError(f"{opened.describe()}: {error}") from error.__cause__
        raise StopIteration

    def _open(self) -> None:
        file_range = self._file_ranges[self.place.file_range]
        try:
            self._opened = _OpenRange(file_range, self._format, self.place)
        except Exception as error:  # each file system has errors of its own
            self._fail(file_range, error)

    def _read(self, opened: _OpenRange) -> bytes | None:
        try:
            return opened.read()
        except Exception as error:  # a broken archive, a lost connection
            self._fail(opened.file_range, error)

    def _fail(self, file_range: FileRange, error: Exception) -> NoReturn:
        self._leave_range()
        if isinstance(error, DataError):
            raise error
        raise DataError(f"{file_range.location.name} cannot be read: {type(error).__name__}: {error}") from error

    def _leave_range(self) -> None:
        if self._opened is not None:
            self._opened.file.close()
            self._opened = None
        self.place = _FilePosition(self.place.file_range + 1)


class _OpenRange:
    """A piece being read."""

    def __init__(self, file_range: FileRange, file_format: FileFormat, place: _FilePosition) -> None:
        self.file_range = file_range
        self.file = file_range.location.open_content()
        self.header = b""
        self.place = 0
        self.line = 0
        self._records = file_format.records
        self._is_done = False
        self._taken: list[bytes] = []
        self._end: int | None = None
        try:
            self._enter(file_format, place)
        except BaseException:
            self.file.close()
            raise

    def read(self) -> bytes | None:
        """Returns the next record, or None at the end of the piece."""
        if self._records is None:
            content = None if self._is_done else self.file.read()
            self._is_done = True
            return content
        self._taken = self._records.take(self._next_line)
        return self._records.record(self._taken) or None

    def describe(self) -> str:
        """Names the file and where the record read last begins in it."""
        name = self.file_range.location.name
        if self._records is None:
            return name
        skipped = next((number for number, line in enumerate(self._taken) if line.strip(b"\r\n")), 0)
        if self.file_range.begin:  # how many lines come before the piece is not known
            return f"{name} byte {self.place - sum(map(len, self._taken[skipped:]))}"
        return f"{name} line {self.line - len(self._taken) + skipped + 1}"

    def _enter(self, file_format: FileFormat, place: _FilePosition) -> None:
        """Moves to the first record to read, past the header and whatever was read before."""
        records, file_range = self._records, self.file_range
        if records is not None and (file_range.begin or file_range.end is not None):
            self._end = None if file_range.end is None else records.cut(self.file, file_range.end)
            self.place = records.cut(self.file, file_range.begin)
            self.file.seek(self.place)
        if self.place == 0 and self.file.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK):
            self.place += len(self.file.read(len(BYTE_ORDER_MARK)))
        if records is not None and file_format.has_header:
            self.header = records.record(records.take(self._next_line))
        if place.offset is not None and place.offset > self.place:
            _seek(self.file, place.offset)
            self.place, self.line = place.offset, place.line

    def _next_line(self) -> bytes:
        if self._end is not None and self.place >= self._end:
            return b""  # here the next piece begins
        line = self.file.readline()
        self.place += len(line)
        self.line += bool(line)
        return line


def _seek(file: io.BufferedReader, place: int) -> None:
    try:
        file.seek(place)
    except ValueError:
        # A server that sends a file only as a whole: what lies between is read and thrown away.
        while (left := place - file.tell()) > 0 and file.read(min(left, 1 << 20)):
            pass
