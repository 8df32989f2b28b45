"""Checks that a user's function accepts the arguments it is about to get, before Python's own TypeError."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from trainwright.errors import ConfigError, DataError
from trainwright.user_code.locations import caller, location_of, name_of


@cache  # asked in every step; reading a signature costs 50 µs
def takes(forward: Callable[..., Any], name: str) -> bool:
    """Does this method take a keyword of that name?"""
    parameters = _parameters(forward)
    return parameters is None or name in parameters or _takes_any(parameters)


@cache
def reject_mismatch(forward: Callable[..., Any], names: tuple[str, ...]) -> None:
    """Rejects a batch with keys that a method does not take, or without those that it needs, naming both."""
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
            where=location_of(forward),
        )


def reject_wrong_call(function: Any, arguments: Sequence[str], *, role: str) -> None:
    """Rejects what is no function, or one that does not take these arguments, in this order.

    `role` says what it was given as, such as `forward_step_function` or `a hook's after_eval`.
    """
    wanted = f"({', '.join(arguments)})"
    if not callable(function):
        problem = f"{role} is {function!r}, not a function. Give one that takes {wanted}."
        raise ConfigError(problem, where=caller())
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # Python knows none: the call itself will tell
    try:
        signature.bind(*arguments)
    except TypeError as error:
        shown = f"({', '.join(str(each.replace(annotation=each.empty)) for each in signature.parameters.values())})"
        advice = f"(self{''.join(f', {name}' for name in arguments)})" if inspect.ismethod(function) else wanted
        raise ConfigError(
            f"{_spoken(function)}{shown} is called as {role}{wanted}, and that does not fit: {error}. Let it take "
            f"{advice}.",
            where=location_of(function),
        ) from error


def _spoken(function: Any) -> str:
    """What a user calls it: of a method with its class, of what stands in a function without that one."""
    name = getattr(function, "__qualname__", None) or name_of(function)
    return name.rpartition("<locals>.")[2]


def _parameters(forward: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """A method's parameters after `self`; None where Python cannot tell."""
    try:
        return dict(list(inspect.signature(forward).parameters.items())[1:])
    except (ValueError, TypeError):
        return None


def _takes_any(parameters: dict[str, inspect.Parameter]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in parameters.values())
