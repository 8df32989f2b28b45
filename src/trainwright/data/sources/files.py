"""Rows of text files, as lines, paragraphs, JSON or CSV: `text`, `json_lines` and `csv` in a run file.

Read by index from a memory map (FileRows), or with `streaming: true` one after the other from wherever the files are
(file_stream.py). A constructor touches no disk. Parquet is in parquet.py; which files a path names, in locations.py.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
from trainwright.data.sources.locations import FileLocation, Paths, find_files, fingerprint_files
from trainwright.errors import ConfigError, DataError

# Each map holds a file descriptor, of which a process often has only 1,024.
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
    Blank lines and paragraphs are left out. By index, remote and compressed files are first copied into the cache
    (`cache_dir`); streaming reads them where they are, in shards of about `shard_megabytes` (64).
    """
    return _rows_of(
        TextFormat(unit),
        path,
        streaming=streaming,
        shard_megabytes=shard_megabytes,
        cache_dir=cache_dir,
        project_dir=project_dir,
    )


def json_lines(
    path: Paths,
    *,
    columns: Sequence[str] | None = None,
    streaming: bool = False,
    shard_megabytes: float | None = None,
    cache_dir: str | Path | None = None,
    project_dir: str | Path | None = None,
) -> FileRows | FileStream:
    """Objects of JSON, one on each line; `columns` names those to keep. Blank lines are left out.

    `path`, `streaming`, `shard_megabytes` and `cache_dir` are those of `text`; a folder means its .jsonl files.
    """
    return _rows_of(
        JsonLinesFormat(columns),
        path,
        streaming=streaming,
        shard_megabytes=shard_megabytes,
        cache_dir=cache_dir,
        project_dir=project_dir,
    )


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

    Values are texts, or what `types` says: {age: int, weight: float}. Quoted values may hold line breaks, so a file is
    one shard of a stream. `path`, `streaming` and `cache_dir` are those of `text`.
    """
    return _rows_of(
        CsvFormat(delimiter, columns, types), path, streaming=streaming, cache_dir=cache_dir, project_dir=project_dir
    )


def _rows_of(
    file_format: FileFormat,
    path: Paths,
    *,
    streaming: bool,
    shard_megabytes: float | None = None,
    cache_dir: str | Path | None,
    project_dir: str | Path | None,
) -> FileRows | FileStream:
    """Returns the rows by index or as a stream, and rejects settings that the choice leaves without effect."""
    if streaming:
        reject_cache(cache_dir)
        megabytes = SHARD_MEGABYTES if shard_megabytes is None else shard_megabytes
        return FileStream(path, file_format, shard_megabytes=megabytes, project_dir=project_dir)
    if shard_megabytes is not None:
        raise ConfigError("shard_megabytes has no effect without streaming: true. Remove it, or set streaming.")
    return FileRows(path, file_format, cache_dir=cache_dir, project_dir=project_dir)


def reject_cache(cache_dir: str | Path | None) -> None:
    """Rejects a cache folder for a stream, which keeps no copies."""
    if cache_dir is not None:
        raise ConfigError("cache_dir has no effect with streaming: true, which copies nothing. Remove it.")


class FileRows(Dataset[dict[str, Any]]):
    """The rows of text files by index.

    At first use the files are scanned for where rows begin, about a gigabyte a second, and this index of eight bytes a
    row is kept. A worker gets the index, and maps the files itself.
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
        self._project_dir = Path(project_dir or ".").absolute()  # a worker may stand in another folder
        self._files: list[_IndexedFile] | None = None
        self._ends = np.empty(0, np.int64)
        self._maps: OrderedDict[int, mmap.mmap | bytes] = OrderedDict()

    @property
    def fingerprint(self) -> str:
        """What changes with the files: their names, sizes and times of change."""
        return fingerprint_files([file.location for file in self._load()])

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
        # Memory maps cannot be pickled; the index is, for scanning again costs each worker more.
        return {**self.__dict__, "_maps": OrderedDict()}

    def _load(self) -> list[_IndexedFile]:
        if self._files is None:
            found = find_files(self.path, suffixes=self.format.suffixes, project_dir=self._project_dir)
            files = [_IndexedFile(each, each.fetch(self._cache_dir)) for each in found]
            for file in files:
                file.scan(self.format)
            self._ends = np.cumsum([file.num_rows for file in files])
            self._files = files
        return self._files

    def _read(self, number: int, row: int) -> dict[str, Any]:
        file = self._load()[number]
        row -= int(self._ends[number]) - file.num_rows
        data = self._map(number)
        start = int(file.starts[row])
        records = self.format.records
        record = bytes(data[start:]) if records is None else records.record(records.take(lines_from(data, start)))
        try:
            return self.format.decode(record, file.header)
        except RowError as error:
            line = "" if records is None else f" line {_count_lines(data, start) + 1}"
            raise DataError(f"{file.location.name}{line}: {error}") from error.__cause__

    def _map(self, number: int) -> mmap.mmap | bytes:
        """Returns the bytes of a file; those used last stay mapped."""
        found = self._maps.get(number)
        if found is not None:
            self._maps.move_to_end(number)
            return found
        file = self._load()[number]
        data = map_file(file.local)
        if len(data) != file.size:
            raise DataError(
                f"{file.local} has {len(data)} bytes, but had {file.size} when its rows were counted. "
                "Leave data files as they are while a run reads them."
            )
        self._maps[number] = data
        if len(self._maps) > _MAPS_KEPT:
            self._maps.popitem(last=False)
        return data


class _IndexedFile:
    """A local file and where its rows begin."""

    def __init__(self, location: FileLocation, local: Path) -> None:
        self.location = location
        self.local = local
        self.size = 0
        self.header = b""
        self.starts: Offsets = np.empty(0, np.int64)

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    def scan(self, file_format: FileFormat) -> None:
        """Finds the rows, and the header that comes before them."""
        if file_format.records is None:
            self.size = self.local.stat().st_size
            with self.local.open("rb") as file:
                begin = _length_of_mark(file.read(len(BYTE_ORDER_MARK)))
            self.starts = np.array([begin], np.int64)
            return
        data = map_file(self.local)
        self.size = len(data)
        if isinstance(data, bytes):
            return  # an empty file has no rows
        starts = file_format.records.index(data, _length_of_mark(data[: len(BYTE_ORDER_MARK)]))
        if file_format.has_header and len(starts):
            self.header = file_format.records.record(file_format.records.take(lines_from(data, int(starts[0]))))
            starts = starts[1:].copy()
        self.starts = starts


def map_file(path: Path) -> mmap.mmap | bytes:
    """Returns the file's bytes, mapped and read only where touched; an empty file, which has no map, as b""."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _length_of_mark(first: bytes) -> int:
    return len(BYTE_ORDER_MARK) if first == BYTE_ORDER_MARK else 0


def _count_lines(data: mmap.mmap | bytes, end: int) -> int:
    """Counts the line breaks before a place; only an error needs to know."""
    piece = 16 << 20
    return sum(data[start : min(start + piece, end)].count(b"\n") for start in range(0, end, piece))
