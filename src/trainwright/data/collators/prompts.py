"""Prompts: the tokens of texts or conversations that a model continues, with their rows.

trainers/grpo.py generates the completions and passes the rows' other fields to the rewards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainwright.data.chat import end_of_turn, read_messages, read_template, read_tools, render_prompt
from trainwright.data.collators.samples import columns_of, require, sample_error
from trainwright.data.tokenizer import TextTokenizer, load_tokenizer
from trainwright.errors import ConfigError, DataError

DEFAULT_MAX_LENGTH = 512


class Prompts:
    """Tokenizes the field `prompt`: a text, or messages (role, content), which the chat template renders.

    The batch has `prompt_ids` [samples, width], padded on the right, `prompt_lengths` [samples] and the list `rows` of
    the unchanged samples. `stop_ids` are the tokens that end a completion: the tokenizer's EOS token, and for messages
    the tokens that end the assistant's turn. A prompt with more than `max_length` tokens raises. `chat_template`
    replaces the tokenizer's: a .jinja file or a template.

    >>> batch = Prompts(tokenizer="bytes")([{"prompt": "1+1=", "answer": "2"}])
    >>> batch["prompt_ids"].tolist(), batch["prompt_lengths"].tolist(), batch["rows"][0]["answer"]
    ([[49, 43, 49, 61]], [4], '2')
    """

    draws_nothing = True

    def __init__(
        self,
        *,
        tokenizer: str | os.PathLike[str] | TextTokenizer,
        max_length: int | None = DEFAULT_MAX_LENGTH,
        chat_template: str | None = None,
        project_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise ConfigError(f"max_length is {max_length!r}. Use a whole number of at least 1, or null for no limit.")
        self.tokenizer = load_tokenizer(tokenizer, project_dir=project_dir)
        self.max_length = max_length
        self._given_template = chat_template
        self._project_dir = Path(project_dir or ".").absolute()  # a worker may run in another folder
        self._template: str | None = None
        self._turn_end: int | None = None

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Returns the batch, on the host."""
        prompts = require(columns_of(samples), "prompt", "A row needs a prompt: a text, or a list of messages.")
        rows = [self._encode(prompt, samples[number], number) for number, prompt in enumerate(prompts)]
        width = max(map(len, rows))
        return {
            "prompt_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            "prompt_lengths": torch.tensor([len(row) for row in rows]),
            "rows": [dict(sample) for sample in samples],
        }

    def stop_ids(self, prompt: Any) -> frozenset[int]:
        """Returns the tokens that end a completion of a prompt."""
        found = {self.tokenizer.eos_id} - {None}
        if not isinstance(prompt, str):
            if self._turn_end is None:
                self._turn_end = end_of_turn(self.tokenizer, self._load_template())
            found.add(self._turn_end)
        if not found:
            raise ConfigError(
                f"The tokenizer {self.tokenizer.name} has no EOS token, so that no completion would end. Name one in "
                "its tokenizer_config.json (eos_token)."
            )
        return frozenset(one for one in found if one is not None)

    def _encode(self, prompt: Any, sample: Mapping[str, Any], number: int) -> list[int]:
        try:
            if isinstance(prompt, str):
                ids = self.tokenizer.affixes[0] + self.tokenizer.encode_batch([prompt], add_special_tokens=False)[0]
            else:
                tools = read_tools(sample.get("tools"))
                messages = read_messages(prompt, "prompt")
                ids = render_prompt(messages, self.tokenizer, tools=tools, chat_template=self._load_template())
        except DataError as error:
            raise sample_error(number, "prompt", f"cannot be tokenized: {error.problem}") from error
        if not ids:
            raise sample_error(number, "prompt", "has no tokens. Remove the row.")
        if self.max_length is not None and len(ids) > self.max_length:
            raise sample_error(
                number,
                "prompt",
                f"has {len(ids)} tokens, more than max_length, {self.max_length}: {str(prompt)!r:.80}. Raise "
                "data.collator.max_length, or remove the row.",
            )
        return ids

    def _load_template(self) -> str | None:
        if self._template is None and self._given_template is not None:
            self._template = read_template(self._given_template, self._project_dir)
        return self._template
