"""What collators share: the fields of samples as columns, token sequences as arrays, and padding to one width."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainwright.data.collators.stack import Stack
from trainwright.errors import ConfigError, DataError

Columns = dict[str, list[Any]]
"""Each field with its value in every sample."""

_MOST = 2**63  # no int64 is as large


def sample_error(number: int, field: str, problem: str) -> DataError:
    """Returns the error for one field of one sample; the problem goes on from its name."""
    return DataError(f'Sample {number} of the batch (counted from 0): "{field}" {problem}')


def columns_of(samples: Sequence[Any], *, drop: Collection[str] = ()) -> Columns:
    """Returns the samples' fields without those to drop; all samples must have the same ones."""
    if not samples:
        raise DataError("The batch holds no samples. Check the dataset's `__getitems__` or the batch size.")
    first = samples[0]
    for number, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise DataError(
                f"Sample {number} of the batch (counted from 0) is a {type(sample).__name__}. "
                'Let the dataset return a dict, such as {"input_ids": …}.'
            )
        if sample.keys() != first.keys():
            raise DataError(
                f"The samples of a batch have different fields: sample 0 has {', '.join(first) or 'none'}; "
                f"sample {number} (counted from 0) has {', '.join(sample) or 'none'}. Give all samples the same ones."
            )
    return {name: [sample[name] for sample in samples] for name in first if name not in drop}


def require(columns: Mapping[str, Any], field: str, advice: str) -> list[Any]:
    """Returns a field's column, or says that the samples lack it."""
    if field not in columns:
        raise DataError(f'The samples have no "{field}"; they have {", ".join(columns) or "no fields"}. {advice}')
    column: list[Any] = columns[field]
    return column


def names_of(setting: str, value: Sequence[str]) -> tuple[str, ...]:
    """Returns a setting that lists fields; a single text would be taken letter by letter."""
    if isinstance(value, str) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{setting} is {value!r}. Give a list of field names, such as [url, id].")
    return tuple(value)


def token_rows(values: Sequence[Any], field: str) -> list[npt.NDArray[Any]]:
    """Returns each sample's sequence of whole numbers as an array, to be copied from and not written to."""
    if all(type(value) is torch.Tensor and value.ndim == 1 for value in values):
        # One step from torch to numpy for all: each costs as much as copying a row.
        lengths = [value.shape[0] for value in values]
        whole = torch.cat(list(values))
        if min(lengths) and not (whole.is_floating_point() or whole.is_complex()):
            flat, ends = whole.numpy(force=True), [*accumulate(lengths)]
            return [flat[end - length : end] for length, end in zip(lengths, ends, strict=True)]
    return [_token_row(value, field, number) for number, value in enumerate(values)]


def _token_row(value: Any, field: str, number: int) -> npt.NDArray[Any]:
    if isinstance(value, (list, tuple)):
        try:
            # As fast as any way from a list to an array, and it takes no float and no text for a whole number.
            row: npt.NDArray[Any] = np.asarray(array("q", value))
        except (TypeError, OverflowError) as error:
            raise sample_error(number, field, f"{_odd_token(value)} Give a list of whole numbers.") from error
    elif isinstance(value, (np.ndarray, torch.Tensor)):
        row = value.numpy(force=True) if isinstance(value, torch.Tensor) else value
        if row.dtype.kind not in "iub":
            raise sample_error(number, field, f"holds {row.dtype} values. Tokens are whole numbers.")
        if row.ndim != 1:
            raise sample_error(number, field, f"has the shape {row.shape}. Give one sequence a sample.")
    elif isinstance(value, str):
        raise sample_error(number, field, f'is a text, {value!r:.40}. Tokenize it, or use the collator "tokenize".')
    else:
        raise sample_error(number, field, f"is a {type(value).__name__}, {value!r:.40}. Give a list of whole numbers.")
    if not len(row):
        raise sample_error(number, field, "is empty. Leave such samples out of the dataset.")
    return row


def _odd_token(value: Sequence[Any]) -> str:
    for place, one in enumerate(value):
        try:
            array("q", [one])
        except (TypeError, OverflowError):
            return f"holds a {type(one).__name__}, {one!r:.40}, at place {place}."
    return "is no sequence of whole numbers."


def check_tokens(tokens: npt.NDArray[Any], field: str, vocab_size: int | None, *, besides: int | None = None) -> None:
    """Rejects tokens [samples, width] below 0 or outside the vocabulary; `besides` is one more value that may stand."""
    limit = _MOST if vocab_size is None else vocab_size
    # Seen as unsigned, a negative number is a huge one: one pass finds both.
    if besides is None and int(tokens.view(np.uint64).max()) < limit:
        return
    wrong = (tokens < 0) | (tokens >= min(limit, _MOST - 1))
    if besides is not None:
        wrong &= tokens != besides
    if wrong.any():
        sample, place = np.argwhere(wrong)[0]
        inside = "negative" if vocab_size is None else f"outside the vocabulary of {vocab_size} (0 … {vocab_size - 1})"
        raise sample_error(
            int(sample),
            field,
            f"holds the token {tokens[sample, place]}, which is {inside}. "
            "Use the tokenizer that the model was made for, or give both the same vocab_size.",
        )


def stack_column(values: Sequence[Any], field: str) -> Any:
    """Returns a field's values as one tensor [samples, ...]; Python's own floats become float32."""
    first = values[0]
    try:
        if isinstance(first, torch.Tensor):
            return torch.stack(list(values))
        if isinstance(first, Mapping):
            return Stack()(list(values))
        # A list of numbers is a vector, not a column for each of its places.
        return torch.from_numpy(np.stack(number_rows(values, field)))
    except (TypeError, ValueError, RuntimeError) as error:
        shapes = [_shape(value) for value in values]
        number = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), 0)
        raise sample_error(
            number,
            field,
            f"is {shapes[number]}, that of sample 0 is {shapes[0]}: they cannot be stacked. Make them equal.",
        ) from error


def number_rows(values: Sequence[Any], field: str) -> list[npt.NDArray[Any]]:
    """Returns each sample's numbers as an array of any shape, all of one dtype; Python's own floats as float32."""
    rows = [_number_row(value, field, number) for number, value in enumerate(values)]
    dtypes = {row.dtype for row in rows}
    if len(dtypes) == 1:
        return rows
    common = np.result_type(*dtypes)
    if common == np.float64 and common not in dtypes:
        common = np.dtype(np.float32)  # whole numbers among floats: numpy would take a double to be safe
    return [row.astype(common) for row in rows]


def _number_row(value: Any, field: str, number: int) -> npt.NDArray[Any]:
    if isinstance(value, str) or value is None or isinstance(value, Mapping):
        raise _no_number(value, field, number)
    if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
        raise sample_error(number, field, "is bfloat16, which numpy lacks. Give float32, or use another collator.")
    try:
        row = np.asarray(value.numpy(force=True) if isinstance(value, torch.Tensor) else value)
    except ValueError as error:  # lists of unequal length within
        raise sample_error(number, field, "is a list of lists of unequal length. Make them equal.") from error
    if row.dtype.kind not in "iufb":
        raise _no_number(value, field, number)
    # numpy reads Python's floats as double; models compute in single.
    is_python = not isinstance(value, (np.ndarray, np.generic, torch.Tensor))
    return row.astype(np.float32) if is_python and row.dtype.kind == "f" else row


def _shape(value: Any) -> str:
    try:
        return f"{type(value).__name__} of shape {tuple(np.shape(value))}"
    except ValueError:  # lists of unequal length within
        return type(value).__name__


def _no_number(value: Any, field: str, number: int) -> DataError:
    kind = "a text" if isinstance(value, str) else f"a {type(value).__name__}"
    return sample_error(
        number, field, f"is {kind}, {value!r:.40}, which no tensor can hold. Leave it out with drop: [{field}]."
    )


SIDES = ("right", "left")

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Width:
    """From the lengths of a batch's samples to the width of its rows.

    The longest sample decides, after the cut at `max_length`: rounded up to a multiple, or to the next bucket, so
    that a compiled model sees few shapes.

    >>> Width(buckets=(128, 256, 512)).of([90, 130], "input_ids")
    256
    """

    max_length: int | None = None
    multiple: int | None = None
    buckets: Sequence[int] = ()
    of_labels: bool = False
    """Are the settings called max_label_length and label_buckets? For errors only."""

    def __post_init__(self) -> None:
        longest, multiple, buckets = self.max_length, self.multiple, list(self.buckets)
        for setting, value in ((self._max_name, longest), ("pad_to_multiple_of", multiple)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{setting} is {value!r}. Use a whole number of at least 1, or leave it out.")
        if any(type(one) is not int or one < 1 for one in buckets) or buckets != sorted(set(buckets)):
            raise ConfigError(f"{self._buckets_name} is {buckets}. Use growing whole numbers, such as [128, 256, 512].")
        if buckets and multiple is not None:
            raise ConfigError(f"{self._buckets_name} and pad_to_multiple_of both say how wide a batch is. Remove one.")
        if buckets and longest is not None and longest > buckets[-1]:
            raise ConfigError(
                f"{self._max_name} is {longest}, more than the last of {self._buckets_name}, {buckets[-1]}. "
                "Lower it, or add a bucket."
            )
        if multiple is not None and longest is not None and longest % multiple:
            raise ConfigError(
                f"{self._max_name} is {longest}, not a multiple of pad_to_multiple_of, {multiple}: rows could get "
                f"longer than it. Use {longest // multiple * multiple or multiple}."
            )

    @property
    def _max_name(self) -> str:
        return "max_label_length" if self.of_labels else "max_length"

    @property
    def _buckets_name(self) -> str:
        return "label_buckets" if self.of_labels else "buckets"

    def cut(self, lengths: Sequence[int]) -> Sequence[int]:
        """Returns how many tokens of each sample stay."""
        limit = self.max_length
        return lengths if limit is None else [min(length, limit) for length in lengths]

    def of(self, lengths: Sequence[int], field: str) -> int:
        """Returns the width of a batch whose samples have these lengths."""
        longest = max(self.cut(lengths))
        if self.multiple is not None:
            return -(-longest // self.multiple) * self.multiple
        if not self.buckets:
            return longest
        place = bisect_left(self.buckets, longest)
        if place == len(self.buckets):
            raise sample_error(
                lengths.index(longest),
                field,
                f"has {longest} tokens, more than the last of {self._buckets_name}, {self.buckets[-1]}. "
                f"Add a bucket, or set {self._max_name} to cut what is longer.",
            )
        return self.buckets[place]


def check_side(side: str) -> None:
    """Rejects a side that rows do not have."""
    if side not in SIDES:
        raise ConfigError(f'side is "{side}". Use one of: {", ".join(SIDES)}.')


def pad_rows(rows: Sequence[Array], width: int, value: float, *, side: str = "right", dtype: Any = np.int64) -> Array:
    """Returns the rows as one array [rows, width, ...], each filled up with `value`; a longer one loses its end."""
    padded = np.full((len(rows), width, *rows[0].shape[1:]), value, dtype)
    if side == "left":
        for place, row in zip(padded, rows, strict=True):
            place[max(width - len(row), 0) :] = row[:width]
    else:
        for place, row in zip(padded, rows, strict=True):
            place[: len(row)] = row[:width]
    return padded


def mark_tokens(lengths: Sequence[int], width: int, *, side: str = "right") -> npt.NDArray[np.int64]:
    """Returns the attention mask [rows, width]: 1 for a sample's tokens, 0 for what fills the row up."""
    counts = np.array(lengths)[:, None]
    places = np.arange(width)
    return (places < counts if side == "right" else places >= width - counts).astype(np.int64)
