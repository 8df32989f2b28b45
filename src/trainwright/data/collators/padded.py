"""Padded: token sequences of different lengths, padded to one width, with an attention mask.

samples.py computes the widths; tokenize.py converts texts to tokens.
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
    SIDES,
    Columns,
    Width,
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

# Fields with one value per token; another length raises and is not treated as a vector.
TOKEN_FIELDS = ("attention_mask", "position_ids", "token_type_ids")


class Padded:
    """Pads `input_ids` with `pad_token_id`, `labels` with −100, other fields of tokens with 0; adds `attention_mask`.

    A field has one value per token if its length is that of `input_ids` in each sample, unless `stacked` names it; the
    others, such as one number per sample, are stacked. `pad_values` sets another padding value for a field, `drop`
    removes fields. Without `labels` in the samples they are a copy of `input_ids`, unless `make_labels` is false. The
    width is that of the longest sample, rounded up by `pad_to_multiple_of` or to one of `buckets`; `max_length`
    truncates. `vocab_size` enables a check of every token.

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
            raise ConfigError("The padding token is unknown. Set pad_token_id, or a tokenizer that has one.")
        if side not in SIDES:
            raise ConfigError(f'side is "{side}". Use one of: {", ".join(SIDES)}.')
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
        """The padding token: the argument, or otherwise the tokenizer's."""
        if self._given_pad_id is not None:
            return self._given_pad_id
        assert self.tokenizer is not None  # checked in the constructor
        number = self.tokenizer.pad_id
        if number is None:
            raise DataError(
                f"The tokenizer {self.tokenizer.name} has no padding token. Set pad_token_id to any token; the mask "
                "and the labels exclude the padding."
            )
        _check_pad_id(number, self.vocab_size)
        return number

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Returns the batch, on the host."""
        return self.collate(columns_of(samples, drop=self.drop))

    def collate(self, columns: Columns) -> dict[str, Tensor]:
        """Returns the batch of samples whose fields are columns."""
        rows = token_rows(require(columns, "input_ids", 'Use "tokenize" for texts, "stack" for others.'), "input_ids")
        lengths = [len(row) for row in rows]
        width = self.width.of(lengths, "input_ids")
        kept = self.width.truncate(lengths)

        def pad(values: list[npt.NDArray[Any]], value: float, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
            values = [row[:length] for row, length in zip(values, kept, strict=True)]
            return pad_rows(values, width, value, side=self.side, dtype=dtype)

        tokens = pad(rows, self.pad_token_id)
        check_tokens(tokens, "input_ids", self.vocab_size)
        batch: dict[str, Any] = {"input_ids": tokens}
        if "attention_mask" not in columns:
            batch["attention_mask"] = mark_tokens(kept, width, side=self.side)
        if "labels" not in columns and self.make_labels:
            batch["labels"] = pad(rows, IGNORED_LABEL)
        for name, column in columns.items():
            if name == "input_ids":
                continue
            if name in self.stacked or not _belongs_to_tokens(column, lengths, name):
                batch[name] = stack_column(column, name)
            elif name in ("labels", *TOKEN_FIELDS):
                value = int(self.pad_values.get(name, IGNORED_LABEL if name == "labels" else 0))
                batch[name] = pad(token_rows(column, name), value)
                if name == "labels" and self.vocab_size is not None:
                    check_tokens(batch[name], name, self.vocab_size, besides=IGNORED_LABEL)
            else:
                others = number_rows(column, name)
                for number, row in enumerate(others):
                    if row.shape[1:] != others[0].shape[1:]:
                        shapes = f"{row.shape[1:]}, but sample 0 of {others[0].shape[1:]}"
                        raise sample_error(number, name, f"has values of the shape {shapes}. Use equal shapes.")
                batch[name] = pad(others, self.pad_values.get(name, 0), others[0].dtype)
        return {name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in batch.items()}


def _belongs_to_tokens(column: Sequence[Any], lengths: Sequence[int], field: str) -> bool:
    """Returns True if each sample has one value per token; rejects another length for fields that must have it."""
    for number, (value, length) in enumerate(zip(column, lengths, strict=True)):
        is_sequence = isinstance(value, (list, tuple)) or (isinstance(value, (np.ndarray, Tensor)) and value.ndim > 0)
        found = len(value) if is_sequence else None
        if found != length:
            if field in TOKEN_FIELDS or (field == "labels" and found is not None):
                given = "is one value" if found is None else f"has {found} values"
                raise sample_error(number, field, f'{given}, but "input_ids" has {length} tokens.')
            return False
    return True


def _check_pad_id(number: int, vocab_size: int | None) -> None:
    if type(number) is not int or number < 0 or (vocab_size is not None and number >= vocab_size):
        limit = "" if vocab_size is None else f" below the vocab_size, {vocab_size}"
        raise ConfigError(f"The padding token is {number!r}. Use an integer from 0{limit}.")
