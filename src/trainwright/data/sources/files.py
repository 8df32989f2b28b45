"""Rows of text files, as lines, paragraphs, JSON or CSV: `text`, `json_lines` and `csv` in a run file.

Rows are read by index from a memory map (FileRows), or with `streaming: true` in order from their original location
(file_stream.py). A constructor does not access the disk. Parquet is in parquet.py; which files a path names, in
locations.py.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from trainwright.data.fetch import positive_indices
from trainwright.data.sources.file_stream import SHARD_MEGABYTES, FileStream
from trainwright.data.sources.formats import (
    BYTE_ORDER_MARK,
    CsvFormat,
    FileFormat,
    JsonLinesFormat,
    Offsets,
    RowError,
    TextFormat,
    lines_from,
)
from trainwright.data.sources.locations import FileLocation, Paths, find_files, fingerprint_files, list_locations
from trainwright.errors import ConfigError, DataError
from trainwright.progress import progress

# Each map uses a file descriptor, of which a process often has only 1,024.
_MAPS_KEPT = 128


def text(
    path: Paths,
    *,
    unit: str = "file",
    streaming: bool = False,
    shard_megabytes: float | None = None,
    cache_dir: str | Path | None = None,
    project_dir: str | Path | None = None,
) -> FileRows | FileStream:
    """Texts, one sample {"text": …} for each `unit`: a line, a paragraph (lines between blank ones) or a file.

    `path` is a file, a glob, a folder (all its .txt files), a URL, or a list of those; .gz, .bz2 and .xz are read too.
    Blank lines and paragraphs are skipped. For access by index, remote and compressed files are first copied into the
    cache (`cache_dir`); streaming reads them in place, in shards of about `shard_megabytes` (64).
    """
    return open_files(TextFormat(unit), path, streaming, shard_megabytes, cache_dir, project_dir)


def json_lines(
    path: Paths,
    *,
    columns: Sequence[str] | None = None,
    streaming: bool = False,
    shard_megabytes: float | None = None,
    cache_dir: str | Path | None = None,
    project_dir: str | Path | None = None,
) -> FileRows | FileStream:
    """JSON objects, one per line; `columns` names those to keep. Blank lines are skipped.

    `path`, `streaming`, `shard_megabytes` and `cache_dir` are those of `text`; a folder means its .jsonl files.
    """
    return open_files(JsonLinesFormat(columns), path, streaming, shard_megabytes, cache_dir, project_dir)


def csv(
    path: Paths,
    *,
    columns: Sequence[str] | None = None,
    types: Mapping[str, str | type] | None = None,
    delimiter: str = ",",
    streaming: bool = False,
    cache_dir: str | Path | None = None,
    project_dir: str | Path | None = None,
) -> FileRows | FileStream:
    """Rows of CSV, each a dict by the names in the file's first row; `columns` names those to keep.

    Values are texts unless `types` is set: {age: int, weight: float}. Quoted values may contain line breaks, so a file
    is one shard of a stream. `path`, `streaming` and `cache_dir` are those of `text`.
    """
    return open_files(CsvFormat(delimiter, columns, types), path, streaming, None, cache_dir, project_dir)


def open_files(
    file_format: FileFormat,
    path: Paths,
    streaming: bool,
    shard_megabytes: float | None,
    cache_dir: str | Path | None,
    project_dir: str | Path | None,
) -> FileRows | FileStream:
    """Returns the rows by index or as a stream; rejects settings without effect."""
    if streaming:
        reject_cache(cache_dir)
        megabytes = SHARD_MEGABYTES if shard_megabytes is None else shard_megabytes
        return FileStream(path, file_format, shard_megabytes=megabytes, project_dir=project_dir)
    if shard_megabytes is not None:
        raise ConfigError("shard_megabytes has no effect without streaming: true. Remove it, or set streaming.")
    return FileRows(path, file_format, cache_dir=cache_dir, project_dir=project_dir)


def reject_cache(cache_dir: str | Path | None) -> None:
    """Rejects a cache folder for a stream, which copies no files."""
    if cache_dir is not None:
        raise ConfigError("cache_dir has no effect with streaming: true. Remove it.")


class FileRows(Dataset[dict[str, Any]]):
    """The rows of text files by index.

    At first use, the files are scanned for row offsets, at about a gigabyte per second; this index needs eight bytes
    per row. A worker receives the index and maps the files itself.
    """

    draws_nothing = True  # the loader need not seed each sample

    def __init__(
        self,
        path: Paths,
        file_format: FileFormat,
        *,
        cache_dir: str | Path | None = None,
        project_dir: str | Path | None = None,
    ) -> None:
        self.path = path
        self.format = file_format
        self._cache_dir = cache_dir
        self._project_dir = Path(project_dir or ".").absolute()  # a worker may run in another folder
        self._files: list[_IndexedFile] | None = None
        self._ends = np.empty(0, np.int64)
        self._maps: OrderedDict[int, mmap.mmap | bytes] = OrderedDict()

    @property
    def fingerprint(self) -> str:
        """A digest of the files' names, sizes and modification times."""
        return fingerprint_files([file.location for file in self._load()])

    def list_files(self) -> list[str]:
        """Returns the names and sizes of the files."""
        return list_locations([file.location for file in self._load()])

    def describe_row(self, index: int) -> str:
        """Returns the file and the line of a row, for errors; scans the file."""
        [row] = positive_indices([index], size=len(self), of=f"rows of {self.path}").tolist()
        number = int(np.searchsorted(self._ends, row, side="right"))
        file = self._load()[number]
        if self.format.records is None:
            return file.location.name
        start = int(file.starts[row - int(self._ends[number]) + len(file.starts)])
        return f"{file.location.name} line {_count_lines(self._map(number), start) + 1}"

    def __len__(self) -> int:
        self._load()
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the samples of a batch; torch's loader prefers this to one call a sample."""
        rows = positive_indices(indices, size=len(self), of=f"rows of {self.path}")
        numbers = np.searchsorted(self._ends, rows, side="right")
        return [self._read(number, row) for number, row in zip(numbers.tolist(), rows.tolist(), strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        # Memory maps cannot be pickled; the index is, because scanning again would take longer.
        return {**self.__dict__, "_maps": OrderedDict()}

    def _load(self) -> list[_IndexedFile]:
        if self._files is None:
            found = find_files(self.path, suffixes=self.format.suffixes, project_dir=self._project_dir)
            self._files = []
            with progress("Indexing files", total=len(found), unit="files") as advance:
                for each in found:
                    self._files.append(_index_file(each, each.fetch(self._cache_dir), self.format))
                    advance()
            self._ends = np.cumsum([len(file.starts) for file in self._files])
        return self._files

    def _read(self, number: int, row: int) -> dict[str, Any]:
        file = self._load()[number]
        data = self._map(number)
        start = int(file.starts[row - int(self._ends[number]) + len(file.starts)])
        records = self.format.records
        record = bytes(data[start:]) if records is None else records.record(records.take(lines_from(data, start)))
        try:
            return self.format.decode(record, file.header)
        except RowError as error:
            raise DataError(f"{self.describe_row(row)}: {error}") from error.__cause__

    def _map(self, number: int) -> mmap.mmap | bytes:
        """Returns the bytes of a file; the most recently used files stay mapped."""
        if number not in self._maps:
            file = self._load()[number]
            data = map_file(file.local)
            if len(data) != file.size:
                raise DataError(
                    f"{file.local} has {len(data)} bytes, but had {file.size} when its rows were counted. "
                    "Do not change data files while a run reads them."
                )
            self._maps[number] = data
            if len(self._maps) > _MAPS_KEPT:
                self._maps.popitem(last=False)
        self._maps.move_to_end(number)
        return self._maps[number]


@dataclass(frozen=True)
class _IndexedFile:
    """A local file and the offsets of its rows."""

    location: FileLocation
    local: Path
    size: int
    starts: Offsets
    header: bytes = b""


def _index_file(location: FileLocation, local: Path, file_format: FileFormat) -> _IndexedFile:
    """Finds the rows, and the header before them."""
    records, header = file_format.records, b""
    data = map_file(local)
    begin = len(BYTE_ORDER_MARK) if data[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK else 0
    if records is None:
        starts = np.array([begin], np.int64)
    elif isinstance(data, bytes):  # an empty file has no rows
        starts = np.empty(0, np.int64)
    else:
        starts = records.index(data, begin)
        if file_format.has_header and len(starts):
            header = records.record(records.take(lines_from(data, int(starts[0]))))
            starts = starts[1:].copy()
    return _IndexedFile(location, local, len(data), starts, header)


def map_file(path: Path) -> mmap.mmap | bytes:
    """Returns the file's bytes as a memory map; b"" for an empty file, which cannot be mapped."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _count_lines(data: mmap.mmap | bytes, end: int) -> int:
    """Counts the line breaks before an offset; used only for errors."""
    chunk = 16 << 20
    return sum(data[start : min(start + chunk, end)].count(b"\n") for start in range(0, end, chunk))
