"""Rewards of completions: calls those of a config, validates their results, and defines three general ones.

A reward is any callable with keyword parameters among `prompts`, `completions`, `completion_ids` and the names of the
rows' other fields, each a list with one entry per completion. It returns a list of numbers, with None where it does not
apply. trainers/grpo.py converts rewards to advantages.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.config.trainer_options import REWARD_ARGUMENTS
from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.user_code.locations import UserFiles, line_of_traceback, location_of, parameters_of


@dataclass(frozen=True)
class Samples:
    """Completions with their prompts and rows, which all have one entry per completion."""

    prompts: Sequence[Any]
    """Texts, or lists of messages."""
    completions: Sequence[Any]
    """Texts, or lists with the assistant's message if the prompt has messages."""
    completion_ids: Sequence[Sequence[int]]
    """The tokens, including the one that ended the completion."""
    rows: Sequence[Mapping[str, Any]]

    def arguments(self) -> dict[str, list[Any]]:
        """Returns the possible arguments of a reward; a field that some rows lack is None for them."""
        names = dict.fromkeys(name for row in self.rows for name in row if name != "prompt")
        columns = {name: [row.get(name) for row in self.rows] for name in names}
        own = (list(self.prompts), list(self.completions), [list(each) for each in self.completion_ids])
        return {**columns, **dict(zip(REWARD_ARGUMENTS, own, strict=True))}


@dataclass(frozen=True)
class Reward:
    """A reward of the config."""

    name: str
    """Its name in the log."""
    weight: float
    function: Callable[..., Any]

    def score(self, samples: Samples, users: UserFiles) -> list[float]:
        """Returns the reward of each completion, NaN where it does not apply."""
        given = self._select(samples.arguments())
        try:
            found = self.function(**given)
        except TrainwrightError:
            raise
        except Exception as error:
            where = line_of_traceback(error, users) or location_of(self.function)
            raise TrainwrightError(
                f"The reward {self.name} raised {type(error).__name__}: {error}", where=where
            ) from error
        return self._check(found, len(samples.rows))

    def _select(self, arguments: Mapping[str, list[Any]]) -> Mapping[str, list[Any]]:
        """Returns the arguments that the function accepts; raises if it needs others."""
        parameters = (parameters_of(self.function) or {}).values()
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            accepted = dict(arguments)
        else:
            accepted = {one.name: arguments[one.name] for one in parameters if one.name in arguments}
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        required = [one.name for one in parameters if one.default is one.empty and one.kind not in kinds]
        missing = [name for name in required if name not in accepted]
        if missing:
            raise DataError(
                f"The reward {self.name} needs {', '.join(missing)}, but it can be called with "
                f"{', '.join(arguments)}: {', '.join(REWARD_ARGUMENTS)}, and the fields of the rows besides prompt. "
                "Add the field to the data, or rename the parameter.",
                where=location_of(self.function),
            )
        return accepted

    def _check(self, found: Any, expected: int) -> list[float]:
        where = location_of(self.function)
        values = found.tolist() if hasattr(found, "tolist") else found
        if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
            raise TrainwrightError(
                f"The reward {self.name} returned a {type(found).__name__}. Return a list with one number for each of "
                f"the {expected} completions.",
                where=where,
            )
        if len(values) != expected:
            raise TrainwrightError(
                f"The reward {self.name} returned {len(values)} rewards for {expected} completions. Return one for "
                "each, and None where it does not apply.",
                where=where,
            )
        for number, value in enumerate(values):
            is_number = value is None or (hasattr(value, "__float__") and not isinstance(value, str))
            if not is_number or (value is not None and not math.isfinite(float(value))):
                raise TrainwrightError(
                    f"The reward {self.name} returned {value!r:.40} for completion {number} (counted from 0). Return "
                    "a finite number, or None where it does not apply.",
                    where=where,
                )
        return [math.nan if value is None else float(value) for value in values]


def text_of(completion: Any) -> str:
    """Returns a completion as text: a text itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


class ExactMatch:
    """1 for a completion that equals the text in a field of its row, otherwise 0; spaces around both are ignored.

    `pattern` is a regular expression whose first group, or whole match, is compared instead of the completion; of
    several matches the last counts, and without one the reward is 0.

    >>> ExactMatch(pattern=r"= (\\d+)")(completions=["1 + 1 = 2", "3"], answer=["2", "3"])
    [1.0, 0.0]
    """

    def __init__(self, *, field: str = "answer", pattern: str | None = None) -> None:
        self.field = field
        self.pattern = None if pattern is None else _compile(pattern)

    def __call__(self, *, completions: Sequence[Any], **columns: Sequence[Any]) -> list[float]:
        """Returns a reward for each completion."""
        if self.field not in columns:
            raise DataError(
                f'The reward exact_match compares with the field "{self.field}", but the rows have '
                f"{', '.join(name for name in columns if name not in REWARD_ARGUMENTS) or 'no fields'} besides prompt. "
                "Set field, or add it to the data."
            )
        return [
            float(self._extract(text_of(completion)) == str(expected).strip())
            for completion, expected in zip(completions, columns[self.field], strict=True)
        ]

    def _extract(self, text: str) -> str | None:
        if self.pattern is None:
            return text.strip()
        matches = list(self.pattern.finditer(text))
        if not matches:
            return None
        found: str | None = matches[-1].group(1 if self.pattern.groups else 0)
        return None if found is None else found.strip()


class Pattern:
    """1 for a completion that fully matches a regular expression, otherwise 0; a dot matches line breaks too.

    >>> Pattern(pattern=r"<think>.*</think>.+")(completions=["<think>1 + 1</think>2", "2"])
    [1.0, 0.0]
    """

    def __init__(self, *, pattern: str) -> None:
        self.pattern = _compile(pattern)

    def __call__(self, *, completions: Sequence[Any]) -> list[float]:
        """Returns a reward for each completion."""
        return [float(self.pattern.fullmatch(text_of(each)) is not None) for each in completions]


class Overlong:
    """0 up to `max_length - margin` tokens, then decreasing linearly to -1 at `max_length` (DAPO's overlong
    punishment).

    >>> Overlong(max_length=10, margin=4)(completion_ids=[[1] * 6, [1] * 8, [1] * 12])
    [0.0, -0.5, -1.0]
    """

    def __init__(self, *, max_length: int, margin: int) -> None:
        if not 0 < margin <= max_length:
            raise ConfigError(f"margin is {margin}. Use a number of tokens from 1 to max_length, {max_length}.")
        self.max_length = max_length
        self.margin = margin

    def __call__(self, *, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        """Returns a reward for each completion."""
        start = self.max_length - self.margin
        return [-min(max(len(ids) - start, 0) / self.margin, 1.0) + 0.0 for ids in completion_ids]


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"pattern is not a regular expression: {error}: {pattern!r:.80}.") from error
