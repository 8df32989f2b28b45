"""Whether a batch fits the forward that it is about to be handed to, said before Python's bare TypeError would."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from trainwright.errors import DataError


@cache  # asked in every step; reading a signature costs 50 µs
def takes(forward: Callable[..., Any], name: str) -> bool:
    """Does this method take a keyword of that name?"""
    parameters = _parameters(forward)
    return parameters is None or name in parameters or _takes_any(parameters)


@cache
def refuse_mismatch(forward: Callable[..., Any], names: tuple[str, ...]) -> None:
    """Refuses a batch with keys that a method does not take, or without those that it needs, naming both."""
    parameters = _parameters(forward)
    if parameters is None:
        return
    extra = [] if _takes_any(parameters) else [name for name in names if name not in parameters]
    missing = [
        each.name
        for each in parameters.values()
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and each.name not in names
    ]
    if extra or missing:
        problems = [f"has no parameter {', '.join(extra)}"] * bool(extra) + [f"needs {', '.join(missing)}"] * bool(
            missing
        )
        raise DataError(
            f"{forward.__qualname__} {' and '.join(problems)}: the batch has {', '.join(names) or 'only labels'}, "
            f"and it takes {', '.join(parameters) or 'nothing'}. Rename one side, or let the collator choose the keys.",
            where=_place(forward),
        )


def _parameters(forward: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """A method's parameters after `self`; None where Python cannot tell."""
    try:
        return dict(list(inspect.signature(forward).parameters.items())[1:])
    except (ValueError, TypeError):
        return None


def _takes_any(parameters: dict[str, inspect.Parameter]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _place(forward: Callable[..., Any]) -> str | None:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"
