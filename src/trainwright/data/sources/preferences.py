"""Preference rows: `preferences` in a run file. Each row is a prompt with two answers, or with one answer and a label.

A row is tokenized when it is read, so that an invalid one is reported with its file and line. files.py and
file_stream.py find and read the lines; the collator of the same name pads pairs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.config.problems import describe
from trainwright.data.chat import (
    common_length,
    read_messages,
    read_template,
    read_tools,
    render_chat,
    render_prompt,
)
from trainwright.data.sources.file_stream import FileStream
from trainwright.data.sources.files import FileRows, open_files
from trainwright.data.sources.formats import JsonLinesFormat, RowError
from trainwright.data.sources.locations import Paths
from trainwright.data.tokenizer import TextTokenizer, load_tokenizer
from trainwright.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


def preferences(
    path: Paths,
    *,
    tokenizer: str | os.PathLike[str] | TextTokenizer,
    max_length: int | None = 1024,
    chat_template: str | None = None,
    streaming: bool = False,
    shard_megabytes: float | None = None,
    cache_dir: str | Path | None = None,
    project_dir: str | Path | None = None,
) -> FileRows | FileStream:
    """Rows of JSON lines with `prompt`, `chosen` and `rejected`, or with `prompt`, `completion` and a bool `label`.

    Texts are joined, and the tokenizer's EOS token is added to the answers. Lists of messages (role, content) are
    rendered with the tokenizer's chat template, or with `chat_template` (a .jinja file or a template), and `tools`;
    without a prompt it is what the two conversations have in common. A sample has the tokens of these fields. A prompt
    with its answer has at most `max_length` tokens: the end of the answer is truncated, and a row whose prompt leaves
    no space for an answer raises.

    `path`, `streaming`, `shard_megabytes` and `cache_dir` are those of `json_lines`.
    """
    if max_length is not None and (type(max_length) is not int or max_length < 2):
        raise ConfigError(f"max_length is {max_length!r}. Use a whole number of at least 2, or null for no limit.")
    file_format = PreferencesFormat(
        load_tokenizer(tokenizer, project_dir=project_dir), max_length, chat_template, project_dir=project_dir
    )
    return open_files(file_format, path, streaming, shard_megabytes, cache_dir, project_dir)


class PreferencesFormat(JsonLinesFormat):
    """A row is a JSON object on one line; its sample has tokens."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        max_length: int | None,
        chat_template: str | None = None,
        *,
        project_dir: str | Path | None = None,
    ) -> None:
        super().__init__(columns=None)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._given_template = chat_template
        self._project_dir = Path(project_dir or ".").absolute()  # a worker may run in another folder
        self._template: str | None = None
        self._has_warned = False

    def decode(self, record: bytes, header: bytes) -> dict[str, Any]:
        """Returns the sample of a pair, or of a completion with its label."""
        row = {name: value for name, value in super().decode(record, header).items() if value is not None}
        is_pair = "chosen" in row or "rejected" in row
        names = ("chosen", "rejected") if is_pair else ("completion",)
        if is_pair and "prompt" not in row:
            row = _split_prompt(row)
        missing = [name for name in ("prompt", *names, *(() if is_pair else ("label",))) if name not in row]
        if missing:
            raise RowError(
                f"the row has no {' and no '.join(missing)}; it has {', '.join(row) or 'no fields'}. A row needs "
                "prompt, chosen and rejected, or prompt, completion and label."
            )
        if not is_pair and not isinstance(row["label"], bool):
            raise RowError(f"label is {row['label']!r:.40}. Use true for a good completion, false for a bad one.")
        prompt, *whole = self._tokenize(row, names)
        length = self._check_lengths(prompt, dict(zip(names, whole, strict=True)))
        sample: dict[str, Any] = {"prompt": whole[0][:length]}
        if is_pair:
            return sample | {name: ids[length : self.max_length] for name, ids in zip(names, whole, strict=True)}
        # Not truncated yet, because the collator also joins it with another prompt, within the same limit.
        sample |= {"completion": whole[0][length:], "label": row["label"]}
        return sample if self.max_length is None else {**sample, "max_length": self.max_length}

    def _tokenize(self, row: Mapping[str, Any], names: tuple[str, ...]) -> list[list[int]]:
        """Returns the tokens of the prompt, and of the prompt with each answer."""
        given = {name: row[name] for name in ("prompt", *names)}
        template = self._load_template()  # its errors are not those of a row
        try:
            if all(isinstance(each, str) for each in given.values()):
                return self._tokenize_texts(row["prompt"], [row[name] for name in names])
            if all(isinstance(each, list) for each in given.values()):
                return self._tokenize_messages(row, names, template)
        except DataError as error:
            raise RowError(error.problem) from error
        shown = ", ".join(f"{name} is {describe(each)}" for name, each in given.items())
        raise RowError(f"{shown}. Use a text for each of them, or a list of messages for each.")

    def _tokenize_texts(self, prompt: str, answers: list[str]) -> list[list[int]]:
        end = self.tokenizer.eos_id
        if end is None:
            raise ConfigError(
                f"The tokenizer {self.tokenizer.name} has no EOS token, which ends each answer. Name one in its "
                "tokenizer_config.json (eos_token)."
            )
        # Together with the prompt, because tokens may cross the boundary, as in generation.
        texts = [prompt, *(prompt + answer for answer in answers)]
        ids, *whole = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        begin = self.tokenizer.affixes[0]
        return [begin + ids, *(begin + each + ([] if each[-1:] == [end] else [end]) for each in whole)]

    def _load_template(self) -> str | None:
        if self._template is None and self._given_template is not None:
            self._template = read_template(self._given_template, self._project_dir)
        return self._template

    def _tokenize_messages(
        self, row: Mapping[str, Any], names: tuple[str, ...], template: str | None
    ) -> list[list[int]]:
        options: dict[str, Any] = {"tools": read_tools(row.get("tools")), "chat_template": template}
        prompt, *answers = (read_messages(row[name], name) for name in ("prompt", *names))
        rendered = [render_chat(prompt + each, self.tokenizer, train_on="all", **options).ids for each in answers]
        return [render_prompt(prompt, self.tokenizer, **options), *rendered]

    def _check_lengths(self, prompt: list[int], answers: Mapping[str, list[int]]) -> int:
        """Returns the number of prompt tokens that all sequences begin with; rejects a row without space for an
        answer."""
        length = min(common_length(prompt, answer) for answer in answers.values())
        if length < len(prompt) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A prompt is not tokenized the same with its answer: its last tokens, %r, merge with the first of the "
                "answer, or are rendered otherwise, and count as part of the answer. End prompts at a border between "
                "tokens, such as before a space. Further rows may be alike.",
                self.tokenizer.decode(prompt[length:]),
            )
        if self.max_length is not None and length >= self.max_length:
            raise RowError(
                f"the prompt has {length} tokens, which leaves nothing of the answer within max_length, "
                f"{self.max_length}. Raise it, remove the row, or set data.on_error: skip."
            )
        for name, answer in answers.items():
            if len(answer) < 2:
                raise RowError(f"{name} has no token after the first one, so that nothing is predicted.")
        return length


def _split_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of two whole conversations with the messages that they begin with as its prompt."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        return row
    length = common_length(chosen, rejected)
    return {**row, "prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}
