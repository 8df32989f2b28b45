"""MaskedLanguageModel: masks some of the tokens, which the model predicts, as in BERT.

It draws from torch's global generator, which the loader seeds for each batch, so a resumed run has the same masks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.data.collators.padded import Padded
from trainwright.data.collators.samples import columns_of, names_of
from trainwright.data.collators.tokenize import encode_missing
from trainwright.data.tokenizer import TextTokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.events.mean import IGNORED_LABEL


class MaskedLanguageModel:
    """Pads `input_ids`, masks `mask_probability` of the tokens; `labels` are these tokens, −100 everywhere else.

    Of the masked tokens, `mask_fraction` become the mask token, `random_fraction` a random token that is not special,
    and the others are unchanged. Special tokens (the tokenizer's, `special_token_ids`, or where a sample's
    `special_tokens_mask` is 1) are never masked. Samples without `input_ids` are tokenized from their field `text`.
    Without a tokenizer set
    `mask_token_id`, `pad_token_id` and `vocab_size`.

    >>> collator = MaskedLanguageModel(mask_token_id=99, pad_token_id=0, vocab_size=100, mask_probability=0.5)
    >>> batch = collator([{"input_ids": [5, 6, 7, 8, 9]}])
    >>> torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"]).tolist()
    [[5, 6, 7, 8, 9]]
    """

    def __init__(
        self,
        *,
        tokenizer: str | os.PathLike[str] | TextTokenizer | None = None,
        text: str = "text",
        mask_probability: float = 0.15,
        mask_fraction: float = 0.8,
        random_fraction: float = 0.1,
        mask_token_id: int | None = None,
        special_token_ids: Sequence[int] = (),
        pad_token_id: int | None = None,
        vocab_size: int | None = None,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        buckets: Sequence[int] = (),
        drop: Sequence[str] = (),
        project_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not 0.0 < mask_probability <= 1.0:
            raise ConfigError(f"mask_probability is {mask_probability}. Use a number above 0, at most 1.")
        if min(mask_fraction, random_fraction) < 0.0 or mask_fraction + random_fraction > 1.0 + 1e-9:
            raise ConfigError(
                f"mask_fraction is {mask_fraction} and random_fraction is {random_fraction}. "
                "Use numbers from 0 with a sum of at most 1."
            )
        if tokenizer is None and (mask_token_id is None or vocab_size is None):
            raise ConfigError("The mask token is unknown. Set a tokenizer, or mask_token_id and vocab_size.")
        self.text = text
        self.mask_probability = mask_probability
        self.mask_fraction = mask_fraction
        self.random_fraction = random_fraction
        self.vocab_size = vocab_size
        self.special_token_ids = tuple(special_token_ids)
        self.drop = names_of("drop", drop)
        self._given_mask_id = mask_token_id
        self._tables: tuple[Tensor, Tensor] | None = None
        self.padded = Padded(
            tokenizer=tokenizer,
            pad_token_id=pad_token_id,
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            buckets=buckets,
            make_labels=False,
            vocab_size=vocab_size,
            project_dir=project_dir,
        )
        self.tokenizer = self.padded.tokenizer

    @property
    def mask_token_id(self) -> int:
        """The mask token: the argument, or otherwise the tokenizer's."""
        if self._given_mask_id is not None:
            return self._given_mask_id
        assert self.tokenizer is not None  # checked in the constructor
        if self.tokenizer.mask_id is None:
            raise DataError(f"The tokenizer {self.tokenizer.name} has no mask token. Set mask_token_id.")
        return self.tokenizer.mask_id

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Returns the batch, on the host."""
        columns = columns_of(samples, drop=self.drop)
        if "labels" in columns:
            raise DataError("The samples have labels, but this collator creates them. Add drop: [labels].")
        encode_missing(columns, self.padded, self.text)
        batch = self.padded.collate(columns)
        can_mask = batch["attention_mask"].bool()
        if "special_tokens_mask" in batch:
            can_mask &= batch.pop("special_tokens_mask") == 0
        batch["input_ids"], batch["labels"] = self._mask(batch["input_ids"], can_mask)
        return batch

    def _mask(self, tokens: Tensor, can_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens after masking, and the labels, both [samples, width]."""
        is_special, ordinary = self._make_tables(tokens)
        masked = (torch.rand(tokens.shape) < self.mask_probability) & can_mask & ~is_special[tokens]
        found = tokens[masked]
        lot = torch.rand(len(found))
        others = ordinary[torch.randint(len(ordinary), found.shape)]
        shown = torch.where(lot < self.mask_fraction + self.random_fraction, others, found)
        shown[lot < self.mask_fraction] = self.mask_token_id
        return tokens.masked_scatter(masked, shown), tokens.masked_fill(~masked, IGNORED_LABEL)

    def _make_tables(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a bool per token, True for special tokens, and the ids of all others; computed once."""
        if self._tables is None:
            known = frozenset() if self.tokenizer is None else self.tokenizer.special_ids
            special = {*known, *self.special_token_ids, self.mask_token_id, self.padded.pad_token_id}
            size = self.vocab_size
            if size is None:
                assert self.tokenizer is not None  # checked in the constructor
                size = self.tokenizer.vocab_size
            is_special = np.zeros(size, dtype=np.bool_)
            is_special[[one for one in special if one < size]] = True
            self._tables = torch.from_numpy(is_special), torch.from_numpy(np.flatnonzero(~is_special))
        if int(tokens.max()) >= len(self._tables[0]):
            raise DataError(
                f"The token {int(tokens.max())} is outside the tokenizer's vocabulary of {len(self._tables[0])}. "
                "Use the tokenizer of the samples, or set vocab_size."
            )
        return self._tables
