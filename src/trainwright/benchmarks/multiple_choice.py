"""Multiple choice: selects the answer with the highest likelihood. `multiple_choice` in a run file."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from trainwright.benchmarks.benchmark import AllAgree, Benchmark
from trainwright.benchmarks.questions import (
    PromptTemplate,
    Row,
    check_settings,
    check_tokens,
    examples_for,
    field_of,
    located,
    open_rows,
    read_examples,
    read_samples,
    text_of,
)
from trainwright.config.problems import describe
from trainwright.data.sources.locations import Paths
from trainwright.data.tokenizer import TextTokenizer, load_tokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.models.generation import reject_non_decoder, room_after
from trainwright.models.scoring import score_continuations

_LETTERS = string.ascii_uppercase


@dataclass(frozen=True)
class _Question:
    number: int
    """The number of its row in the file, counted from 0."""
    prompt: str
    choices: list[str]
    answer: int
    encoded: list[tuple[list[int], list[int]]]
    """The tokens of the context and of each choice."""


class MultipleChoice(Benchmark):
    """The share of questions whose right choice has the highest log-likelihood: `acc`, and `acc_norm` by its length.

    A row of `path` (.jsonl, .csv, .parquet) has the fields that `question`, `choices` and `answer` name; a dot leads
    into a field, as in choices.text. An answer is the number of a choice, counted from 0, its label in the field
    `labels`, its text, or its letter. `prompt` is text with fields of the row in braces; {choices} are all choices with
    letters, one per line. With `answer_with: letter` the letters are scored instead of the texts.

    `normalize` divides the log-likelihood for acc_norm by the choice's number of characters, bytes or tokens. With
    `chat`, the prompt is a user message and is rendered with the chat template, like messages in the question's field.
    The first `num_fewshot` rows of `fewshot_path` come before each question. `description` comes before everything.
    """

    metrics: Mapping[str, str] = {"acc": "max", "acc_norm": "max"}

    def __init__(
        self,
        path: Paths,
        tokenizer: str | TextTokenizer,
        *,
        question: str = "question",
        choices: str = "choices",
        answer: str = "answer",
        labels: str | None = None,
        prompt: str | None = None,
        delimiter: str = " ",
        answer_with: Literal["text", "letter"] = "text",
        normalize: Literal["characters", "bytes", "tokens"] = "characters",
        description: str = "",
        chat: bool = False,
        chat_template: str | None = None,
        num_fewshot: int = 0,
        fewshot_path: Paths | None = None,
        fewshot_delimiter: str = "\n\n",
        max_samples: int | None = None,
        project_dir: str | Path | None = None,
    ) -> None:
        check_settings(num_fewshot, fewshot_path, max_samples)
        if answer_with not in ("text", "letter"):
            raise ConfigError(f"answer_with: {answer_with!r} is unknown. Use text or letter.")
        if normalize not in ("characters", "bytes", "tokens"):
            raise ConfigError(f"normalize: {normalize!r} is unknown. Use characters, bytes or tokens.")
        if prompt is None:
            lines = "{question}\n{choices}" if answer_with == "letter" else "Question: {question}"
            prompt = lines.removeprefix("Question: ") if chat else f"{lines}\nAnswer:"
        self.path = path
        self.tokenizer = load_tokenizer(tokenizer, project_dir=project_dir)
        self.prompts = PromptTemplate(
            tokenizer=self.tokenizer,
            template=prompt,
            question=question,
            description=description,
            is_chat=chat,
            chat_template=chat_template,
            delimiter=delimiter,
            fewshot_delimiter=fewshot_delimiter,
        )
        self._fields = (choices, answer, labels)
        self._answer_with = answer_with
        self._normalize = normalize
        self._num_fewshot, self._fewshot_path = num_fewshot, fewshot_path
        self._max_samples = max_samples
        self._project_dir = project_dir
        self._rows: Any = None

    def load(self) -> list[_Question]:
        """Reads and tokenizes the questions."""
        self.prompts = self.prompts.with_template(self._project_dir)
        examples = read_examples(
            self._num_fewshot, self._fewshot_path, read=self._read_example, project_dir=self._project_dir
        )
        self._rows = open_rows(self.path, project_dir=self._project_dir)
        return read_samples(self._rows, self._max_samples, lambda number, row: self._read(number, row, examples))

    def check(self, model: nn.Module, samples: Sequence[_Question]) -> None:
        """Rejects a model that is not a decoder, and questions that exceed its positions or embeddings."""
        reject_non_decoder(model)
        positions = room_after(model, 1)
        for each in samples:
            with located(self._rows, each.number):
                for context, choice in each.encoded:
                    check_tokens(model, [*context, *choice], self.tokenizer)
                if positions is not None and self.length_of(each) > positions + 1:  # the last token is not read
                    raise DataError(
                        f"the prompt with a choice has {self.length_of(each)} tokens, but the model has {positions} "
                        "positions. Shorten the row, lower num_fewshot, or use a model with more positions."
                    )

    def length_of(self, sample: _Question) -> int:
        """Returns the number of tokens of the longest choice with its context."""
        return max(len(context) + len(choice) for context, choice in sample.encoded)

    def run_batch(self, model: nn.Module, samples: Sequence[_Question], all_agree: AllAgree) -> list[dict[str, Any]]:
        """Scores all choices of the questions with one forward."""
        scores = score_continuations(model, [row for each in samples for row in each.encoded])
        results, start = [], 0
        for each in samples:
            own = [score.log_likelihood for score in scores[start : start + len(each.choices)]]
            start += len(each.choices)
            normalized = [value / length for value, length in zip(own, self._lengths(each), strict=True)]
            found, found_norm = own.index(max(own)), normalized.index(max(normalized))
            results.append(
                {
                    "row": each.number,
                    "prompt": each.prompt,
                    "choices": each.choices,
                    "answer": each.answer,
                    "prediction": found,
                    "log_likelihoods": own,
                    "acc": float(found == each.answer),
                    "acc_norm": float(found_norm == each.answer),
                }
            )
        return results

    def _lengths(self, question: _Question) -> list[int]:
        if self._normalize == "tokens":
            return [len(choice) for _, choice in question.encoded]
        scored = self._scored(question.choices)
        if self._normalize == "bytes":
            return [max(1, len(choice.encode())) for choice in scored]
        return [max(1, len(choice)) for choice in scored]

    def _read(self, number: int, row: Row, examples: Sequence[tuple[Any, str]]) -> _Question:
        choices, answer = self._choices_of(row)
        extra = _listed(choices)
        shown = examples_for(self.prompts.ask(row, extra), examples, self._num_fewshot)
        context = self.prompts.context(row, extra, shown)
        encoded = [self.prompts.encode_answer(context, each) for each in self._scored(choices)]
        return _Question(number, context.text, choices, answer, encoded)

    def _read_example(self, row: Row) -> tuple[Any, str]:
        choices, answer = self._choices_of(row)
        return self.prompts.ask(row, _listed(choices)), self._scored(choices)[answer]

    def _scored(self, choices: list[str]) -> list[str]:
        return list(_LETTERS[: len(choices)]) if self._answer_with == "letter" else choices

    def _choices_of(self, row: Row) -> tuple[list[str], int]:
        """Returns the choices of a row, and the number of the right one."""
        name, answer_name, labels_name = self._fields
        given = field_of(row, name)
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) < 2:
            raise DataError(f"{name} is {describe(given)}. Use a list of at least two texts.")
        if len(given) > len(_LETTERS):
            raise DataError(f"{name} has {len(given)} choices, more than the alphabet has letters.")
        choices = [text_of(each, f"{name}[{number}]") for number, each in enumerate(given)]
        if "" in choices:
            raise DataError(f"{name}[{choices.index('')}] is empty. Give every choice a text.")
        labels = None if labels_name is None else field_of(row, labels_name)
        if labels is not None and (not isinstance(labels, Sequence) or len(labels) != len(choices)):
            raise DataError(f"{labels_name} is {describe(labels)}, but there are {len(choices)} choices.")
        return choices, _number_of(field_of(row, answer_name), choices, labels, name=answer_name)


def _listed(choices: Sequence[str]) -> dict[str, str]:
    return {"choices": "\n".join(f"{letter}. {choice}" for letter, choice in zip(_LETTERS, choices, strict=False))}


def _number_of(answer: Any, choices: list[str], labels: Sequence[Any] | None, *, name: str) -> int:
    """Returns the number of the right choice, which is given as a number, or by its label, text or letter."""
    if labels is not None:
        known = [str(each) for each in labels]
        if str(answer) in known:
            return known.index(str(answer))
        raise DataError(f"{name} is {answer!r:.60}, which is not one of the labels {', '.join(known)}.")
    if isinstance(answer, str):
        if choices.count(answer) == 1:
            return choices.index(answer)
        if len(answer) == 1 and answer in _LETTERS[: len(choices)]:
            return _LETTERS.index(answer)
        answer = int(answer) if answer.strip().isdecimal() else answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        if 0 <= answer < len(choices):
            return answer
        raise DataError(
            f"{name} is {answer}, but there are {len(choices)} choices. Use a number from 0 to {len(choices) - 1}."
        )
    raise DataError(
        f"{name} is {answer!r:.60}, which is not a choice. Use a number from 0 to {len(choices) - 1}, the text of one "
        "choice, or its letter."
    )
