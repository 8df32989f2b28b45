"""SequenceToSequence: inputs and targets of different lengths, as in translation and summarization."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.data.collators.padded import Padded
from trainwright.data.collators.samples import Width, check_tokens, columns_of, names_of, pad_rows, require, token_rows
from trainwright.data.tokenizer import TextTokenizer
from trainwright.errors import ConfigError
from trainwright.events.mean import IGNORED_LABEL


class SequenceToSequence:
    """Pads `input_ids` with an attention mask, and `labels` with −100, each to its own width.

    With `decoder_start_token_id` the batch also has `decoder_input_ids`: the labels shifted right, with that token
    first and `pad_token_id` as padding; most models compute them. `max_length` and `buckets` apply to the input,
    `max_label_length` and `label_buckets` to the labels, `pad_to_multiple_of` to both.

    >>> collator = SequenceToSequence(pad_token_id=0, decoder_start_token_id=1)
    >>> batch = collator([{"input_ids": [5, 6, 7], "labels": [8, 9, 2]}, {"input_ids": [5], "labels": [3]}])
    >>> batch["labels"].tolist(), batch["decoder_input_ids"].tolist()
    ([[8, 9, 2], [3, -100, -100]], [[1, 8, 9], [1, 3, 0]])
    """

    draws_nothing = True

    def __init__(
        self,
        *,
        tokenizer: str | os.PathLike[str] | TextTokenizer | None = None,
        pad_token_id: int | None = None,
        decoder_start_token_id: int | None = None,
        max_length: int | None = None,
        max_label_length: int | None = None,
        buckets: Sequence[int] = (),
        label_buckets: Sequence[int] = (),
        pad_to_multiple_of: int | None = None,
        drop: Sequence[str] = (),
        vocab_size: int | None = None,
        project_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.drop = names_of("drop", drop)
        self.decoder_start_token_id = decoder_start_token_id
        self.vocab_size = vocab_size
        self.inputs = Padded(
            tokenizer=tokenizer,
            pad_token_id=pad_token_id,
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            buckets=buckets,
            make_labels=False,
            vocab_size=vocab_size,
            project_dir=project_dir,
        )
        self.label_width = Width(max_label_length, pad_to_multiple_of, tuple(label_buckets), of_labels=True)
        start = decoder_start_token_id
        if start is not None and (start < 0 or (vocab_size is not None and start >= vocab_size)):
            raise ConfigError(f"decoder_start_token_id is {start}. Use a token of the vocabulary, from 0.")

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Returns the batch, on the host."""
        columns = columns_of(samples, drop=self.drop)
        targets = require(columns, "labels", "Return the target's tokens as labels.")
        rows = token_rows(targets, "labels")
        batch = self.inputs.collate({name: column for name, column in columns.items() if name != "labels"})
        lengths = [len(row) for row in rows]
        width = self.label_width.of(lengths, "labels")
        rows = [row[:length] for row, length in zip(rows, self.label_width.truncate(lengths), strict=True)]
        labels = pad_rows(rows, width, IGNORED_LABEL)
        check_tokens(labels, "labels", self.vocab_size, besides=IGNORED_LABEL)
        batch["labels"] = torch.from_numpy(labels)
        if self.decoder_start_token_id is not None:
            shifted = np.empty_like(labels)
            shifted[:, 0] = self.decoder_start_token_id
            shifted[:, 1:] = labels[:, :-1]
            shifted[shifted == IGNORED_LABEL] = self.inputs.pad_token_id
            batch["decoder_input_ids"] = torch.from_numpy(shifted)
        return batch
