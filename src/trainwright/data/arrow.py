"""Samples in a folder of Arrow files: written in bounded memory, read by index from a memory map.

Includes the conversion of values between Python and Arrow, and the forms, which record what columns cannot represent:
missing keys and empty arrays.
"""

from __future__ import annotations

import json
import os
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from trainwright.data.cache import hold_for_reading
from trainwright.data.fetch import positive_indices
from trainwright.errors import DataError

FieldPath = tuple[str | int, ...]
"""The keys and indices of a value in a sample."""


class Empty(NamedTuple):
    """An array without elements."""

    field_path: FieldPath
    dtype: str
    shape: tuple[int, ...]


def forms_of(samples: Sequence[Mapping[str, Any]], empties: Sequence[Sequence[Empty]]) -> list[str | None]:
    """Returns the form of each sample of a batch; None if the columns are sufficient."""
    dicts = [list(_dicts_in(sample)) for sample in samples]
    keys: dict[FieldPath, dict[str, None]] = {}
    for found in dicts:
        for field_path, value in found:
            keys.setdefault(_column_of(field_path), {}).update(dict.fromkeys(value))
    forms: list[str | None] = []
    for found, empty in zip(dicts, empties, strict=True):
        lacking = [
            [*field_path, key]
            for field_path, value in found
            for key in keys[_column_of(field_path)]
            if key not in value
        ]
        forms.append(json.dumps({"lacking": lacking, "empty": empty}) if lacking or empty else None)
    return forms


def restore(sample: dict[str, Any], form: str) -> None:
    """Restores a sample that was read from the columns."""
    facts = json.loads(form)
    for field_path, dtype, shape in facts["empty"]:
        _parent_of(sample, field_path)[field_path[-1]] = torch.empty(shape, dtype=getattr(torch, dtype))
    for field_path in facts["lacking"]:
        # If the whole batch lacks the key, there is no column.
        _parent_of(sample, field_path).pop(field_path[-1], None)


def _parent_of(sample: Any, field_path: Sequence[str | int]) -> Any:
    """Returns the dict or list that contains a value; a tensor on the path was a list of different empty arrays."""
    for step in field_path[:-1]:
        if isinstance(sample[step], torch.Tensor):
            sample[step] = list(sample[step].unbind())
        sample = sample[step]
    return sample


def _dicts_in(value: Any, field_path: FieldPath = ()) -> Iterator[tuple[FieldPath, dict[str, Any]]]:
    if isinstance(value, dict):
        yield field_path, value
        for key, item in value.items():
            if isinstance(item, (dict, list)):
                yield from _dicts_in(item, (*field_path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, (dict, list)):
                yield from _dicts_in(item, (*field_path, index))


def _column_of(field_path: FieldPath) -> FieldPath:
    """Returns the path without indices: all elements of a list are in one column."""
    return tuple(0 if isinstance(step, int) else step for step in field_path)


Reader = Callable[[int], Any]
"""Maps a row of a record batch to its value."""

_RETURNED = {"b": "bool", "i": "int64", "u": "int64", "f": "float32"}
"""The dtype of arrays that are read, by numpy's kind; uint8 stays uint8."""

_PLAIN = (str, bytes, bool, int, float, type(None))


def import_arrow() -> Any:
    """Returns pyarrow; if it is missing, the error says how to install it."""
    try:
        import pyarrow  # type: ignore[import-untyped]  # it comes without types
        import pyarrow.ipc  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(
            "Processed samples are cached in Arrow files, which need the package pyarrow. "
            "Install it: pip install 'trainwright[datasets]'."
        ) from error
    return pyarrow


def to_storable(value: Any, name: str, empties: list[Empty] | None = None, *, field_path: FieldPath = ()) -> Any:
    """Returns a value that Arrow can store: tensors and lists of numbers as arrays, others as plain Python.

    `name` and `field_path` are its path in the sample, as text and as keys. Empty arrays are added to `empties`.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        value = _to_numpy(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            return to_storable(value.tolist(), name, empties, field_path=field_path)
        if value.ndim == 0:
            return value.item()
        if not value.size and empties is not None:
            dtype = "uint8" if value.dtype == np.uint8 else _RETURNED[value.dtype.kind]
            empties.append(Empty(field_path, dtype, value.shape))
        return _nested_rows(_narrow(value, name))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {
            str(key): to_storable(item, f"{name}.{key}", empties, field_path=(*field_path, str(key)))
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return _list_to_storable(value, name, empties, field_path=field_path)
    raise TypeError(
        f"{name} is a {type(value).__name__}, which cannot be cached. "
        "Use numbers, texts, bytes, tensors, arrays, and lists and dicts of them"
    )


def _list_to_storable(value: Any, name: str, empties: list[Empty] | None, *, field_path: FieldPath) -> Any:
    kinds = set(map(type, value))
    if kinds == {int}:
        try:
            return _narrow(np.array(value, dtype=np.int64), name)
        except OverflowError as error:
            raise TypeError(f"{name}: an integer in {str(value)[:60]} does not fit into 64 bits") from error
    if kinds and kinds <= {int, float, np.float64, np.float32}:
        return _narrow(np.array(value, dtype=np.float64), name)
    if kinds and kinds <= {np.ndarray, torch.Tensor} and len({(item.dtype, item.shape) for item in value}) == 1:
        # Equal arrays are stored and returned as one array.
        return to_storable(np.stack([_to_numpy(item) for item in value]), name, empties, field_path=field_path)
    return [
        to_storable(item, f"{name}[{index}]", empties, field_path=(*field_path, index))
        for index, item in enumerate(value)
    ]


def _to_numpy(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    array: npt.NDArray[Any] = value
    return array


def _nested_rows(value: npt.NDArray[Any]) -> Any:
    if value.size == 0 and value.ndim == 1:
        return []  # Arrow would use the dtype of `np.array([])`, float64, for the column
    if value.ndim == 1:
        return np.ascontiguousarray(value)
    return [_nested_rows(row) for row in value]


def _narrow(value: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Returns numbers in the smallest width that preserves them; rejects numbers that the returned dtype cannot hold.

    int64 is stored as int32 if the numbers fit, as tokens do, and is int64 again when read.
    """
    if value.dtype.kind == "f" and value.dtype.itemsize > 4:
        with np.errstate(over="ignore"):
            narrow: npt.NDArray[Any] = value.astype(np.float32)
        if (np.isinf(narrow) != np.isinf(value)).any():
            raise TypeError(
                f"{name} contains {np.abs(value[np.isfinite(value)]).max()}, which does not fit into float32"
            )
        return narrow
    if value.dtype == np.uint64 and value.size:
        if int(value.max()) >= 2**63:
            raise TypeError(f"{name} contains {value.max()}, which does not fit into int64")
        value = value.astype(np.int64)
    limits = np.iinfo(np.int32)
    if value.dtype != np.int64 or not value.size or value.min() < limits.min or value.max() > limits.max:
        return value
    return value.astype(np.int32)


def size_of(value: Any) -> int:
    """Returns the approximate number of bytes of a storable value."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        return 64 + sum(map(size_of, value.values()))
    if isinstance(value, list):
        return 64 + sum(map(size_of, value))
    return 8


def make_reader(column: Any, whole_type: Any) -> Reader:
    """Returns the function from a row to its value; `whole_type` is the column's type over all files."""
    if import_arrow().types.is_list(whole_type):
        dtype = _numpy_dtype(whole_type)
        return lambda row: _convert_list(column[row], whole_type, dtype)
    return lambda row: _convert(column[row], whole_type)


def _convert(scalar: Any, whole_type: Any) -> Any:
    """Returns an Arrow value as a Python value; lists of numbers become tensors."""
    types = import_arrow().types
    if not scalar.is_valid:
        return None
    if types.is_struct(scalar.type):
        names = [field.name for field in scalar.type]  # the columns of this file; other files may have more
        return {name: _convert(scalar[name], whole_type.field(name).type) for name in names}
    if types.is_list(whole_type):
        return _convert_list(scalar, whole_type, _numpy_dtype(whole_type))
    # A column that has integers in one file and floats in another is float in both.
    return float(scalar.as_py()) if types.is_floating(whole_type) else scalar.as_py()


def _convert_list(scalar: Any, whole_type: Any, dtype: Any) -> Any:
    if not scalar.is_valid:
        return None
    if dtype is None:
        return [_convert(each, whole_type.value_type) for each in scalar.values]
    return _convert_numbers(scalar.values, dtype)


def _convert_numbers(values: Any, dtype: Any) -> Any:
    """Returns nested lists as a tensor; ragged lists as a list of tensors; lists with nulls unchanged."""
    types = import_arrow().types
    shape, inner = [len(values)], values
    while types.is_list(inner.type):
        widths = np.diff(inner.offsets.to_numpy())
        if inner.null_count or (widths != widths[:1]).any():
            break
        shape.append(int(widths[0]) if widths.size else 0)
        inner = inner.flatten()
    if inner.null_count == 0 and not types.is_list(inner.type):
        # astype copies, so the tensor may be modified.
        return torch.from_numpy(inner.to_numpy(zero_copy_only=False).astype(dtype)).view(shape)
    if not types.is_list(values.type):
        return values.to_pylist()
    return [_convert_numbers(each.values, dtype) if each.is_valid else None for each in values]


def _numpy_dtype(arrow_type: Any) -> Any:
    """Returns the dtype of the tensors for lists of this type, nested to any depth; None for texts and others."""
    types = import_arrow().types
    while types.is_list(arrow_type):
        arrow_type = arrow_type.value_type
    if types.is_uint8(arrow_type):
        return np.uint8
    if types.is_integer(arrow_type) or types.is_null(arrow_type):
        return np.int64  # null: every list is empty
    if types.is_floating(arrow_type):
        return np.float32
    return np.bool_ if types.is_boolean(arrow_type) else None


# The limits of a batch, which is in memory while writing; rows may be images or single numbers.
_BATCH_ROWS, _BATCH_BYTES = 10_000, 16 * 2**20
_TOKENS = "input_ids"
_FORM = "__form__"  # the column of the forms, in files that need one
_INDEX_FILE, _SCHEMA_FILE, _LENGTHS_FILE = "index.json", "schema.arrow", "lengths.npy"
_OPEN_BATCHES = 4096  # open batches, of about 2 kB per column


class StoredSample(NamedTuple):
    """A sample as Arrow stores it."""

    values: dict[str, Any]
    empties: list[Empty]
    """The arrays in it without elements."""

    @classmethod
    def of(cls, sample: Mapping[str, Any]) -> StoredSample:
        """Converts a sample; raises TypeError, with the key, for a value without an Arrow type."""
        empties: list[Empty] = []
        values = {
            str(key): to_storable(value, str(key), empties, field_path=(str(key),)) for key, value in sample.items()
        }
        if _FORM in values:
            raise TypeError(f'"{_FORM}" is a reserved key; use another name')
        return cls(values, empties)


class ArrowRowWriter:
    """Writes samples into an empty folder, which ArrowRows reads after `finish`."""

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
        """Writes the remaining samples and the index, which also contains `facts`."""
        self._write_batch()
        self.close()
        index = {**facts, "num_rows": self.num_rows, "files": self._files}
        (self._folder / _INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
        (self._folder / _SCHEMA_FILE).write_bytes(self._schema.serialize().to_pybytes())
        if _TOKENS in self._schema.names:
            np.save(self._folder / _LENGTHS_FILE, np.frombuffer(self._lengths, dtype=np.int64))

    def close(self) -> None:
        """Closes the current file."""
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
        if self._has_forms:  # from here on in every batch, else the schema and so the file would change often
            columns, names = [*columns, self._arrow.array(forms, self._arrow.string())], [*names, _FORM]
        batch = self._arrow.RecordBatch.from_arrays(columns, names=names)
        try:
            schemas = [self._schema, schema] if self._schema is not None else [schema]
            self._schema = self._arrow.unify_schemas(schemas, promote_options="permissive")
        except self._arrow.ArrowException as error:
            raise DataError(
                f"Samples {self.num_rows - len(self._samples)} to {self.num_rows - 1} have other types than the "
                f"earlier ones: {error}. Return values of one type for each key."
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
                f"cannot be one column: {error}. Return values of one type for this key."
            ) from error


class ArrowRows(Dataset[dict[str, Any]]):
    """The samples in a folder that ArrowRowWriter has written, by index.

    A list of numbers, also a nested one, is a tensor (int64, float32, bool, uint8); a ragged list is a list of tensors.
    Numbers, texts, bytes and dicts are unchanged. The files are opened at first use, also in a spawned worker.
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
            # AttributeError, so that hasattr() returns False.
            raise AttributeError(f"The samples have no lengths: no {_TOKENS} in {self.columns}.")
        lengths: npt.NDArray[np.int64] = np.load(path, mmap_mode="r")
        return lengths

    def __len__(self) -> int:
        return int(self.open().starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the samples of a batch."""
        opened = self.open()
        found = positive_indices(indices, size=int(opened.starts[-1]), of="samples")
        batches = np.searchsorted(opened.starts, found, side="right") - 1
        rows = found - opened.starts[batches]
        return [opened.read(batch, row) for batch, row in zip(batches.tolist(), rows.tolist(), strict=True)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self)):
            yield self[index]

    def open(self) -> _OpenFiles:
        """Opens the files once; before that, a process that rebuilds the folder may remove it."""
        if self._opened is None:
            try:
                self._opened = _OpenFiles(self.folder)
            except FileNotFoundError as error:
                raise DataError(
                    f"The cached samples in {self.folder} do not exist: the folder was removed, or rebuilt by another "
                    "process before this one opened it. Create the dataset again."
                ) from error
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


class _OpenFiles:
    """The memory maps of one folder, which is not removed while this object exists."""

    def __init__(self, folder: Path) -> None:
        self._arrow = import_arrow()
        descriptor = hold_for_reading(folder)
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)
        index = json.loads((folder / _INDEX_FILE).read_text(encoding="utf-8"))
        self.schema = self._arrow.ipc.read_schema(self._arrow.py_buffer((folder / _SCHEMA_FILE).read_bytes()))
        counts = [rows for file in index["files"] for rows in file["batch_rows"]]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._batches = [
            (folder / file["name"], batch) for file in index["files"] for batch in range(len(file["batch_rows"]))
        ]
        self._files: dict[Path, Any] = {}
        self._readers: dict[int, tuple[list[tuple[str, Reader]], Any]] = {}

    def read(self, batch: int, row: int) -> dict[str, Any]:
        """Returns the sample in a row of a batch."""
        if batch not in self._readers:
            if len(self._readers) >= _OPEN_BATCHES:
                self._readers.clear()
            self._readers[batch] = self._make_readers(batch)
        readers, forms = self._readers[batch]
        sample = {name: read(row) for name, read in readers}
        form = None if forms is None else forms[row].as_py()
        if form is not None:
            restore(sample, form)
        return sample

    def _make_readers(self, batch: int) -> tuple[list[tuple[str, Reader]], Any]:
        """Returns the name and reader of each column, and the column of forms or None."""
        path, number = self._batches[batch]
        if path not in self._files:
            self._files[path] = self._arrow.ipc.open_file(self._arrow.memory_map(str(path)))
        columns = self._files[path].get_batch(number)
        names = columns.schema.names
        fields = [field for field in self.schema if field.name in names]
        readers = [(field.name, make_reader(columns.column(field.name), field.type)) for field in fields]
        return readers, columns.column(_FORM) if _FORM in names else None
