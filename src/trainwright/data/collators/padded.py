"""Padded: token sequences of unequal length, filled up to one width, with a mask that tells tokens from filling.

The widths are padding.py's. Texts become such sequences in tokenize.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainwright.data.collators.samples import (
    Columns,
    Width,
    check_side,
    check_tokens,
    columns_of,
    mark_tokens,
    names_of,
    number_rows,
    pad_rows,
    require,
    sample_error,
    stack_column,
    token_rows,
)
from trainwright.data.tokenizer import TextTokenizer, load_tokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.events.mean import IGNORED_LABEL

# Fields with a place for each token, whatever their lengths: unequal ones are a mistake, not a vector of their own.
TOKEN_FIELDS = ("attention_mask", "position_ids", "token_type_ids")


class Padded:
    """Pads `input_ids` with `pad_token_id`, `labels` with −100, other fields of tokens with 0; adds `attention_mask`.

    A field belongs to the tokens where each sample has as many values of it as `input_ids`, unless `stacked` names
    it; the rest, such as one number a sample, is stacked. `pad_values` gives a field another padding value, `drop`
    leaves fields out. Without `labels` in the samples they are made from `input_ids`, unless `make_labels` is false.
    The width is that of the longest sample, rounded up by `pad_to_multiple_of` or to one of `buckets`; `max_length`
    cuts the end off. `vocab_size` has every token checked.

    >>> batch = Padded(pad_token_id=0, buckets=[4, 8])([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 0], [8, 0, 0, 0]], [[5, 6, 7, -100], [8, -100, -100, -100]])
    """

    draws_nothing = True

    def __init__(
        self,
        *,
        tokenizer: str | os.PathLike[str] | TextTokenizer | None = None,
        pad_token_id: int | None = None,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        buckets: Sequence[int] = (),
        side: str = "right",
        make_labels: bool = True,
        pad_values: Mapping[str, float] | None = None,
        stacked: Sequence[str] = (),
        drop: Sequence[str] = (),
        vocab_size: int | None = None,
        project_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if tokenizer is None and pad_token_id is None:
            raise ConfigError("Nothing says which token pads. Give pad_token_id, or a tokenizer that has one.")
        check_side(side)
        self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer, project_dir=project_dir)
        self.width = Width(max_length, pad_to_multiple_of, tuple(buckets))
        self.side = side
        self.make_labels = make_labels
        self.pad_values = dict(pad_values or {})
        self.stacked = names_of("stacked", stacked)
        self.drop = names_of("drop", drop)
        self.vocab_size = vocab_size
        self._given_pad_id = pad_token_id
        if pad_token_id is not None:
            _check_pad_id(pad_token_id, vocab_size)

    @property
    def pad_token_id(self) -> int:
        """The token that fills up: the given one, else the tokenizer's."""
        if self._given_pad_id is not None:
            return self._given_pad_id
        assert self.tokenizer is not None  # the constructor saw to it
        number = self.tokenizer.pad_id
        if number is None:
            raise DataError(
                f"The tokenizer {self.tokenizer.name} has no padding token. Set pad_token_id; any token will do, "
                "for the mask and the labels leave the padding out."
            )
        _check_pad_id(number, self.vocab_size)
        return number

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Returns the batch, on the host."""
        return self.collate(columns_of(samples, drop=self.drop))

    def collate(self, columns: Columns) -> dict[str, Tensor]:
        """Returns the batch of samples whose fields are already collected."""
        rows = token_rows(require(columns, "input_ids", 'Use "tokenize" for texts, "stack" for others.'), "input_ids")
        lengths = [len(row) for row in rows]
        width = self.width.of(lengths, "input_ids")
        kept = self.width.cut(lengths)
        batch = {"input_ids": self._pad_tokens(rows, "input_ids", kept=kept, width=width, value=self.pad_token_id)}
        if "attention_mask" not in columns:
            batch["attention_mask"] = torch.from_numpy(mark_tokens(kept, width, side=self.side))
        if "labels" not in columns and self.make_labels:
            batch["labels"] = self._pad(rows, kept=kept, width=width, value=IGNORED_LABEL)
        for name, column in columns.items():
            if name == "input_ids":
                continue
            if name in self.stacked or not _belongs_to_tokens(column, lengths, name):
                batch[name] = stack_column(column, name)
            elif name in ("labels", *TOKEN_FIELDS):
                value = int(self.pad_values.get(name, IGNORED_LABEL if name == "labels" else 0))
                batch[name] = self._pad_tokens(token_rows(column, name), name, kept=kept, width=width, value=value)
            else:
                others = number_rows(column, name)
                _check_equal_vectors(others, name)
                fill = self.pad_values.get(name, 0)
                batch[name] = self._pad(others, kept=kept, width=width, value=fill, dtype=others[0].dtype)
        return batch

    def _pad_tokens(
        self, rows: list[npt.NDArray[Any]], field: str, *, kept: Sequence[int], width: int, value: int
    ) -> Tensor:
        tokens = self._pad(rows, kept=kept, width=width, value=value)
        if field == "input_ids":
            check_tokens(tokens.numpy(), field, self.vocab_size)
        elif field == "labels" and self.vocab_size is not None:
            check_tokens(tokens.numpy(), field, self.vocab_size, besides=IGNORED_LABEL)
        return tokens

    def _pad(
        self,
        rows: list[npt.NDArray[Any]],
        *,
        kept: Sequence[int],
        width: int,
        value: float,
        dtype: npt.DTypeLike = np.int64,
    ) -> Tensor:
        if self.width.max_length is not None:
            rows = [row[:length] for row, length in zip(rows, kept, strict=True)]
        return torch.from_numpy(pad_rows(rows, width, value, side=self.side, dtype=dtype))


def _belongs_to_tokens(column: Sequence[Any], lengths: Sequence[int], field: str) -> bool:
    """Has each sample as many values of this field as tokens? For fields that must have, anything else is rejected."""
    for number, (value, length) in enumerate(zip(column, lengths, strict=True)):
        found = len(value) if _is_sequence(value) else None
        if found != length:
            if field in TOKEN_FIELDS or (field == "labels" and found is not None):
                held = "is one value" if found is None else f"has {found} values"
                raise sample_error(number, field, f'{held}, "input_ids" has {length} tokens. Make them as many.')
            return False
    return True


def _check_equal_vectors(rows: list[npt.NDArray[Any]], field: str) -> None:
    for number, row in enumerate(rows):
        if row.shape[1:] != rows[0].shape[1:]:
            raise sample_error(
                number,
                field,
                f"has values of the shape {row.shape[1:]}, sample 0 of {rows[0].shape[1:]}. Make them equal.",
            )


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, (np.ndarray, Tensor)) and value.ndim > 0)


def _check_pad_id(number: int, vocab_size: int | None) -> None:
    if type(number) is not int or number < 0 or (vocab_size is not None and number >= vocab_size):
        limit = "" if vocab_size is None else f" below the vocab_size, {vocab_size}"
        raise ConfigError(f"The padding token is {number!r}. Use a whole number from 0{limit}.")
