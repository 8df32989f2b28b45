"""Functions of all collators: the fields of samples as columns, token sequences as arrays, padding to one width."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainwright.data.collators.stack import Stack
from trainwright.errors import ConfigError, DataError

Columns = dict[str, list[Any]]
"""Each field with its value in every sample."""

_MOST = 2**63  # larger than any int64


def sample_error(number: int, field: str, problem: str) -> DataError:
    """Returns the error for one field of one sample; `problem` continues after its name."""
    return DataError(f'Sample {number} of the batch (counted from 0): "{field}" {problem}')


def columns_of(samples: Sequence[Any], *, drop: Collection[str] = ()) -> Columns:
    """Returns the samples' fields without those to drop; all samples must have the same ones."""
    if not samples:
        raise DataError("The batch has no samples. Check the dataset's `__getitems__` or the batch size.")
    first = samples[0]
    for number, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise DataError(
                f"Sample {number} of the batch (counted from 0) is a {type(sample).__name__}. "
                'Return a dict from the dataset, such as {"input_ids": …}.'
            )
        if sample.keys() != first.keys():
            raise DataError(
                f"The samples of a batch have different fields: sample 0 has {', '.join(first) or 'none'}; "
                f"sample {number} (counted from 0) has {', '.join(sample) or 'none'}. Return the same fields for all."
            )
    return {name: [sample[name] for sample in samples] for name in first if name not in drop}


def require(columns: Mapping[str, Any], field: str, advice: str) -> list[Any]:
    """Returns a field's column; raises DataError if the samples do not have it."""
    if field not in columns:
        raise DataError(f'The samples have no "{field}"; they have {", ".join(columns) or "no fields"}. {advice}')
    column: list[Any] = columns[field]
    return column


def names_of(setting: str, value: Sequence[str]) -> tuple[str, ...]:
    """Returns a setting that lists fields; rejects a single text, which would be read letter by letter."""
    if isinstance(value, str) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{setting} is {value!r}. Use a list of field names, such as [url, id].")
    return tuple(value)


def token_rows(values: Sequence[Any], field: str) -> list[npt.NDArray[Any]]:
    """Returns each sample's sequence of integers as an array, which may share memory with the sample."""
    return [_token_row(value, field, number) for number, value in enumerate(values)]


def _token_row(value: Any, field: str, number: int) -> npt.NDArray[Any]:
    if isinstance(value, (list, tuple)):
        try:
            # As fast as other conversions, and rejects floats and texts.
            row: npt.NDArray[Any] = np.asarray(array("q", value))
        except (TypeError, OverflowError) as error:
            wrong = next((one for one in value if type(one) is not int or abs(one) >= _MOST), value)
            raise sample_error(
                number, field, f"contains a {type(wrong).__name__}, {wrong!r:.40}. Use a list of integers."
            ) from error
    elif isinstance(value, (np.ndarray, torch.Tensor)):
        row = value.numpy(force=True) if isinstance(value, torch.Tensor) else value
        if row.dtype.kind not in "iub":
            raise sample_error(number, field, f"has {row.dtype} values. Tokens are integers.")
        if row.ndim != 1:
            raise sample_error(number, field, f"has the shape {row.shape}. Use one sequence per sample.")
    elif isinstance(value, str):
        raise sample_error(number, field, f'is a text, {value!r:.40}. Tokenize it, or use the collator "tokenize".')
    else:
        raise sample_error(number, field, f"is a {type(value).__name__}, {value!r:.40}. Use a list of integers.")
    if not len(row):
        raise sample_error(number, field, "is empty. Remove such samples from the dataset.")
    return row


def check_tokens(tokens: npt.NDArray[Any], field: str, vocab_size: int | None, *, besides: int | None = None) -> None:
    """Rejects tokens [samples, width] below 0 or outside the vocabulary; `besides` is one more valid value."""
    wrong = tokens < 0 if vocab_size is None else (tokens < 0) | (tokens >= vocab_size)
    if besides is not None:
        wrong &= tokens != besides
    if wrong.any():
        sample, column = np.argwhere(wrong)[0]
        inside = "negative" if vocab_size is None else f"outside the vocabulary of {vocab_size} (0 … {vocab_size - 1})"
        raise sample_error(
            int(sample),
            field,
            f"contains the token {tokens[sample, column]}, which is {inside}. "
            "Use the model's tokenizer, or the same vocab_size for both.",
        )


def stack_column(values: Sequence[Any], field: str) -> Any:
    """Returns a field's values as one tensor [samples, ...]; Python's own floats become float32."""
    first = values[0]
    try:
        if isinstance(first, torch.Tensor):
            return torch.stack(list(values))
        if isinstance(first, Mapping):
            return Stack()(list(values))
        # A list of numbers is a vector, not several columns.
        return torch.from_numpy(np.stack(number_rows(values, field)))
    except (TypeError, ValueError, RuntimeError) as error:
        shapes = [_shape(value) for value in values]
        number = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), 0)
        raise sample_error(
            number, field, f"is {shapes[number]} and that of sample 0 is {shapes[0]}, which cannot be stacked."
        ) from error


def number_rows(values: Sequence[Any], field: str) -> list[npt.NDArray[Any]]:
    """Returns each sample's numbers as an array of any shape, all of one dtype; Python's own floats as float32."""
    rows = [_number_row(value, field, number) for number, value in enumerate(values)]
    dtypes = {row.dtype for row in rows}
    if len(dtypes) == 1:
        return rows
    common = np.result_type(*dtypes)
    if common == np.float64 and common not in dtypes:
        common = np.dtype(np.float32)  # integers and floats, which numpy promotes to double
    return [row.astype(common) for row in rows]


def _number_row(value: Any, field: str, number: int) -> npt.NDArray[Any]:
    if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
        raise sample_error(number, field, "is bfloat16, which numpy does not have. Use float32.")
    is_python = not isinstance(value, (np.ndarray, np.generic, torch.Tensor))
    try:
        row = np.asarray(value.numpy(force=True) if isinstance(value, torch.Tensor) else value)
    except ValueError as error:
        raise sample_error(number, field, "is a list of lists of different lengths.") from error
    if row.dtype.kind not in "iufb":
        kind = "a text" if isinstance(value, str) else f"a {type(value).__name__}"
        raise sample_error(number, field, f"is {kind}, {value!r:.40}, not numbers. Remove it with drop: [{field}].")
    # numpy converts Python's floats to double; models compute in single precision.
    return row.astype(np.float32) if is_python and row.dtype.kind == "f" else row


def _shape(value: Any) -> str:
    try:
        return f"{type(value).__name__} of shape {tuple(np.shape(value))}"
    except ValueError:  # lists of different lengths
        return type(value).__name__


SIDES = ("right", "left")

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Width:
    """Computes the width of a batch's rows from the lengths of its samples.

    It is the longest sample, truncated to `max_length`, rounded up to a multiple or to the next bucket, so that a
    compiled model has few shapes.

    >>> Width(buckets=(128, 256, 512)).of([90, 130], "input_ids")
    256
    """

    max_length: int | None = None
    multiple: int | None = None
    buckets: Sequence[int] = ()
    of_labels: bool = False
    """True if the settings are called max_label_length and label_buckets, for errors."""

    def __post_init__(self) -> None:
        longest, multiple, buckets = self.max_length, self.multiple, list(self.buckets)
        max_name, buckets_name = self._names
        for setting, value in ((max_name, longest), ("pad_to_multiple_of", multiple)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{setting} is {value!r}. Use an integer of at least 1.")
        if any(type(one) is not int or one < 1 for one in buckets) or buckets != sorted(set(buckets)):
            raise ConfigError(f"{buckets_name} is {buckets}. Use increasing integers, such as [128, 256, 512].")
        if buckets and multiple is not None:
            raise ConfigError(f"{buckets_name} and pad_to_multiple_of both define the width. Remove one.")
        if buckets and longest is not None and longest > buckets[-1]:
            raise ConfigError(
                f"{max_name} is {longest}, more than the last of {buckets_name}, {buckets[-1]}. "
                "Lower it, or add a bucket."
            )
        if multiple is not None and longest is not None and longest % multiple:
            raise ConfigError(
                f"{max_name} is {longest}, not a multiple of pad_to_multiple_of, {multiple}: rows could be longer. "
                f"Use {longest // multiple * multiple or multiple}."
            )

    @property
    def _names(self) -> tuple[str, str]:
        return ("max_label_length", "label_buckets") if self.of_labels else ("max_length", "buckets")

    def truncate(self, lengths: Sequence[int]) -> Sequence[int]:
        """Returns the number of tokens of each sample after truncation."""
        limit = self.max_length
        return lengths if limit is None else [min(length, limit) for length in lengths]

    def of(self, lengths: Sequence[int], field: str) -> int:
        """Returns the width of a batch whose samples have these lengths."""
        longest = max(self.truncate(lengths))
        if self.multiple is not None:
            return -(-longest // self.multiple) * self.multiple
        if not self.buckets:
            return longest
        number = bisect_left(self.buckets, longest)
        if number == len(self.buckets):
            max_name, buckets_name = self._names
            raise sample_error(
                lengths.index(longest),
                field,
                f"has {longest} tokens, more than the last of {buckets_name}, {self.buckets[-1]}. "
                f"Add a bucket, or set {max_name} to truncate.",
            )
        return self.buckets[number]


def pad_rows(rows: Sequence[Array], width: int, value: float, *, side: str = "right", dtype: Any = np.int64) -> Array:
    """Returns the rows as one array [rows, width, ...], each padded with `value` or truncated."""
    padded = np.full((len(rows), width, *rows[0].shape[1:]), value, dtype)
    for target, row in zip(padded, rows, strict=True):
        if side == "left":
            target[max(width - len(row), 0) :] = row[:width]
        else:
            target[: len(row)] = row[:width]
    return padded


def mark_tokens(lengths: Sequence[int], width: int, *, side: str = "right") -> npt.NDArray[np.int64]:
    """Returns the attention mask [rows, width]: 1 for tokens, 0 for padding."""
    counts = np.array(lengths)[:, None]
    columns = np.arange(width)
    return (columns < counts if side == "right" else columns >= width - counts).astype(np.int64)
