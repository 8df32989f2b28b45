"""Preferences: the tokens of chosen and rejected answers, or of answers with labels, padded to one width.

The dataset of the same name makes the samples; padded.py pads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.data.collators.padded import Padded
from trainwright.data.collators.samples import Columns, columns_of, require, token_rows
from trainwright.data.tokenizer import TextTokenizer
from trainwright.events.mean import IGNORED_LABEL


class Preferences:
    """Pads pairs to `input_ids`, `attention_mask` and `labels` [samples, 2, width], with the chosen answer first.

    Labels are −100 on the prompt and the padding; `row_id` [samples] is a hash of the tokens. Samples with a `label`
    become tensors [samples, width] and the bool `label` [samples]; `kl_input_ids`, `kl_attention_mask` and `kl_labels`
    have each prompt with the answer of the previous sample, the first one with that of the last, for the KL term of
    KTO. The width is that of the longest sequence, rounded up by `pad_to_multiple_of` or to one of `buckets`.

    >>> batch = Preferences(pad_token_id=0)([{"prompt": [5], "chosen": [6, 7], "rejected": [8]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[[5, 6, 7], [5, 8, 0]]], [[[-100, 6, 7], [-100, 8, -100]]])
    """

    draws_nothing = True

    def __init__(
        self,
        *,
        tokenizer: str | os.PathLike[str] | TextTokenizer | None = None,
        pad_token_id: int | None = None,
        pad_to_multiple_of: int | None = None,
        buckets: Sequence[int] = (),
        vocab_size: int | None = None,
        project_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.padded = Padded(
            tokenizer=tokenizer,
            pad_token_id=pad_token_id,
            pad_to_multiple_of=pad_to_multiple_of,
            buckets=buckets,
            vocab_size=vocab_size,
            project_dir=project_dir,
        )
        self.tokenizer = self.padded.tokenizer

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Returns the batch, on the host."""
        columns = columns_of(samples)
        advice = 'Use data.train: {type: preferences, …}, or another collator, such as "padded".'
        prompts = require(columns, "prompt", advice)
        if "chosen" not in columns:
            return self._collate_unpaired(prompts, columns, advice)
        pairs = zip(columns["chosen"], require(columns, "rejected", advice), strict=True)
        batch = self._pad(
            [prompt for prompt in prompts for _ in range(2)], [answer for pair in pairs for answer in pair]
        )
        pairs_of = {name: each.reshape(len(samples), 2, -1) for name, each in batch.items()}
        return {**pairs_of, "row_id": torch.tensor([_hash_row(sample) for sample in samples])}

    def _collate_unpaired(self, prompts: list[Any], columns: Columns, advice: str) -> dict[str, Tensor]:
        answers = require(columns, "completion", advice)
        labels = torch.tensor(require(columns, "label", advice), dtype=torch.bool)
        limits = columns.get("max_length", [None] * len(prompts))
        others = self._pad(prompts, [answers[-1], *answers[:-1]], limits)
        batch = self._pad(prompts, answers, limits)
        return {**batch, **{f"kl_{name}": each for name, each in others.items()}, "label": labels}

    def _pad(self, prompts: list[Any], answers: list[Any], limits: Sequence[int | None] = ()) -> dict[str, Tensor]:
        """Returns each prompt with its answer, cut to its limit, as tensors [rows, width]."""
        rows, labels = [], []
        for number, answer in enumerate(token_rows(answers, "answer")):
            prompt = list(prompts[number])
            row = [*prompt, *answer.tolist()][: limits[number] if limits else None]
            rows.append(row)
            labels.append([IGNORED_LABEL] * len(prompt) + row[len(prompt) :])
        return self.padded.collate({"input_ids": rows, "labels": labels})


def _hash_row(sample: Mapping[str, Any]) -> int:
    """Returns 64 bits of a hash of the tokens of a pair."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ("prompt", "chosen", "rejected"):
        tokens = np.asarray(sample[name], dtype=np.int64)
        digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)
