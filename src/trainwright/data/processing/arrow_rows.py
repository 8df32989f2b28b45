"""Samples in a folder of Arrow files: written in pieces of bounded memory, read by index from a memory map.

    rows-00000.arrow …  record batches; a new file begins where the columns or their types change
    schema.arrow        the types of all files together
    index.json          the files, and how many rows each of their batches holds
    lengths.npy         the tokens of every sample, where there are input_ids

How a value looks when it comes back is in arrow_values.py; what no column can say of a sample, in forms.py.
"""

from __future__ import annotations

import json
import os
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from trainwright.data.indices import positive_indices
from trainwright.data.processing.arrow_values import Reader, import_arrow, make_reader, size_of, to_storable
from trainwright.data.processing.build_once import hold_for_reading
from trainwright.data.processing.forms import Empty, forms_of, restore
from trainwright.errors import DataError

# A batch is what is in memory while writing; both bounds, for rows may be pictures or single numbers.
_BATCH_ROWS, _BATCH_BYTES = 10_000, 16 * 2**20
_TOKENS = "input_ids"
_FORM = "__form__"  # the column of the samples' forms, in files that need one
_INDEX_FILE, _SCHEMA_FILE, _LENGTHS_FILE = "index.json", "schema.arrow", "lengths.npy"
_OPEN_BATCHES = 4096  # readers kept at hand: about 2 kB each and column


class StoredSample(NamedTuple):
    """A sample as Arrow stores it."""

    values: dict[str, Any]
    empties: list[Empty]
    """The arrays in it without elements."""

    @classmethod
    def of(cls, sample: Mapping[str, Any]) -> StoredSample:
        """Converts a sample; what Arrow has no type for raises TypeError, naming the key."""
        empties: list[Empty] = []
        values = {str(key): to_storable(value, str(key), empties, place=(str(key),)) for key, value in sample.items()}
        if _FORM in values:
            raise TypeError(f'"{_FORM}" is a key of the cache itself; call it otherwise')
        return cls(values, empties)


class ArrowRowWriter:
    """Writes samples into an empty folder; `finish` makes it one that ArrowRows reads."""

    def __init__(self, folder: Path) -> None:
        self._arrow = import_arrow()
        self._folder = folder
        self._samples: list[dict[str, Any]] = []
        self._empties: list[list[Empty]] = []
        self._has_forms = False
        self._num_bytes = 0
        self._files: list[dict[str, Any]] = []
        self._schema: Any = None
        self._file_schema: Any = None
        self._writer: Any = None
        self._lengths = array("q")
        self.num_rows = 0

    def add(self, sample: StoredSample) -> None:
        """Adds a sample."""
        stored = sample.values
        self._samples.append(stored)
        self._empties.append(sample.empties)
        self._num_bytes += sum(map(size_of, stored.values()))
        tokens = stored.get(_TOKENS)
        self._lengths.append(0 if tokens is None or isinstance(tokens, (int, float)) else len(tokens))
        self.num_rows += 1
        if len(self._samples) >= _BATCH_ROWS or self._num_bytes >= _BATCH_BYTES:
            self._write_batch()

    def finish(self, **facts: Any) -> None:
        """Writes what is left and the index, with `facts` for those who look into the folder."""
        self._write_batch()
        self.close()
        index = {**facts, "num_rows": self.num_rows, "files": self._files}
        (self._folder / _INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
        (self._folder / _SCHEMA_FILE).write_bytes(self._schema.serialize().to_pybytes())
        if _TOKENS in self._schema.names:
            np.save(self._folder / _LENGTHS_FILE, np.frombuffer(self._lengths, dtype=np.int64))

    def close(self) -> None:
        """Closes the file in hand."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_batch(self) -> None:
        if not self._samples:
            return
        names = list(dict.fromkeys(name for sample in self._samples for name in sample))
        columns = [self._column(name) for name in names]
        schema = self._arrow.RecordBatch.from_arrays(columns, names=names).schema
        forms = forms_of(self._samples, self._empties)
        self._has_forms = self._has_forms or any(forms)
        if self._has_forms:  # from here on in every batch: else a new file would begin with every other one
            columns, names = [*columns, self._arrow.array(forms, self._arrow.string())], [*names, _FORM]
        batch = self._arrow.RecordBatch.from_arrays(columns, names=names)
        try:
            schemas = [self._schema, schema] if self._schema is not None else [schema]
            self._schema = self._arrow.unify_schemas(schemas, promote_options="permissive")
        except self._arrow.ArrowException as error:
            raise DataError(
                f"Samples {self.num_rows - len(self._samples)} to {self.num_rows - 1} have other types than those "
                f"before: {error}. Let the function give each key values of one type."
            ) from error
        if self._writer is None or batch.schema != self._file_schema:
            self.close()
            name = f"rows-{len(self._files):05}.arrow"
            self._writer = self._arrow.ipc.new_file(str(self._folder / name), batch.schema)
            self._file_schema = batch.schema
            self._files.append({"name": name, "batch_rows": []})
        self._writer.write_batch(batch)
        self._files[-1]["batch_rows"].append(batch.num_rows)
        self._samples, self._empties, self._num_bytes = [], [], 0

    def _column(self, name: str) -> Any:
        try:
            return self._arrow.array([sample.get(name) for sample in self._samples])
        except (self._arrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f'The values of "{name}" in samples {self.num_rows - len(self._samples)} to {self.num_rows - 1} '
                f"cannot be one column: {error}. Let the function give this key values of one type."
            ) from error


class ArrowRows(Dataset[dict[str, Any]]):
    """The samples in a folder that ArrowRowWriter has made, by index.

    A list of numbers is a tensor (int64, float32, bool, uint8), also a nested one unless it is ragged: then it is
    a list of tensors. Numbers, texts, bytes and dicts are what they were, each with the keys that it had.
    Opened at first use and, in a spawned worker, by the worker itself.
    """

    draws_nothing = True  # the loader need not seed each sample

    def __init__(self, folder: Path, *, fingerprint: str = "") -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self._opened: _OpenFiles | None = None

    @property
    def columns(self) -> list[str]:
        """The keys of the samples."""
        names: list[str] = self.open().schema.names
        return names

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The tokens (`input_ids`) of every sample, mapped from the disk."""
        path = self.folder / _LENGTHS_FILE
        if _TOKENS not in self.columns:
            # AttributeError, so that hasattr() and getattr() with a default tell that there is none.
            raise AttributeError(f"These samples have no lengths: there is no {_TOKENS} among {self.columns}.")
        lengths: npt.NDArray[np.int64] = np.load(path, mmap_mode="r")
        return lengths

    def __len__(self) -> int:
        return int(self.open().starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the samples of a batch, finding their places in one search."""
        opened = self.open()
        places = positive_indices(indices, size=int(opened.starts[-1]), of="samples")
        batches = np.searchsorted(opened.starts, places, side="right") - 1
        rows = places - opened.starts[batches]
        return [opened.read(batch, row) for batch, row in zip(batches.tolist(), rows.tolist(), strict=True)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self)):
            yield self[index]

    def open(self) -> _OpenFiles:
        """Opens the files, once; until then the folder may be removed by a process that builds it anew."""
        if self._opened is None:
            try:
                self._opened = _OpenFiles(self.folder)
            except FileNotFoundError as error:
                raise DataError(
                    f"The cached samples in {self.folder} are gone: the folder was removed, or built anew by another "
                    "process before this one opened it. Make the dataset again."
                ) from error
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


class _Readers(NamedTuple):
    """How the rows of a batch are read."""

    of_columns: list[tuple[str, Reader]]
    """Each column's name, and the function from a row to its value."""
    forms: Any
    """The column of forms, or None."""


class _OpenFiles:
    """The memory maps of one folder, kept from being removed while this object lives."""

    def __init__(self, folder: Path) -> None:
        self._arrow = import_arrow()
        descriptor = hold_for_reading(folder)
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)
        index = json.loads((folder / _INDEX_FILE).read_text(encoding="utf-8"))
        self.schema = self._arrow.ipc.read_schema(self._arrow.py_buffer((folder / _SCHEMA_FILE).read_bytes()))
        counts = [rows for file in index["files"] for rows in file["batch_rows"]]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._places = [(number, batch) for number, file in enumerate(index["files"]) for batch in _of(file)]
        self._paths = [folder / file["name"] for file in index["files"]]
        self._files: dict[int, Any] = {}
        self._readers: dict[int, _Readers] = {}

    def read(self, batch: int, row: int) -> dict[str, Any]:
        """Returns the sample in a row of a batch."""
        readers, forms = self._find_readers(batch)
        sample = {name: read(row) for name, read in readers}
        form = None if forms is None else forms[row].as_py()
        if form is not None:
            restore(sample, form)
        return sample

    def _find_readers(self, batch: int) -> _Readers:
        found = self._readers.get(batch)
        if found is None:
            if len(self._readers) >= _OPEN_BATCHES:
                self._readers.clear()
            found = self._readers[batch] = self._make_readers(batch)
        return found

    def _make_readers(self, batch: int) -> _Readers:
        number, place = self._places[batch]
        if number not in self._files:
            self._files[number] = self._arrow.ipc.open_file(self._arrow.memory_map(str(self._paths[number])))
        columns = self._files[number].get_batch(place)
        names = columns.schema.names
        readers = [
            (field.name, make_reader(columns.column(field.name), field.type))
            for field in self.schema
            if field.name in names
        ]
        return _Readers(readers, columns.column(_FORM) if _FORM in names else None)


def _of(file: Mapping[str, Any]) -> range:
    return range(len(file["batch_rows"]))
