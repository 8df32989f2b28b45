"""Completions of prompts, compared with the right answers. `generate` in a run file."""

from __future__ import annotations

import inspect
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
from trainwright.data.chat import turn_end
from trainwright.data.order import mix_seed
from trainwright.data.sources.locations import Paths
from trainwright.data.tokenizer import TextTokenizer, load_tokenizer
from trainwright.errors import ComponentError, ConfigError, DataError
from trainwright.models.generation import Sampling, reject_non_decoder, room_after, sample_completions
from trainwright.registry import resolve as registry
from trainwright.user_code.locations import location_of

METRICS = ("exact_match", "contains")
"""The built-in metrics that compare a completion with an answer."""
TRUNCATED = "truncated"
"""The metric that every benchmark of this type has."""


@dataclass(frozen=True)
class _Task:
    number: int
    """The number of its row in the file, counted from 0."""
    row: Row
    prompt: str
    is_chat: bool
    ids: list[int]
    answers: list[str]


class Completion(NamedTuple):
    """The text of a completion."""

    text: str
    is_truncated: bool
    """True if it ended at `max_new_tokens`."""


def complete(
    model: nn.Module,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Collection[int],
    stop_texts: Sequence[str],
    all_agree: AllAgree = bool,
    **options: Any,
) -> list[Completion]:
    """Completes prompts as one batch, each up to a stop token or before the first of `stop_texts`.

    `options` are those of generation.py's `sample_completions`.
    """

    def decode(tokens: Sequence[int]) -> str:
        # A model may have more embeddings than the tokenizer has tokens.
        return tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size])

    def cut(text: str) -> tuple[str, bool]:
        starts = [start for each in stop_texts if (start := text.find(each)) >= 0]
        return (text[: min(starts)], True) if starts else (text, False)

    def ended_rows(tokens: Tensor) -> Tensor:
        return torch.tensor([cut(decode(row))[1] for row in tokens.tolist()])

    made = sample_completions(
        model,
        prompts,
        stop_ids=stop_ids,
        ended_rows=ended_rows if stop_texts else None,
        all_stopped=all_agree,
        **options,
    )
    texts = [cut(decode(tokens)) for tokens in made.rows()]
    return [
        Completion(text, not (is_stopped or is_cut))
        for (text, is_cut), is_stopped in zip(texts, made.is_stopped.tolist(), strict=True)
    ]


class Generate(Benchmark):
    """The share of completions that agree with the answer, and `truncated`, the share that `max_new_tokens` cut off.

    A row of `path` (.jsonl, .csv, .parquet) has the fields that `question` and `answer` name; if the answer is a list,
    any of its items is accepted. `prompt` is text with fields of the row in braces. A completion ends at the end token,
    the end of the turn of a chat, or before one of the texts in `stop`. With `temperature` 0, each token is the most
    likely one; above 0, it is sampled with random numbers that depend on `seed` and the number of the row.

    `metric` is exact_match, contains, a function `file.py:name(prediction, answer, row)` that returns a number, or a
    list of those. `extract` is a regular expression for the part of a completion that is compared, its first group or
    all of its last match; `extract_answer` is one for the answer. Spaces around both are removed. `chat` and
    the settings of few-shot examples are those of multiple_choice.
    """

    def __init__(
        self,
        path: Paths,
        tokenizer: str | TextTokenizer,
        *,
        question: str = "question",
        answer: str = "answer",
        prompt: str | None = None,
        delimiter: str = " ",
        metric: str | Sequence[str] = "exact_match",
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        extract: str | None = None,
        extract_answer: str | None = None,
        ignore_case: bool = False,
        ignore_punctuation: bool = False,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
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
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens: {max_new_tokens!r} is not a number of tokens. Use 1 or more.")
        for name, value in (("top_k", top_k), ("top_p", top_p), ("seed", seed or None)):
            if value is not None and not temperature:
                raise ConfigError(f"{name}: has no effect with temperature 0. Set temperature, or remove it.")
        self.path = path
        self.tokenizer = load_tokenizer(tokenizer, project_dir=project_dir)
        self.prompts = PromptTemplate(
            tokenizer=self.tokenizer,
            template=("{question}" if chat else "Question: {question}\nAnswer:") if prompt is None else prompt,
            question=question,
            description=description,
            is_chat=chat,
            chat_template=chat_template,
            delimiter=delimiter,
            fewshot_delimiter=fewshot_delimiter,
        )
        self._functions = _metrics_of([metric] if isinstance(metric, str) else list(metric), project_dir)
        self.metrics = {**dict.fromkeys(self._functions, "max"), TRUNCATED: "min"}
        self._answer = answer
        self._max_new_tokens = max_new_tokens
        self._stop_texts = [each for each in ([stop] if isinstance(stop, str) else stop) if each]
        self._extract, self._extract_answer = _pattern(extract, "extract"), _pattern(extract_answer, "extract_answer")
        self._ignore_case, self._ignore_punctuation = ignore_case, ignore_punctuation
        self._sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        Sampling(max_new_tokens=max_new_tokens, **self._sampling)  # rejects invalid values before the first step
        self._seed = seed
        self._num_fewshot, self._fewshot_path = num_fewshot, fewshot_path
        self._max_samples = max_samples
        self._project_dir = project_dir
        self._rows: Any = None
        self._stop_ids: frozenset[int] = frozenset()

    def load(self) -> list[_Task]:
        """Reads and tokenizes the prompts."""
        self.prompts = self.prompts.with_template(self._project_dir)
        examples = read_examples(
            self._num_fewshot, self._fewshot_path, read=self._read_example, project_dir=self._project_dir
        )
        self._rows = open_rows(self.path, project_dir=self._project_dir)
        tasks = read_samples(self._rows, self._max_samples, lambda number, row: self._read(number, row, examples))
        eos = self.tokenizer.eos_id
        self._stop_ids = frozenset() if eos is None else frozenset({eos})
        if any(each.is_chat for each in tasks):
            stop_ids, stop_texts = turn_end(self.tokenizer, self.prompts.chat_template)
            self._stop_ids |= stop_ids
            self._stop_texts += [each for each in stop_texts if each not in self._stop_texts]
        return tasks

    def check(self, model: nn.Module, samples: Sequence[_Task]) -> None:
        """Rejects a model that is not a decoder, and prompts that exceed its positions or embeddings."""
        reject_non_decoder(model)
        for each in samples:
            room = room_after(model, len(each.ids))
            with located(self._rows, each.number):
                check_tokens(model, each.ids, self.tokenizer)
                if room is not None and self._max_new_tokens > room:
                    raise DataError(
                        f"the prompt has {len(each.ids)} tokens, after which the model has positions for {room}, but "
                        f"max_new_tokens is {self._max_new_tokens}. Lower it or num_fewshot, shorten the row, or use a "
                        "model with more positions."
                    )

    def length_of(self, sample: _Task) -> int:
        """Returns the number of tokens of the prompt."""
        return len(sample.ids)

    def run_batch(self, model: nn.Module, samples: Sequence[_Task], all_agree: AllAgree) -> list[dict[str, Any]]:
        """Completes the prompts together."""
        texts = complete(
            model,
            self.tokenizer,
            [each.ids for each in samples],
            seeds=[mix_seed(self._seed, each.number) for each in samples],
            max_new_tokens=self._max_new_tokens,
            stop_ids=self._stop_ids,
            stop_texts=self._stop_texts,
            all_agree=all_agree,
            **self._sampling,
        )
        return [self._result(each, one) for each, one in zip(samples, texts, strict=True)]

    def _result(self, task: _Task, completion: Completion) -> dict[str, Any]:
        prediction = _found(self._extract, completion.text)
        values = {}
        for name, function in self._functions.items():
            if name in METRICS:
                one = self._comparable(prediction)
                scores = [float(function(one, self._comparable(answer), task.row)) for answer in task.answers]
            else:
                scores = [_number(function(prediction, answer, task.row), name, function) for answer in task.answers]
            values[name] = max(scores)
        return {
            "row": task.number,
            "prompt": task.prompt,
            "completion": completion.text,
            "prediction": prediction,
            "answer": task.answers[0] if len(task.answers) == 1 else task.answers,
            **values,
            TRUNCATED: float(completion.is_truncated),
        }

    def _comparable(self, text: str) -> str:
        if self._ignore_case:
            text = text.lower()
        if self._ignore_punctuation:
            text = text.translate(str.maketrans("", "", string.punctuation))
        return text.strip()

    def _read(self, number: int, row: Row, examples: Sequence[tuple[Any, str]]) -> _Task:
        shown = examples_for(self.prompts.ask(row, {}), examples, self._num_fewshot)
        context = self.prompts.context(row, {}, shown)
        ids = self.prompts.encode(context.text, is_chat=context.is_chat) or self.prompts.first_token()
        return _Task(number, row, context.text, context.is_chat, ids, self._answers_of(row))

    def _read_example(self, row: Row) -> tuple[Any, str]:
        return self.prompts.ask(row, {}), self._given_answers(row)[0]

    def _given_answers(self, row: Row) -> list[str]:
        given = field_of(row, self._answer)
        listed = given if isinstance(given, list) else [given]
        if not listed:
            raise DataError(f"{self._answer} is an empty list. Provide at least one answer.")
        return [text_of(each, self._answer) for each in listed]

    def _answers_of(self, row: Row) -> list[str]:
        answers = []
        for each in self._given_answers(row):
            found = _found(self._extract_answer, each)
            if not found and each.strip():
                raise DataError(f"extract_answer finds nothing in {self._answer}, {each!r:.60}.")
            if not found:
                raise DataError(f"{self._answer} is empty. Give every row an answer.")
            answers.append(found)
        return answers


def _found(pattern: re.Pattern[str] | None, text: str) -> str:
    """Returns the last match of a pattern, its first group if it has one; "" without any."""
    if pattern is None:
        return text.strip()
    matches = [*pattern.finditer(text)]
    if not matches:
        return ""
    return (matches[-1][1 if pattern.groups else 0] or "").strip()


def _pattern(text: str | None, name: str) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"{name}: {text!r} is not a regular expression: {error}.") from error


def _metrics_of(names: Sequence[str], project_dir: str | Path | None) -> dict[str, Callable[..., Any]]:
    """Returns the metrics by the names of their values; that of a function is the function's."""
    if not names:
        raise ConfigError(f"metric: is an empty list. Use {' or '.join(METRICS)}, or file.py:function.")
    built_in: Mapping[str, Callable[..., Any]] = {
        "exact_match": lambda prediction, answer, row: prediction == answer,
        "contains": lambda prediction, answer, row: answer in prediction,
    }
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        own = name.rpartition(":")[2]
        if own in found or own == TRUNCATED or (":" in name and own in METRICS):
            raise ConfigError(
                f"metric: {name!r} has the name of another metric, {own}. Rename the function, or remove it."
            )
        if name in built_in:
            found[name] = built_in[name]
            continue
        if ":" not in name:
            raise ConfigError(f"metric: {name!r} is unknown. Use {', '.join(METRICS)}, or file.py:function.")
        try:
            function = registry.find("metric", name, project_dir=project_dir or ".")
        except ComponentError as error:
            raise ConfigError(f"metric: {error.problem}") from error
        try:
            inspect.signature(function).bind("prediction", "answer", {})
        except TypeError as error:
            raise ConfigError(
                f"metric: {name} must accept (prediction, answer, row): {error}.", where=location_of(function)
            ) from error
        found[own] = function
    return found


def _number(value: Any, name: str, function: Callable[..., Any]) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"metric: {name} returned a {type(value).__name__}. Return a number, or True or False.",
            where=location_of(function),
        ) from error
