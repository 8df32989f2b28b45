"""What is in the samples of a batch: their fields as columns, token sequences as arrays, other values as one tensor.

Everything that cannot become a tensor is refused here, by its field and the sample's number in the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
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
    """Refuses tokens [samples, width] below 0 or outside the vocabulary; `besides` is one more value that may stand."""
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
