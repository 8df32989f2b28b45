"""Rows of Parquet files: `parquet` in a run file, by index or as a stream.

A file is read by row groups; the most recently used ones are kept. Columns of number
lists become tensors (int64, float32; a list that does not fit keeps uint64 or float64), others plain Python
values. Needs pyarrow, of the `datasets` extra.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from trainwright.data.fetch import positive_indices
from trainwright.data.sources.file_stream import FileRange, RangeStream
from trainwright.data.sources.files import reject_cache
from trainwright.data.sources.formats import check_columns
from trainwright.data.sources.locations import FileLocation, Paths, find_files, fingerprint_files, list_locations
from trainwright.errors import DataError

SUFFIXES = (".parquet", ".pq")

_KEPT_BYTES = 256 << 20
"""The amount of decoded row groups that is kept for the next batches."""

# Shards are row groups if counting those of every file is cheap, and files otherwise.
_MOST_FILES_TO_ASK = 64

# A stream converts this many rows at a time to Python values.
_ROWS_AT_A_TIME = 256


def parquet(
    path: Paths,
    *,
    columns: Sequence[str] | None = None,
    streaming: bool = False,
    cache_dir: str | Path | None = None,
    project_dir: str | Path | None = None,
) -> ParquetRows | ParquetStream:
    """Rows of Parquet files as dicts; `columns` names those to read, which saves reading the others.

    `path` is a file, a glob, a folder (all its .parquet files), a URL, or a list of those. With access by index, a
    shuffled order reads a row group for nearly every row if the data exceeds the 256 MB that are kept; use streaming in
    this case.
    """
    if streaming:
        reject_cache(cache_dir)
        return ParquetStream(path, columns=columns, project_dir=project_dir)
    return ParquetRows(path, columns=columns, cache_dir=cache_dir, project_dir=project_dir)


class ParquetRows(Dataset[dict[str, Any]]):
    """The rows of Parquet files by index; remote files are first copied into the cache."""

    draws_nothing = True  # the loader need not seed each sample

    def __init__(
        self,
        path: Paths,
        *,
        columns: Sequence[str] | None = None,
        cache_dir: str | Path | None = None,
        project_dir: str | Path | None = None,
    ) -> None:
        self.path = path
        self.columns = check_columns(columns, "parquet")
        self._cache_dir = cache_dir
        self._project_dir = Path(project_dir or ".").absolute()  # a worker may run in another folder
        self._groups: list[tuple[FileLocation, int]] | None = None
        self._ends = np.empty(0, np.int64)
        self._tables: OrderedDict[int, Any] = OrderedDict()

    @property
    def fingerprint(self) -> str:
        """What changes with the files: their names, sizes and times of change."""
        return fingerprint_files(find_files(self.path, suffixes=SUFFIXES, project_dir=self._project_dir))

    def list_files(self) -> list[str]:
        """Returns the names and sizes of the files."""
        return list_locations(find_files(self.path, suffixes=SUFFIXES, project_dir=self._project_dir))

    def describe_row(self, index: int) -> str:
        """Returns the file and the number of a row in it, counted from 1, for errors."""
        [row] = positive_indices([index], size=len(self), of=f"rows of {self.path}").tolist()
        group = int(np.searchsorted(self._ends, row, side="right"))
        location, number = self._load()[group]
        before = int(self._ends[group - number - 1]) if group > number else 0  # the rows of earlier files
        return f"{location.name} row {row - before + 1}"

    def __len__(self) -> int:
        self._load()
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the samples of a batch; each row group is read once."""
        rows = positive_indices(indices, size=len(self), of=f"rows of {self.path}")
        groups = np.searchsorted(self._ends, rows, side="right")
        samples: list[Any] = [None] * len(rows)
        for group in np.unique(groups).tolist():
            here = np.flatnonzero(groups == group)
            table = self._table(group)
            first = int(self._ends[group]) - table.num_rows
            for number, sample in zip(here.tolist(), to_samples(table.take(rows[here] - first)), strict=True):
                samples[number] = sample
        return samples

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": OrderedDict()}  # a worker reads row groups itself

    def _load(self) -> list[tuple[FileLocation, int]]:
        if self._groups is None:
            found = find_files(self.path, suffixes=SUFFIXES, project_dir=self._project_dir)
            groups, counts = [], []
            for location in found:
                local = location.fetch(self._cache_dir)
                here = FileLocation(str(local), local.stat().st_size)
                with _OpenFile(here, self.columns) as opened:
                    counts += opened.rows_of_groups()
                groups += [(here, number) for number in range(opened.num_groups)]
            self._ends = np.cumsum(np.array(counts, np.int64))
            self._groups = groups
        return self._groups

    def _table(self, group: int) -> Any:
        table = self._tables.get(group)
        if table is not None:
            self._tables.move_to_end(group)
            return table
        location, number = self._load()[group]
        with _OpenFile(location, self.columns) as opened:
            table = opened.read_group(number)
        self._tables[group] = table
        while len(self._tables) > 1 and sum(each.nbytes for each in self._tables.values()) > _KEPT_BYTES:
            self._tables.popitem(last=False)
        return table


@dataclass(frozen=True)
class _RowPosition:
    """The position of an iteration: the next row of this row group, counted from the range's first."""

    file_range: int = 0
    group: int = 0
    row: int = 0


class ParquetStream(RangeStream):
    """The rows of Parquet files as a stream; its state is a row group and a row in it."""

    position_type = _RowPosition

    def __init__(
        self, path: Paths, *, columns: Sequence[str] | None = None, project_dir: str | Path | None = None
    ) -> None:
        super().__init__(path, suffixes=SUFFIXES, project_dir=project_dir)
        self.columns = check_columns(columns, "parquet")

    def _iterate(self, start: _RowPosition) -> ParquetIterator:
        return ParquetIterator(self.file_ranges, self.columns, start)

    def _find_ranges(self, files: list[FileLocation]) -> list[FileRange]:
        if len(files) > _MOST_FILES_TO_ASK:
            return [FileRange(location) for location in files]
        ranges = []
        for location in files:
            with _OpenFile(location, self.columns) as opened:
                groups = [FileRange(location, group, group + 1) for group in range(opened.num_groups)]
            ranges += groups or [FileRange(location)]  # there is at least one range
        return ranges


class ParquetIterator:
    """One iteration. A row group that cannot be read raises once and is then skipped."""

    def __init__(self, file_ranges: list[FileRange], columns: Sequence[str] | None, start: _RowPosition) -> None:
        self._ranges = file_ranges
        self._columns = columns
        self.position = start
        self._opened: _OpenFile | None = None
        self._table: Any = None
        self._samples: list[dict[str, Any]] = []
        self._first = 0

    def __iter__(self) -> ParquetIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        while self.position.file_range < len(self._ranges):
            at = self.position
            if self._table is None and not self._read_group():
                self._move(_RowPosition(at.file_range + 1))
            elif at.row >= self._table.num_rows:
                self._move(_RowPosition(at.file_range, at.group + 1))
            else:
                if not self._first <= at.row < self._first + len(self._samples):
                    self._convert_rows()
                self.position = _RowPosition(at.file_range, at.group, at.row + 1)
                return self._samples[at.row - self._first]
        raise StopIteration

    def describe(self) -> str:
        """Returns the file, the row group and the number of the last row in it, counted from 1, for errors."""
        at = self.position
        file_range = self._ranges[at.file_range]
        return f"{file_range.location.name} row {at.row} of row group {file_range.begin + at.group}"

    def _read_group(self) -> bool:
        """Reads the next row group; returns False if the range has no more."""
        at = self.position
        file_range = self._ranges[at.file_range]
        following = _RowPosition(at.file_range + 1)
        try:
            if self._opened is None:
                self._opened = _OpenFile(file_range.location, self._columns)
            following = _RowPosition(at.file_range, at.group + 1)
            number = file_range.begin + at.group
            if number >= (self._opened.num_groups if file_range.end is None else file_range.end):
                return False
            self._table = self._opened.read_group(number)
        except DataError:
            self._move(following)
            raise
        return True

    def _convert_rows(self) -> None:
        """Converts the next rows of the row group to samples."""
        at = self.position
        try:
            self._samples = to_samples(self._table.slice(at.row, _ROWS_AT_A_TIME))
        except Exception as error:  # values that Python cannot represent
            self._move(_RowPosition(at.file_range, at.group + 1))
            name = self._ranges[at.file_range].location.name
            raise DataError(f"{name} at row {at.row} of a row group: {type(error).__name__}: {error}") from error
        self._first = at.row

    def _move(self, position: _RowPosition) -> None:
        """Moves to another row group or range."""
        if position.file_range != self.position.file_range and self._opened is not None:
            self._opened.close()
            self._opened = None
        self.position, self._table, self._samples = position, None, []


class _OpenFile:
    """A Parquet file that is being read; its errors name it."""

    def __init__(self, location: FileLocation, columns: Sequence[str] | None) -> None:
        try:
            import pyarrow.parquet  # type: ignore[import-untyped]  # it has no types
        except ImportError as error:
            raise DataError(
                'The dataset "parquet" needs pyarrow, which is not installed. '
                "Install it: pip install 'trainwright[parquet]'."
            ) from error
        self._name = location.name
        self._columns = None if columns is None else list(columns)
        self._file: Any = None
        try:
            self._file = location.open()
            self._parquet = pyarrow.parquet.ParquetFile(self._file)
        except Exception as error:  # file systems and Arrow raise various types
            if self._file is not None:
                self._file.close()
            raise DataError(f"{self._name} is not a Parquet file: {type(error).__name__}: {error}") from error
        self.num_groups: int = self._parquet.metadata.num_row_groups
        known = self._parquet.schema_arrow.names
        missing = [name for name in self._columns or () if name not in known]
        if missing:
            self.close()
            raise DataError(f"{self._name}: no column {', '.join(missing)}. The columns are: {', '.join(known)}.")

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows_of_groups(self) -> list[int]:
        """Returns the number of rows of each row group."""
        return [self._parquet.metadata.row_group(number).num_rows for number in range(self.num_groups)]

    def read_group(self, number: int) -> Any:
        """Returns the table of a row group."""
        try:
            table = self._parquet.read_row_group(number, columns=self._columns, use_threads=False)
        except Exception as error:
            raise DataError(f"{self._name} row group {number}: {type(error).__name__}: {error}") from error
        return table if self._columns is None else table.select(self._columns)

    def close(self) -> None:
        """Closes the file."""
        self._parquet.close()
        self._file.close()


def to_samples(table: Any) -> list[dict[str, Any]]:
    """Returns the rows of an Arrow table as dicts; lists of numbers become tensors, lists with nulls stay lists.

    Tensors are int64 and float32, except that each list with a number that does not fit keeps uint64 or float64: the
    result for a row must not depend on other rows.
    """
    columns = {name: _to_values(table.column(name)) for name in table.column_names}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _to_values(column: Any) -> list[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        values: list[Any] = column.to_pylist()
        return values
    lists = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], kind)
    flat = lists.flatten()
    given = np.dtype(kind.value_type.to_pandas_dtype())
    if lists.null_count or flat.null_count:
        values = column.to_pylist()
        return [each if each is None or None in each else _to_tensor(np.array(each, given)) for each in values]
    numbers = flat.to_numpy(zero_copy_only=False)
    lengths: list[int] = pc.list_value_length(lists).to_pylist()
    whole = _to_tensor(numbers)
    if whole.dtype in (torch.int64, torch.float32):
        return list(torch.split(whole, lengths))
    return [_to_tensor(each) for each in np.split(numbers, np.cumsum(lengths[:-1], dtype=np.int64))]


def _to_tensor(numbers: npt.NDArray[Any]) -> torch.Tensor:
    """Returns a copy as int64 or float32, or in the numbers' own type if one of them does not fit."""
    # A copy, because Arrow's memory is read-only and a sample may be modified.
    if numbers.dtype.kind == "f":
        with np.errstate(over="ignore"):
            narrow = numbers.astype(np.float32)
        fits = numbers.dtype != np.float64 or bool((np.isinf(narrow) == np.isinf(numbers)).all())
    else:
        narrow = numbers.astype(np.int64)
        fits = numbers.dtype != np.uint64 or not numbers.size or int(numbers.max()) < 2**63
    return torch.from_numpy(narrow if fits else numbers.copy())
