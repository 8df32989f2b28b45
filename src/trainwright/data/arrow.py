"""Samples in a folder of Arrow files: written in bounded memory, read by index from a memory map.

Includes the conversion of values between Python and Arrow, and what columns cannot express of a sample.
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
"""The keys and indices that lead to a value in a sample."""


class Empty(NamedTuple):
    """An array without elements."""

    field_path: FieldPath
    dtype: str
    shape: tuple[int, ...]


def forms_of(samples: Sequence[Mapping[str, Any]], empties: Sequence[Sequence[Empty]]) -> list[str | None]:
    """Returns the form of each sample of a batch, or None where the columns say all."""
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
    """Makes a sample that was read from the columns what it was."""
    facts = json.loads(form)
    for field_path, dtype, shape in facts["empty"]:
        _parent_of(sample, field_path)[field_path[-1]] = torch.empty(shape, dtype=getattr(torch, dtype))
    for field_path in facts["lacking"]:
        # Where the whole batch lacks the key, there is no column to take it from.
        _parent_of(sample, field_path).pop(field_path[-1], None)


def _parent_of(sample: Any, field_path: Sequence[str | int]) -> Any:
    """Returns the dict or list that holds a place; a tensor on the way there was a list of unequal empty arrays."""
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
    """Returns the place without its indices: all elements of a list are in one column."""
    return tuple(0 if isinstance(step, int) else step for step in field_path)


Reader = Callable[[int], Any]
"""From a row of a record batch to the value there."""

# From a kind of numpy's and whether it has one byte.
_RETURNED = {
    ("b", True): "bool", ("u", True): "uint8", ("i", True): "int64", ("u", False): "int64", ("i", False): "int64",
    ("f", False): "float32",
}  # fmt: skip
"""The dtype that arrays come back with."""

_PLAIN = (str, bytes, bool, int, float, type(None))


def import_arrow() -> Any:
    """Returns pyarrow, or says how to get it."""
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
    """Returns a value that Arrow can store: tensors and lists of numbers as arrays, the rest as plain Python.

    `name` is where the value stands in the sample, for the error, and `place` the same as keys and indices. The empty
    arrays in it are added to `empties`.
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
            empties.append(Empty(field_path, _RETURNED[value.dtype.kind, value.dtype.itemsize == 1], value.shape))
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
        return _int_array(value, name)
    if kinds and kinds <= {int, float, np.float64, np.float32}:
        return _narrow(np.array(value, dtype=np.float64), name)
    if kinds and kinds <= {np.ndarray, torch.Tensor} and len({(item.dtype, item.shape) for item in value}) == 1:
        # Equal arrays come back as one, so it is that one which may be empty.
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
        return []  # Arrow would take the dtype of `np.array([])`, float64, for the whole column's
    if value.ndim == 1:
        return np.ascontiguousarray(value)
    return [_nested_rows(row) for row in value]


def _narrow(value: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Returns numbers in the least width that is read back as the same; rejects those that would not be.

    int64 is stored as int32 where the numbers fit, as tokens do: half the disk, and int64 again when read.
    """
    if value.dtype.kind == "f" and value.dtype.itemsize > 4:
        with np.errstate(over="ignore"):
            narrow: npt.NDArray[Any] = value.astype(np.float32)
        if (np.isinf(narrow) != np.isinf(value)).any():
            raise TypeError(f"{name} holds {np.abs(value[np.isfinite(value)]).max()}, which does not fit into float32")
        return narrow
    if value.dtype == np.uint64 and value.size:
        if int(value.max()) >= 2**63:
            raise TypeError(f"{name} holds {value.max()}, which does not fit into int64")
        value = value.astype(np.int64)
    limits = np.iinfo(np.int32)
    if value.dtype != np.int64 or not value.size or value.min() < limits.min or value.max() > limits.max:
        return value
    return value.astype(np.int32)


def _int_array(value: Any, name: str) -> Any:
    try:
        return _narrow(np.array(value, dtype=np.int64), name)
    except OverflowError as error:
        raise TypeError(f"{name}: a whole number in {str(value)[:60]} does not fit into 64 bits") from error


def size_of(value: Any) -> int:
    """Returns about how many bytes a storable value takes."""
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
    """Returns the function from a row to its value; `whole_type` is the column's type over all files.

    Lists of numbers are read through numpy views of the map, in microseconds; through Python's numbers a picture
    would take milliseconds.
    """
    dtype = _numpy_dtype(_innermost(whole_type))
    if import_arrow().types.is_list(column.type) and dtype is not None:
        reader = _NumberLists.of(column, dtype)
        if reader is not None:
            return reader
    convert = _converter(whole_type, column.type)
    return lambda row: convert(column[row].as_py())


class _NumberLists:
    """Reads a column of lists of numbers, nested to any depth, without gaps."""

    def __init__(self, offsets: list[npt.NDArray[Any]], numbers: Any, dtype: Any) -> None:
        self._offsets = offsets
        # Arrow keeps truths as bits, which numpy cannot view: those are unpacked for each value.
        self._numbers = numbers if dtype is np.bool_ else numbers.to_numpy()
        self._dtype = dtype

    @classmethod
    def of(cls, column: Any, dtype: Any) -> _NumberLists | None:
        """Returns a reader of the column, or None if there are gaps or no numbers in it."""
        types = import_arrow().types
        offsets = []
        while types.is_list(column.type):
            if column.null_count:
                return None
            offsets.append(column.offsets.to_numpy())
            column = column.values
        if column.null_count or _numpy_dtype(column.type) is None or types.is_null(column.type):
            return None
        return cls(offsets, column, dtype)

    def __call__(self, row: int) -> Any:
        offsets = self._offsets[0]
        return self._read(offsets[row], offsets[row + 1], 1)

    def _read(self, start: int, stop: int, level: int) -> Any:
        """Returns the list of the elements start … stop−1 of a level."""
        shape, begin, end = [int(stop - start)], start, stop
        for offsets in self._offsets[level:]:
            edges = offsets[begin : end + 1]
            widths = np.diff(edges)
            if widths.size and (widths != widths[0]).any():
                pairs = zip(self._offsets[level][start:stop], self._offsets[level][start + 1 : stop + 1], strict=True)
                return [self._read(first, last, level + 1) for first, last in pairs]
            shape.append(int(widths[0]) if widths.size else 0)
            begin, end = edges[0], edges[-1]
        numbers = self._numbers[begin:end]
        if self._dtype is np.bool_:
            numbers = numbers.to_numpy(zero_copy_only=False)
        # astype copies: a tensor of its own, which may be written to.
        return torch.from_numpy(numbers.astype(self._dtype)).view(shape)


def _innermost(arrow_type: Any) -> Any:
    types = import_arrow().types
    while types.is_list(arrow_type):
        arrow_type = arrow_type.value_type
    return arrow_type


def _numpy_dtype(arrow_type: Any) -> Any:
    """Returns the dtype of the tensors that lists of this type come back as; None for texts and the like."""
    types = import_arrow().types
    if types.is_uint8(arrow_type):
        return np.uint8
    if types.is_integer(arrow_type) or types.is_null(arrow_type):
        return np.int64  # null: every list was empty
    if types.is_floating(arrow_type):
        return np.float32
    return np.bool_ if types.is_boolean(arrow_type) else None


def _converter(arrow_type: Any, own_type: Any) -> Callable[[Any], Any]:
    """Returns the function from Arrow's Python value to ours: the lists of numbers in it become tensors.

    `own_type` is the type in this file, `arrow_type` that over all files, which may have more keys.
    """
    types = import_arrow().types
    if types.is_null(own_type):
        return _converter(arrow_type, arrow_type) if not types.is_null(arrow_type) else lambda value: value
    if types.is_struct(arrow_type):
        fields = [(own.name, _converter(arrow_type.field(own.name).type, own.type)) for own in own_type]
        return lambda value: value and {name: convert(value.get(name)) for name, convert in fields}
    if not types.is_list(arrow_type):
        return _whole_or_float(arrow_type)
    dtype = _numpy_dtype(_innermost(arrow_type))
    if dtype is None:
        element = _converter(arrow_type.value_type, own_type.value_type)
        return lambda value: value if value is None else [element(item) for item in value]
    return lambda value: _tensor_of(value, dtype)


def _whole_or_float(arrow_type: Any) -> Callable[[Any], Any]:
    # A number that is whole in one file and not in another is a float in both.
    if import_arrow().types.is_floating(arrow_type):
        return lambda value: value if value is None else float(value)
    return lambda value: value


def _tensor_of(value: Any, dtype: Any) -> Any:
    """Returns a nest of lists as a tensor; a ragged one as a list of tensors; one with gaps as it is."""
    if not isinstance(value, list):
        return value
    try:
        if not _has_gap(value):
            return torch.from_numpy(np.array(value, dtype=dtype))
    except ValueError:
        return [_tensor_of(item, dtype) for item in value]  # ragged
    return [_tensor_of(item, dtype) for item in value]


def _has_gap(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_gap, value)) if value and isinstance(value[0], (list, type(None))) else None in value
    return value is None


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
        values = {
            str(key): to_storable(value, str(key), empties, field_path=(str(key),)) for key, value in sample.items()
        }
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
        number, field_path = self._places[batch]
        if number not in self._files:
            self._files[number] = self._arrow.ipc.open_file(self._arrow.memory_map(str(self._paths[number])))
        columns = self._files[number].get_batch(field_path)
        names = columns.schema.names
        readers = [
            (field.name, make_reader(columns.column(field.name), field.type))
            for field in self.schema
            if field.name in names
        ]
        return _Readers(readers, columns.column(_FORM) if _FORM in names else None)


def _of(file: Mapping[str, Any]) -> range:
    return range(len(file["batch_rows"]))
