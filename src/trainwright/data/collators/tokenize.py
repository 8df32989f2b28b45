"""Tokenize: texts, or prompts with completions, to a padded batch for causal language models.

padded.py pads the tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trainwright.data.collators.padded import Padded
from trainwright.data.collators.samples import Columns, columns_of, names_of, require, sample_error
from trainwright.data.tokenizer import TextTokenizer, cut_text, load_tokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.events.mean import IGNORED_LABEL


class Tokenize:
    """Tokenizes the field `text`, or `prompt` and `completion` with loss on the completion only; pads as `padded` does.

    `add_special_tokens` keeps the tokens that the tokenizer adds; `add_bos` and `add_eos` add the tokens at the start
    and end of a text if it does not. `max_length` includes all of them; a truncated text has no `eos`, and a prompt of
    this length leaves no label. `pad_to_multiple_of` or `buckets` define the width of a batch. Other fields must be
    numbers and are stacked; `drop` removes fields.

    >>> batch = Tokenize(tokenizer="bytes", prompt="ask", completion="say", add_eos=True)([{"ask": "1+1=", "say": "2"}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[49, 43, 49, 61, 50, 258]], [[-100, -100, -100, -100, 50, 258]])
    """

    draws_nothing = True

    def __init__(
        self,
        *,
        tokenizer: str | os.PathLike[str] | TextTokenizer,
        text: str = "text",
        prompt: str | None = None,
        completion: str | None = None,
        max_length: int | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        add_special_tokens: bool = True,
        pad_token_id: int | None = None,
        pad_to_multiple_of: int | None = None,
        buckets: Sequence[int] = (),
        side: str = "right",
        make_labels: bool = True,
        drop: Sequence[str] = (),
        vocab_size: int | None = None,
        project_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if (prompt is None) != (completion is None):
            given = "prompt" if completion is None else "completion"
            raise ConfigError(f"Only {given} is set. Set both prompt and completion, or text.")
        if prompt is not None and not make_labels:
            raise ConfigError("make_labels is false, but only labels separate completions from prompts. Remove it.")
        self.tokenizer = load_tokenizer(tokenizer, project_dir=project_dir, add_special_tokens=add_special_tokens)
        self.text, self.prompt, self.completion = text, prompt, completion
        self.add_bos, self.add_eos = add_bos, add_eos
        self.drop = names_of("drop", drop)
        self.padded = Padded(
            tokenizer=self.tokenizer,
            pad_token_id=pad_token_id,
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            buckets=buckets,
            side=side,
            make_labels=make_labels,
            vocab_size=vocab_size,
        )

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Returns the batch, on the host."""
        columns = columns_of(samples, drop=self.drop)
        if self.prompt is not None and self.completion is not None:
            advice = "Set prompt and completion to the names of their fields."
            prompts = require(columns, self.prompt, advice)
            completions = require(columns, self.completion, advice)
            tokens = self._encode_pairs(prompts, completions, self.prompt, self.completion)
        else:
            texts = require(columns, self.text, "Set text to the name of the text's field.")
            tokens = {"input_ids": self._encode_texts(texts)}
        used = {self.prompt, self.completion} if self.prompt is not None else {self.text}
        others = {name: column for name, column in columns.items() if name not in used}
        repeated = sorted(tokens.keys() & others.keys())
        if repeated:
            raise DataError(
                f'The samples already have {", ".join(repeated)} in addition to texts. Use the collator "padded", '
                f"or remove them with drop: [{', '.join(repeated)}]."
            )
        return self.padded.collate({**tokens, **others})

    def _encode_texts(self, texts: list[Any]) -> list[list[int]]:
        begin, end = self._added()
        encoded = encode_column(self.tokenizer, texts, self.text)
        return [self._fit([*begin, *ids, *end]) for ids in encoded]

    def _encode_pairs(self, prompts: list[Any], completions: list[Any], prompt: str, completion: str) -> Columns:
        """Returns the tokens of each prompt with its completion, and labels without the prompt.

        Both are encoded separately, so the boundary is exact and the prompt has the same tokens as without a
        completion.
        """
        begin, end = self._added()
        opening, closing = self.tokenizer.affixes
        prompt_ids = encode_column(self.tokenizer, prompts, prompt, add_special_tokens=False)
        completion_ids = encode_column(self.tokenizer, completions, completion, add_special_tokens=False)
        input_ids, labels = [], []
        for before, after in zip(prompt_ids, completion_ids, strict=True):
            given, learnt = [*begin, *opening, *before], [*after, *closing, *end]
            input_ids.append(self._fit(given + learnt))
            labels.append(self._fit([IGNORED_LABEL] * len(given) + learnt))
        return {"input_ids": input_ids, "labels": labels}

    def _fit(self, ids: list[int]) -> list[int]:
        """Truncates a long sample, but keeps the closing special tokens."""
        longest = self.padded.width.max_length
        return ids if longest is None else cut_text(ids, self.tokenizer.affixes[1], longest)

    def _added(self) -> tuple[list[int], list[int]]:
        """Returns the tokens of add_bos and add_eos, unless the tokenizer adds them itself."""
        opening, closing = self.tokenizer.affixes
        added: list[list[int]] = []
        for role, is_set in (("bos", self.add_bos), ("eos", self.add_eos)):
            number = getattr(self.tokenizer, f"{role}_id") if is_set else None
            if is_set and number is None:
                raise DataError(f"add_{role} is set, but the tokenizer {self.tokenizer.name} has no {role} token.")
            added.append([] if number is None else [number])
        begin, end = added
        return ([] if opening[:1] == begin else begin), ([] if closing[-1:] == end else end)


def encode_missing(columns: Columns, padded: Padded, field: str) -> None:
    """Replaces the texts in `field` with `input_ids`, unless the samples already have tokens."""
    if "input_ids" in columns:
        return
    texts = require(columns, field, "Return input_ids, or set text to the text's field.")
    if padded.tokenizer is None:
        raise DataError(f'The samples have no "input_ids" but "{field}". Set a tokenizer.')
    del columns[field]
    columns["input_ids"] = encode_column(padded.tokenizer, texts, field, max_length=padded.width.max_length)


def encode_column(
    tokenizer: TextTokenizer, texts: list[Any], field: str, *, max_length: int | None = None, **options: bool
) -> list[list[int]]:
    """Returns the tokens of each sample's text."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise sample_error(number, field, f"is a {type(text).__name__}, {text!r:.40}, not a text.")
    try:
        return tokenizer.encode_batch(texts, max_length=max_length, **options)
    except DataError as error:
        raise DataError(f'"{field}": {error.problem}', where=error.where) from error.__cause__
