"""What a record of a text file means: from its bytes to a sample, or a RowError that says what is wrong with it.

Where records begin and end is records.py's; the file and the line are added to the error by files.py, which knows them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trainwright.data.sources.records import CsvRows, Lines, Paragraphs, Records, read_csv
from trainwright.errors import ConfigError

UNITS = ("line", "paragraph", "file")
VALUE_TYPES: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "text": str}


class RowError(Exception):
    """What is wrong with one row."""


class Format(Protocol):
    """How the rows of one kind of file are found and read."""

    records: Records | None
    """How the file is cut into rows; None where the whole file is one."""
    suffixes: tuple[str, ...]
    """How the files of this kind in a folder end, compressed or not."""
    has_header: bool
    """Is the first record of a file no row, but says how to read the others?"""

    def decode(self, record: bytes, header: bytes) -> dict[str, Any]:
        """Returns the sample in a record, or raises RowError. `header` is b"" for a kind without one."""


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
    """A row is an object of JSON on a line of its own."""

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
            raise RowError(f"not an object of JSON, but {type(row).__name__}: {_shorten(record)}")
        return row if self.columns is None else pick_columns(row, self.columns)


class CsvFormat:
    """A row is a row of CSV; the first one gives the names."""

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
        """Returns the row, with the types asked for."""
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
        # A reader that asks for more than the record is still inside quotes: without this, the rest of a file
        # would be taken for one value.
        lines = iter([_decode_text(record), ""])
        try:
            fields = next(read_csv(lines, self._delimiter), [])
        except csv.Error as error:
            raise RowError(f"not CSV: {error}") from error
        if next(lines, None) is None:
            raise RowError(f"a quote is not closed up to the end of the file: {_shorten(record)}")
        return fields


def check_columns(columns: Sequence[str] | None, where: str) -> tuple[str, ...] | None:
    """Returns the columns as given; a single text would be taken for its letters."""
    if columns is None:
        return None
    if isinstance(columns, str) or not columns:
        raise ConfigError(f"columns is {columns!r}. Use a list of names, or leave it out for all.", where=where)
    return tuple(columns)


def pick_columns(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Returns these columns of a row, in this order."""
    missing = [name for name in columns if name not in row]
    if missing:
        raise RowError(f"no column {', '.join(map(repr, missing))}. There are: {', '.join(map(str, row))}.")
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
