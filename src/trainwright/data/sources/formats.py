"""Records of text files: their offsets in the bytes of a file, and their conversion to samples."""

from __future__ import annotations

import csv
import json
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trainwright.errors import ConfigError

Offsets = npt.NDArray[np.int64]
NextLine = Callable[[], bytes]
"""Returns the next line with its line break, or b"" at the end."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_SCAN_BYTES = 16 << 20
_NEWLINE = ord("\n")
_LINE_BREAK = b"\r\n"
# Once a quote is seen in a CSV file, this many rows are split one by one before looking for a plain stretch again.
_ROWS_AT_A_TIME = 4096


class Lines:
    """A record is a line that is not blank; `blanks` are the characters of blank lines, all white space if None."""

    can_be_split = True

    def __init__(self, blanks: bytes | None = None) -> None:
        self._blanks = blanks

    def take(self, next_line: NextLine) -> list[bytes]:
        """Returns the lines up to the end of the next record."""
        lines = []
        while line := next_line():
            lines.append(line)
            if line.strip(self._blanks):
                break
        return lines

    def record(self, lines: list[bytes]) -> bytes:
        """Returns the record in these lines, without blank lines before it."""
        return lines[-1] if lines and lines[-1].strip(self._blanks) else b""

    def index(self, data: mmap.mmap, begin: int, end: int | None = None) -> Offsets:
        """Returns the offset of each record of data[begin:end]."""
        starts = _line_starts(data, begin, end)
        if not len(starts):
            return starts
        # Only lines that begin with white space may be blank.
        is_record = np.frombuffer(data, np.uint8)[starts] > ord(" ")
        for number in np.flatnonzero(~is_record).tolist():
            start = int(starts[number])
            is_record[number] = bool(data[start : _end_of_line(data, start)].strip(self._blanks))
        return starts[is_record]

    def find_start(self, file: IO[bytes], border: int) -> int:
        """Returns the first offset from `border` on at which a record may begin."""
        if border == 0:
            return 0
        file.seek(border - 1)
        return border - 1 + len(file.readline())


class Paragraphs:
    """A record is a run of lines between blank ones."""

    can_be_split = True

    def take(self, next_line: NextLine) -> list[bytes]:
        """Returns the lines up to the blank one after the next record."""
        lines = []
        has_begun = False
        while line := next_line():
            lines.append(line)
            is_blank = not line.strip()
            if is_blank and has_begun:
                break
            has_begun = has_begun or not is_blank
        return lines

    def record(self, lines: list[bytes]) -> bytes:
        """Returns the lines that are not blank."""
        return b"".join(line for line in lines if line.strip())

    def index(self, data: mmap.mmap, begin: int, end: int | None = None) -> Offsets:
        """Returns the offset of each record of data[begin:end]: lines after a blank one."""
        inked = Lines().index(data, begin, end)
        numbers = np.searchsorted(_line_starts(data, begin, end), inked)
        return inked[np.diff(numbers, prepend=-2) > 1]

    def find_start(self, file: IO[bytes], border: int) -> int:
        """Returns the first offset after a blank line from `border` on."""
        offset = Lines().find_start(file, border)
        file.seek(offset)
        while border and (line := file.readline()):
            offset += len(line)
            if not line.strip():
                break
        return offset


class CsvRows:
    """A record is a row of CSV: a line, or several if a quoted field contains line breaks; empty lines are skipped."""

    can_be_split = False  # only reading from the start shows whether a line break is quoted

    def __init__(self, delimiter: str) -> None:
        self._delimiter = delimiter
        self._plain = Lines(_LINE_BREAK)

    def take(self, next_line: NextLine) -> list[bytes]:
        """Returns the lines up to the end of the next row."""
        lines = self._plain.take(next_line)
        if lines and b'"' in lines[-1]:
            # Errors in the row are reported when it is decoded.
            with suppress(csv.Error):
                next(read_csv(_decoded(next_line, lines), self._delimiter), None)
        return lines

    def record(self, lines: list[bytes]) -> bytes:
        """Returns the row in these lines, without empty lines before it."""
        first = next((number for number, line in enumerate(lines) if line.strip(_LINE_BREAK)), len(lines))
        return b"".join(lines[first:])

    def index(self, data: mmap.mmap, begin: int, end: int | None = None) -> Offsets:
        """Returns the offset of each row and of the header, fast for data without quotes and otherwise row by row."""
        end = len(data) if end is None else end
        chunks: list[Offsets] = [np.empty(0, np.int64)]
        while begin < end:
            quote = data.find(b'"', begin, end)
            plain_end = end if quote < 0 else data.rfind(b"\n", begin, quote) + 1
            if plain_end > begin:
                starts, begin = self._plain.index(data, begin, plain_end), plain_end
            else:
                starts, begin = self._index_rows(data, begin)
            chunks.append(starts)
        return np.concatenate(chunks)

    def find_start(self, file: IO[bytes], border: int) -> int:
        """Not called, because `can_be_split` is False."""
        raise NotImplementedError("A CSV file is not split.")

    def _index_rows(self, data: mmap.mmap, begin: int) -> tuple[Offsets, int]:
        """Returns the offsets of the next rows, and the end of the last one."""
        next_line, offset, starts = lines_from(data, begin), begin, []

        def lines() -> Iterator[str]:
            nonlocal offset
            while line := next_line():
                offset += len(line)
                yield line.decode("latin-1")

        reader = read_csv(lines(), self._delimiter)
        for _ in range(_ROWS_AT_A_TIME):
            start = offset
            try:
                row = next(reader, None)
            except csv.Error:
                row = ["reported when the row is decoded"]
            if row is None:
                break
            if row:  # an empty line is read as a row without fields
                starts.append(start)
        return np.array(starts, np.int64), offset


Records = Lines | Paragraphs | CsvRows


def read_csv(lines: Iterator[str], delimiter: str) -> Iterator[list[str]]:
    """Returns Python's reader over the lines, without its limit on the length of a field."""
    # The limit is global to the process.
    csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
    return csv.reader(lines, delimiter=delimiter)


def lines_from(data: mmap.mmap | bytes, offset: int) -> NextLine:
    """Returns a function that returns the lines of `data` from `offset` on."""

    def next_line() -> bytes:
        nonlocal offset
        start, offset = offset, _end_of_line(data, offset)
        return bytes(data[start:offset])

    return next_line


def _decoded(next_line: NextLine, lines: list[bytes]) -> Iterator[str]:
    """Yields the lines of a row and appends them to `lines`; any ASCII-compatible encoding finds the end."""
    yield lines[-1].decode("latin-1")
    while line := next_line():
        lines.append(line)
        yield line.decode("latin-1")


def _end_of_line(data: mmap.mmap | bytes, start: int) -> int:
    found = data.find(b"\n", start)
    return len(data) if found < 0 else found + 1


def _line_starts(data: mmap.mmap, begin: int, end: int | None = None) -> Offsets:
    """Returns the offset of each line of data[begin:end], at about a gigabyte per second."""
    end = len(data) if end is None else end
    if begin >= end:
        return np.empty(0, np.int64)
    whole = np.frombuffer(data, np.uint8)
    chunks = [np.array([begin], np.int64)]
    for start in range(begin, end, _SCAN_BYTES):
        stop = min(start + _SCAN_BYTES, end)
        chunks.append(np.flatnonzero(whole[start:stop] == _NEWLINE) + (start + 1))
    starts = np.concatenate(chunks)
    return starts[:-1] if starts[-1] == end else starts


UNITS = ("line", "paragraph", "file")
VALUE_TYPES: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "text": str}


class RowError(Exception):
    """The problem of one row."""


class TextFormat:
    """A row is a line, a paragraph or a file: {"text": …}, with \\n for \\r\\n and without the last line break."""

    suffixes: tuple[str, ...] = (".txt", ".text")
    has_header = False

    def __init__(self, unit: str) -> None:
        if unit not in UNITS:
            raise ConfigError(f'unit is "{unit}". Use one of: {", ".join(UNITS)}.', where="text")
        self.unit = unit
        kinds: dict[str, Records | None] = {"line": Lines(), "paragraph": Paragraphs(), "file": None}
        self.records = kinds[unit]

    def decode(self, record: bytes, header: bytes) -> dict[str, Any]:
        """Returns the text."""
        text = _decode_text(record).replace("\r\n", "\n")
        return {"text": text if self.unit == "file" else text.removesuffix("\n")}


class JsonLinesFormat:
    """A row is a JSON object on one line."""

    suffixes: tuple[str, ...] = (".jsonl", ".ndjson", ".jsonlines")
    has_header = False

    def __init__(self, columns: Sequence[str] | None) -> None:
        self.records: Records | None = Lines()
        self.columns = check_columns(columns, "json_lines")

    def decode(self, record: bytes, header: bytes) -> dict[str, Any]:
        """Returns the object."""
        try:
            row = json.loads(_decode_text(record))
        except (ValueError, RecursionError) as error:
            raise RowError(f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise RowError(f"not a JSON object, but {type(row).__name__}: {_shorten(record)}")
        return row if self.columns is None else pick_columns(row, self.columns)


class CsvFormat:
    """A row is a row of CSV; the first one has the names."""

    has_header = True

    def __init__(self, delimiter: str, columns: Sequence[str] | None, types: Mapping[str, str | type] | None) -> None:
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
            raise ConfigError(f'delimiter is {delimiter!r}. Use one ASCII character such as "," or "\\t".', where="csv")
        self.suffixes: tuple[str, ...] = (".csv", ".tsv") if delimiter == "\t" else (".csv",)
        self.records: Records | None = CsvRows(delimiter)
        self.columns = check_columns(columns, "csv")
        self._delimiter = delimiter
        self._types = {name: _type_name(name, kind) for name, kind in (types or {}).items()}
        self._names: tuple[bytes, list[str]] = (b"", [])

    def decode(self, record: bytes, header: bytes) -> dict[str, Any]:
        """Returns the row, with the requested types."""
        if self._names[0] != header:
            self._names = (header, self._read_names(header))
        names = self._names[1]
        values = self._read_fields(record)
        if len(values) != len(names):
            raise RowError(
                f"{len(values)} fields where the header names {len(names)} ({', '.join(names)}): {_shorten(record)}"
            )
        row: dict[str, Any] = dict(zip(names, values, strict=True))
        if self.columns is not None:
            row = pick_columns(row, self.columns)
        for name, kind in self._types.items():
            if name in row:
                row[name] = _convert(row[name], name, kind)
        return row

    def _read_names(self, header: bytes) -> list[str]:
        names = self._read_fields(header)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise RowError(f"the header names {', '.join(map(repr, twice))} more than once. Give each column its name.")
        unknown = sorted(set(self._types) - set(names))
        if unknown:
            raise RowError(f"types: no column {', '.join(map(repr, unknown))}. The header names: {', '.join(names)}.")
        return names

    def _read_fields(self, record: bytes) -> list[str]:
        # A reader that needs more than the record is still inside quotes; without this check, the remaining file would
        # become one value.
        lines = iter([_decode_text(record), ""])
        try:
            fields = next(read_csv(lines, self._delimiter), [])
        except csv.Error as error:
            raise RowError(f"not CSV: {error}") from error
        if next(lines, None) is None:
            raise RowError(f"a quote is not closed up to the end of the file: {_shorten(record)}")
        return fields


FileFormat = TextFormat | JsonLinesFormat | CsvFormat
"""Defines how the rows of a file type are found and decoded.

`records` splits a file into rows, or is None if the whole file is a row; `suffixes` are those of the files in a folder;
`has_header` is True if the first record is a header; `decode(record, header)` returns a sample or raises RowError.
"""


def check_columns(columns: Sequence[str] | None, where: str) -> tuple[str, ...] | None:
    """Returns the columns; rejects a single text, which would be read letter by letter."""
    if columns is None:
        return None
    if isinstance(columns, str) or not columns:
        raise ConfigError(f"columns is {columns!r}. Use a list of names, or remove it for all.", where=where)
    return tuple(columns)


def pick_columns(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Returns these columns of a row, in this order."""
    missing = [name for name in columns if name not in row]
    if missing:
        raise RowError(f"no column {', '.join(map(repr, missing))}. The columns are: {', '.join(map(str, row))}.")
    return {name: row[name] for name in columns}


def _decode_text(record: bytes) -> str:
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8: {error}") from error


def _type_name(name: str, kind: str | type) -> str:
    found = "text" if kind in (str, "str") else kind.__name__ if isinstance(kind, type) else kind
    if found not in VALUE_TYPES:
        raise ConfigError(f"types.{name} is {kind!r}. Use one of: {', '.join(VALUE_TYPES)}.", where="csv")
    return found


def _convert(text: str, name: str, kind: str) -> Any:
    try:
        return VALUE_TYPES[kind](text)
    except ValueError as error:
        raise RowError(f"column {name!r} is {text!r}, not {kind}: {error}") from error


def _shorten(record: bytes) -> str:
    return repr(record[:80].decode("utf-8", errors="replace")) + ("…" if len(record) > 80 else "")
