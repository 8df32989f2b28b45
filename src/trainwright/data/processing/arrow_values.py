"""Values between Python and Arrow: what a sample's values are stored as, and what they come back as.

Whole numbers in lists come back as int64 and floats as float32 tensors, whatever width they were given with; truths
stay bool, and bytes of pictures uint8, which as int64 would be eight times as large. A number that does not fit is
refused. What Arrow's columns cannot say, a key that one sample lacks or the shape of an empty array, is in forms.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainwright.data.processing.forms import Empty, Place
from trainwright.errors import DataError

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


def to_storable(value: Any, name: str, empties: list[Empty] | None = None, *, place: Place = ()) -> Any:
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
            return to_storable(value.tolist(), name, empties, place=place)
        if value.ndim == 0:
            return value.item()
        if not value.size and empties is not None:
            empties.append(Empty(place, _RETURNED[value.dtype.kind, value.dtype.itemsize == 1], value.shape))
        return _nested_rows(_narrow(value, name))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {
            str(key): to_storable(item, f"{name}.{key}", empties, place=(*place, str(key)))
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return _list_to_storable(value, name, empties, place=place)
    raise TypeError(
        f"{name} is a {type(value).__name__}, which cannot be cached. "
        "Use numbers, texts, bytes, tensors, arrays, and lists and dicts of them"
    )


def _list_to_storable(value: Any, name: str, empties: list[Empty] | None, *, place: Place) -> Any:
    kinds = set(map(type, value))
    if kinds == {int}:
        return _int_array(value, name)
    if kinds and kinds <= {int, float, np.float64, np.float32}:
        return _narrow(np.array(value, dtype=np.float64), name)
    if kinds and kinds <= {np.ndarray, torch.Tensor} and len({(item.dtype, item.shape) for item in value}) == 1:
        # Equal arrays come back as one, so it is that one which may be empty.
        return to_storable(np.stack([_to_numpy(item) for item in value]), name, empties, place=place)
    return [to_storable(item, f"{name}[{index}]", empties, place=(*place, index)) for index, item in enumerate(value)]


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
    """Returns numbers in the least width that is read back as the same; refuses those that would not be.

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
