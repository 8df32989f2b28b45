"""Error messages for settings: what is wrong, what was given, what to do.

Converts pydantic's errors to one sentence each. schema.py adds the location of the setting.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from trainwright.config.elsewhere import advice_elsewhere
from trainwright.config.yaml_text import KeyPath, Origin
from trainwright.errors import ConfigError


class Problem(NamedTuple):
    """A problem with the setting at `path`; `text` is a full sentence without the path."""

    path: KeyPath
    text: str


def dotted(path: KeyPath) -> str:
    """Return the path in the form of overrides: `hooks.0.steps`."""
    return ".".join(map(str, path))


def describe(value: Any) -> str:
    """Return a short description of `value` in YAML terms."""
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        shown = json.dumps(value if len(value) <= 60 else value[:57] + "...", ensure_ascii=False)
        return f"the text {shown}"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value))}" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}" if value else "an empty list"
    return repr(value)


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known word that is most similar to `word`, or None."""
    plain = {name.lower().replace("-", "_"): name for name in known}
    wanted = word.lower().replace("-", "_")
    found = difflib.get_close_matches(wanted, plain, cutoff=cutoff)
    # A wrong letter is more likely than an extra one: adamv means adamw, although difflib ranks adam higher.
    found.sort(key=lambda name: len(name) != len(wanted) or sum(map(str.__ne__, name, wanted)) > 1)
    return plain[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ` Did you mean "x"?` with a leading space, or "" if no known word is similar."""
    match = nearest(word, known, cutoff=cutoff)
    return f' Did you mean "{match}"?' if match else ""


def suggest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `Did you mean "x"? Known: …`, or only the known words if none is similar."""
    names = list(known)
    if not names:
        return "Nothing can be set here; remove it."
    return f"{did_you_mean(word, names, cutoff=cutoff)} Known: {', '.join(names)}.".lstrip()


def reject(path: KeyPath, text: str, value: Any = None) -> ValidationError:
    """Return the error with which a validator rejects `value` at `path`, relative to its field."""
    return reject_all([Problem(path, text)], value)


def reject_all(problems: Iterable[Problem], value: Any = None) -> ValidationError:
    """Return one error for several problems of one field."""
    details = [
        InitErrorDetails(
            # Passed as an argument, because pydantic formats braces in the message.
            type=PydanticCustomError("rejected", "{sentence}", {"sentence": problem.text}),
            loc=problem.path,
            input=value,
        )
        for problem in problems
    ]
    return ValidationError.from_exception_data("settings", details)


def explain(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """Return the errors of a validation of `root`, one sentence each."""
    return [_explain_one(details, root) for details in error.errors(include_url=False)]


def raise_all(problems: list[Problem], origin_of: Callable[[KeyPath], Origin | None]) -> None:
    """Raise one ConfigError for all problems, one per line, in the order of the file; returns if there are none."""
    found = [(origin_of(problem.path), problem) for problem in problems]
    found.sort(key=lambda pair: (pair[0] is None, pair[0] or Origin("", 0)))
    lines = [_sentence(problem) for _, problem in found]
    for index, (where, _) in enumerate(found[1:], start=1):
        lines[index] = f"{where}: {lines[index]}" if where is not None else lines[index]
    if lines:
        raise ConfigError("\n".join(lines), where=found[0][0])


def _sentence(problem: Problem) -> str:
    return f"{dotted(problem.path)}: {problem.text}" if problem.path else problem.text


_EXPECTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
    "literal_error": "{expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


def _explain_one(details: ErrorDetails, root: type[BaseModel]) -> Problem:
    # Entries in brackets ("[key]" for a wrong key, the tags of a union) are pydantic's, not keys of the file.
    path = tuple(key for key in details["loc"] if not str(key).startswith("["))
    kind, value = details["type"], details["input"]
    if kind == "rejected":
        return Problem(path, details["msg"])
    if kind == "extra_forbidden":
        # A name such as `strategy` is clear beside the sections only.
        advice = advice_elsewhere(str(path[-1]), is_own=len(path) > 1) or suggest(
            str(path[-1]), _known_keys(path[:-1], root)
        )
        return Problem(path, f"there is no such setting. {advice}")
    if kind == "missing":
        return Problem(path, f"is missing. Add it; got {describe(value)}.")
    if kind not in _EXPECTED:
        return Problem(path, f"{details['msg']}; got {describe(value)}.")
    expected = _EXPECTED[kind].format(**details.get("ctx", {})).replace("'", "")
    return Problem(path, f"must be {expected}, got {describe(value)}.{_advice(kind, value)}")


def _advice(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        return " Put it in quotes to make it text."
    if kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        return " Remove the quotes."
    if kind == "tuple_type":
        return " Use [] for none." if value is None else f" Write [{value}]." if isinstance(value, str) else ""
    return ""


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def _known_keys(path: KeyPath, root: type[BaseModel]) -> list[str]:
    """Return the fields of the section at `path` of `root`."""
    section = root
    for key in path:
        field = section.model_fields.get(str(key))
        # A name that is not a field is a key of a mapping of sections, such as trainer.optimizers.
        section = (_section_in(field.annotation) if field is not None else None) or section
    return list(section.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _section_in(each))), None)
