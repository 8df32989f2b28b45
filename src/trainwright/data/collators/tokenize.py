"""Tokenize: from texts to a padded batch, for causal language models; also prompts whose completions are learnt.

What is done with the tokens is padded.py's.
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

    `add_special_tokens` keeps what the tokenizer itself puts around a text; `add_bos` and `add_eos` add the tokens
    that begin and end one where it does not. `max_length` counts them all; a text that it cuts gets no `eos`, for
    it does not end there, and a prompt that fills it leaves nothing to learn. The width of a batch is decided by
    `pad_to_multiple_of` or `buckets`. Other fields are stacked, and must be numbers; `drop` leaves fields out.

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
            raise ConfigError(f"Only {given} is given. Give both prompt and completion, or text.")
        if prompt is not None and not make_labels:
            raise ConfigError("make_labels is false, and completions are told from prompts by labels. Remove it.")
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
            advice = "Set prompt and completion to the names of the fields that hold them."
            prompts = require(columns, self.prompt, advice)
            completions = require(columns, self.completion, advice)
            tokens = self._encode_pairs(prompts, completions, self.prompt, self.completion)
        else:
            texts = require(columns, self.text, "Set text to the name of the field that holds the text.")
            tokens = {"input_ids": self._encode_texts(texts)}
        used = {self.prompt, self.completion} if self.prompt is not None else {self.text}
        others = {name: column for name, column in columns.items() if name not in used}
        taken = sorted(tokens.keys() & others.keys())
        if taken:
            raise DataError(
                f'The samples already have {", ".join(taken)} beside their texts. Use the collator "padded" for them, '
                f"or leave them out with drop: [{', '.join(taken)}]."
            )
        return self.padded.collate({**tokens, **others})

    def _encode_texts(self, texts: list[Any]) -> list[list[int]]:
        begin, end = self._added()
        encoded = encode_column(self.tokenizer, texts, self.text)
        return [self._fit([*begin, *ids, *end]) for ids in encoded]

    def _encode_pairs(self, prompts: list[Any], completions: list[Any], prompt: str, completion: str) -> Columns:
        """Returns the tokens of each prompt with its completion, and labels that leave the prompt out.

        The two are encoded apart, so that the border is exact and the prompt the same as when it stands alone.
        """
        begin, end = self._added()
        opening, closing = self.tokenizer.affixes
        asked = encode_column(self.tokenizer, prompts, prompt, add_special_tokens=False)
        answered = encode_column(self.tokenizer, completions, completion, add_special_tokens=False)
        input_ids, labels = [], []
        for before, after in zip(asked, answered, strict=True):
            given, learnt = [*begin, *opening, *before], [*after, *closing, *end]
            input_ids.append(self._fit(given + learnt))
            labels.append(self._fit([IGNORED_LABEL] * len(given) + learnt))
        return {"input_ids": input_ids, "labels": labels}

    def _fit(self, ids: list[int]) -> list[int]:
        """Cuts a sample that is too long, but not the tokens with which the tokenizer closes each text."""
        longest = self.padded.width.max_length
        return ids if longest is None else cut_text(ids, self.tokenizer.affixes[1], longest)

    def _added(self) -> tuple[list[int], list[int]]:
        """Returns what add_bos and add_eos put around a text, unless the tokenizer does so itself."""
        opening, closing = self.tokenizer.affixes
        begin = [self._special("bos", self.tokenizer.bos_id)] if self.add_bos else []
        end = [self._special("eos", self.tokenizer.eos_id)] if self.add_eos else []
        return ([] if opening[:1] == begin else begin), ([] if closing[-1:] == end else end)

    def _special(self, role: str, number: int | None) -> int:
        if number is None:
            raise DataError(
                f"add_{role} is set, and the tokenizer {self.tokenizer.name} has no {role} token. Remove it."
            )
        return number


def encode_missing(columns: Columns, padded: Padded, field: str) -> None:
    """Puts `input_ids` in the place of the texts in `field`, unless the samples already have tokens."""
    if "input_ids" in columns:
        return
    texts = require(columns, field, "Give input_ids, or set text to the field that holds the text.")
    if padded.tokenizer is None:
        raise DataError(f'The samples have no "input_ids" but "{field}". Give a tokenizer.')
    del columns[field]
    columns["input_ids"] = encode_column(padded.tokenizer, texts, field, max_length=padded.width.max_length)


def encode_column(
    tokenizer: TextTokenizer, texts: list[Any], field: str, *, max_length: int | None = None, **options: bool
) -> list[list[int]]:
    """Returns the tokens of each sample's text."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise sample_error(number, field, f"is a {type(text).__name__}, {text!r:.40}. Give a text.")
    try:
        return tokenizer.encode_batch(texts, max_length=max_length, **options)
    except DataError as error:
        raise DataError(f'"{field}": {error.problem}', where=error.where) from error.__cause__
