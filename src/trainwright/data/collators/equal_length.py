"""EqualLength: blocks of tokens of one length, without padding and mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.data.collators.samples import (
    check_tokens,
    columns_of,
    names_of,
    require,
    sample_error,
    stack_column,
    token_rows,
)
from trainwright.events.mean import IGNORED_LABEL


class EqualLength:
    """Stacks token sequences of one length: `input_ids` and `labels`, int64 [samples, length]; no attention mask.

    Without `labels` in the samples they are a copy of `input_ids` (the model shifts them), unless `make_labels` is
    false. Other fields are stacked; those in `drop` are removed. `vocab_size` enables a check of every token.

    >>> batch = EqualLength()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 1]}])
    >>> batch["input_ids"].tolist(), torch.equal(batch["labels"], batch["input_ids"])
    ([[5, 6, 7], [8, 9, 1]], True)
    """

    draws_nothing = True

    def __init__(self, *, make_labels: bool = True, vocab_size: int | None = None, drop: Sequence[str] = ()) -> None:
        self.make_labels = make_labels
        self.vocab_size = vocab_size
        self.drop = names_of("drop", drop)

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Returns the batch, on the host."""
        columns = columns_of(samples, drop=self.drop)
        tokens = require(columns, "input_ids", "Return tokens from the dataset.")
        batch = {"input_ids": self._stack_tokens(tokens, "input_ids")}
        if "labels" in columns and np.ndim(columns["labels"][0]) == 1:
            batch["labels"] = self._stack_tokens(columns["labels"], "labels", besides=IGNORED_LABEL)
        elif "labels" not in columns and self.make_labels:
            batch["labels"] = batch["input_ids"].clone()  # a copy, because a trainer may modify it
        others = {name: column for name, column in columns.items() if name not in batch}
        return {**batch, **{name: stack_column(column, name) for name, column in others.items()}}

    def _stack_tokens(self, values: list[Any], field: str, besides: int | None = None) -> Tensor:
        rows = token_rows(values, field)
        length = len(rows[0])
        for number, row in enumerate(rows):
            if len(row) != length:
                problem = f"has {len(row)} tokens, but sample 0 has {length}."
                raise sample_error(number, field, f'{problem} Use the collator "padded".')
        tokens = np.concatenate(rows, dtype=np.int64, casting="unsafe").reshape(len(rows), length)
        check_tokens(tokens, field, self.vocab_size, besides=besides)
        return torch.from_numpy(tokens)
