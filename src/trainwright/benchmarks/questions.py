"""Rows of a file as prompts: templates over the fields of a row, few-shot examples, and chats.

    open_rows(path) → rows → PromptTemplate.context(row) → text → tokens

multiple_choice.py and generate.py define the benchmarks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from trainwright.config.problems import describe
from trainwright.data.chat import Message, read_messages, read_template, render_prompt_text
from trainwright.data.sources.files import csv, json_lines
from trainwright.data.sources.locations import Paths
from trainwright.data.sources.parquet import parquet
from trainwright.data.tokenizer import TextTokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.models.generation import vocabulary_size

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.]*)\}")

Row = Mapping[str, Any]
T = TypeVar("T")


def open_rows(path: Paths, *, project_dir: str | Path | None) -> Any:
    """Returns the rows of .jsonl, .csv or .parquet files by index; raises if there are none."""
    first = str(path) if isinstance(path, str | Path) else str(next(iter(path), ""))
    formats: Mapping[str, Callable[..., Any]] = {".parquet": parquet, ".csv": csv}
    open_files = formats.get(Path(first).suffix, json_lines)
    rows = open_files(path, project_dir=project_dir)
    if not len(rows):
        raise DataError(f"{path} has no rows. Add one JSON object per line.")
    return rows


def read_samples(rows: Any, max_samples: int | None, read: Callable[[int, Row], T]) -> list[T]:
    """Returns the result of `read(number, row)` for each of the first rows."""
    samples = []
    for number in range(len(rows) if max_samples is None else min(len(rows), max_samples)):
        with located(rows, number):
            samples.append(read(number, rows[number]))
    return samples


@contextmanager
def located(rows: Any, number: int) -> Iterator[None]:
    """Adds the file and line of a row to an error about it."""
    try:
        yield
    except DataError as error:
        location = rows.describe_row(number)
        problem = error.problem if error.problem.startswith(location) else f"{location}: {error.problem}"
        raise DataError(problem) from error


def field_of(row: Row, name: str) -> Any:
    """Returns a field of a row; `a.b` is the field b of the field a."""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise DataError(f'the row has no "{name}"; it has {", ".join(map(str, row)) or "no fields"}.')
        value = value[part]
    return value.tolist() if hasattr(value, "tolist") else value  # arrays of Parquet


def text_of(value: Any, name: str) -> str:
    """Returns a text, or a number as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{name} is {describe(value)}. Use text.")


@dataclass(frozen=True)
class Context:
    """The text before an answer."""

    text: str
    is_chat: bool
    """True if a chat template has rendered the text: it has all special tokens."""


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """The settings for converting a row to a prompt."""

    tokenizer: TextTokenizer
    template: str
    """Text with the fields of a row in braces."""
    question: str = "question"
    """The field that `{question}` stands for. Messages in it are rendered with the chat template."""
    description: str = ""
    """The text before everything else; in a chat, the system message."""
    is_chat: bool = False
    chat_template: str | None = None
    """A template or, until `with_template`, a .jinja file; None: the tokenizer's own."""
    delimiter: str = " "
    """The text between a prompt and its answer, except in a chat."""
    fewshot_delimiter: str = "\n\n"

    def with_template(self, project_dir: str | Path | None) -> PromptTemplate:
        """Returns the same with the text of the chat template instead of its file."""
        if self.chat_template is None:
            return self
        return replace(self, chat_template=read_template(self.chat_template, Path(project_dir or ".")))

    def context(self, row: Row, extra: Mapping[str, str], examples: Sequence[tuple[Any, str]]) -> Context:
        """Returns the context of a row's answer, after examples, each a `question` and its answer."""
        asked = self.ask(row, extra)
        if self.is_chat or not isinstance(asked, str):
            system: list[Message] = [{"role": "system", "content": self.description}] if self.description else []
            turns = [
                message
                for question, answer in examples
                for message in [*_as_messages(question), {"role": "assistant", "content": answer}]
            ]
            messages = [*system, *turns, *_as_messages(asked)]
            text = render_prompt_text(messages, self.tokenizer, chat_template=self.chat_template)
            return Context(text, is_chat=True)
        shown = [f"{question}{self.delimiter}{answer}{self.fewshot_delimiter}" for question, answer in examples]
        return Context("".join([self.description, *shown, asked]), is_chat=False)

    def ask(self, row: Row, extra: Mapping[str, str]) -> str | list[Message]:
        """Returns the prompt of a single row: text, or messages if its question is a list of messages."""
        if self.question in row and isinstance(row[self.question], list):
            return read_messages(row[self.question], self.question)

        def fill(match: re.Match[str]) -> str:
            name = match[1]
            if name in extra:
                return extra[name]
            field = self.question if name == "question" else name
            return text_of(field_of(row, field), field)

        return _PLACEHOLDER.sub(fill, self.template)

    def encode(self, text: str, *, is_chat: bool) -> list[int]:
        """Returns the tokens of a context, with those that the tokenizer begins a text with."""
        [ids] = self.tokenizer.encode_batch([text], add_special_tokens=False)
        return ids if is_chat else [*self.tokenizer.affixes[0], *ids]

    def encode_answer(self, context: Context, answer: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of a context and those of an answer after it, tokenized together.

        White space at the end of the context belongs to the answer, whose first token often begins with it.
        """
        answer = answer if context.is_chat else self.delimiter + answer
        text = context.text.rstrip()
        answer = context.text[len(text) :] + answer
        before = self.encode(text, is_chat=context.is_chat)
        whole = self.encode(text + answer, is_chat=context.is_chat)
        after = whole[len(before) :]
        if not after:
            raise DataError(f"the answer {answer!r:.60} has no tokens after its prompt. Use another delimiter.")
        if not before:
            before = self.first_token()
        return before, after

    def first_token(self) -> list[int]:
        """Returns the token before a text whose prompt is empty."""
        first = self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id
        if first is None:
            raise DataError(
                f"the prompt is empty, and the tokenizer {self.tokenizer.name} has no token for the beginning or the "
                "end of a text. Use a prompt with text."
            )
        return [first]


def _as_messages(asked: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else asked


def read_examples(
    num_fewshot: int,
    path: Paths | None,
    *,
    read: Callable[[Row], tuple[Any, str]],
    project_dir: str | Path | None,
) -> list[tuple[Any, str]]:
    """Returns the few-shot examples, the first rows of their file, one more than needed: see `examples_for`."""
    if not num_fewshot:
        return []
    assert path is not None
    rows = open_rows(path, project_dir=project_dir)
    examples = read_samples(rows, num_fewshot + 1, lambda _, row: read(row))
    if len(examples) < num_fewshot:
        problem = f"{path} has {len(examples)} rows, fewer than num_fewshot, {num_fewshot}"
        raise DataError(f"{problem}. Add rows, or lower it.")
    return examples


def examples_for(asked: Any, examples: Sequence[tuple[Any, str]], num_fewshot: int) -> list[tuple[Any, str]]:
    """Returns the first examples that are not the question itself, which may be in the same file."""
    return [each for each in examples if each[0] != asked][:num_fewshot]


def check_settings(num_fewshot: int, fewshot_path: Paths | None, max_samples: int | None) -> None:
    """Rejects invalid settings, and those without effect, of the parameters that all benchmarks share."""
    if type(num_fewshot) is not int or num_fewshot < 0:
        raise ConfigError(f"num_fewshot: {num_fewshot!r} is not a number of examples. Use 0 or more.")
    if num_fewshot and fewshot_path is None:
        raise ConfigError(f"num_fewshot: is {num_fewshot}, but there are no examples. Name a file: fewshot_path.")
    if not num_fewshot and fewshot_path is not None:
        raise ConfigError("fewshot_path: has no effect without num_fewshot. Set how many of its rows to show.")
    if max_samples is not None and (type(max_samples) is not int or max_samples < 1):
        raise ConfigError(f"max_samples: {max_samples!r} is not a number of rows. Use 1 or more, or null for all.")


def check_tokens(model: nn.Module, ids: Sequence[int], tokenizer: TextTokenizer) -> None:
    """Rejects tokens without an embedding in the model."""
    size = vocabulary_size(model)
    if size is not None and max(ids) >= size:
        raise DataError(
            f"the prompt has the token {max(ids)} of the tokenizer {tokenizer.name}, but the model has {size} tokens "
            f"(0 … {size - 1}). Set the tokenizer that it is trained with."
        )
