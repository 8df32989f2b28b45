"""Checks that a user function accepts its arguments, before Python raises a TypeError."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from trainwright.errors import ConfigError, DataError
from trainwright.user_code.locations import caller, location_of, name_of, parameters_of


@cache  # called in every step; reading a signature takes 50 µs
def accepts_argument(forward: Callable[..., Any], name: str) -> bool:
    """Returns True if a method accepts a keyword argument of this name."""
    parameters = parameters_of(forward)
    return parameters is None or name in parameters or _accepts_any(parameters.values())


def first_argument(method: Callable[..., Any]) -> str | None:
    """Returns the name of a method's first parameter after `self` that can be given by name; None if it has none."""
    parameters = list((parameters_of(method) or {}).values())[1:]
    if not parameters or parameters[0].kind is not parameters[0].POSITIONAL_OR_KEYWORD:
        return None
    return parameters[0].name


@cache
def reject_mismatch(forward: Callable[..., Any], names: tuple[str, ...]) -> None:
    """Rejects a batch with keys that a method does not accept, or without those that it requires."""
    signature = parameters_of(forward)
    if signature is None:
        return
    parameters = list(signature.values())[1:]  # without `self`
    accepted = [each.name for each in parameters]
    extra = [] if _accepts_any(parameters) else [name for name in names if name not in accepted]
    missing = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and each.name not in names
    ]
    problems = [f"has no parameter {', '.join(extra)}"] if extra else []
    problems += [f"requires {', '.join(missing)}"] if missing else []
    if problems:
        target = " The target of trainer.loss is the field labels." if extra and "labels" not in names else ""
        raise DataError(
            f"{forward.__qualname__} {' and '.join(problems)}: the batch has {', '.join(names) or 'only labels'}, and "
            f"the method accepts {', '.join(accepted) or 'nothing'}. Rename the parameter or the field, or let the "
            f"collator select the keys.{target}",
            where=location_of(forward),
        )


def reject_wrong_call(function: Any, arguments: Sequence[str], *, role: str) -> None:
    """Rejects an object that is not a function, or does not accept these arguments in this order.

    `role` says where it was passed, such as `forward_step_function` or `a hook's after_eval`.
    """
    expected = f"({', '.join(arguments)})"
    if not callable(function):
        raise ConfigError(f"{role} is {function!r}, not a function. Pass a function of {expected}.", where=caller())
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = (getattr(function, "__qualname__", None) or name_of(function)).rpartition("<locals>.")[2]
        shown = f"({', '.join(str(each.replace(annotation=each.empty)) for each in signature.parameters.values())})"
        advice = f"(self{''.join(f', {name}' for name in arguments)})" if inspect.ismethod(function) else expected
        raise ConfigError(
            f"{name}{shown} is called as {role}{expected}, which does not match: {error}. Let it accept {advice}.",
            where=location_of(function),
        ) from error


def _accepts_any(parameters: Any) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in parameters)
