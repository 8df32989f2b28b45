"""Looks at a hook before the run begins: methods that other frameworks would call, and this one never does.

`def on_step_end` is no mistake that Python sees: the run would train without it. Misspelt moments are hook.py's.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping
from typing import Any

from trainwright.errors import ConfigError
from trainwright.user_code import place_of

logger = logging.getLogger(__name__)

ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("on_train_begin", "on_train_start", "on_fit_start", "before_run"), "before_train"),
    **dict.fromkeys(("on_train_end", "on_fit_end", "after_run"), "after_train"),
    **dict.fromkeys(("on_step_begin", "on_train_batch_start", "before_iter", "before_train_iter"), "before_step"),
    **dict.fromkeys(("on_step_end", "on_train_batch_end", "after_iter", "after_train_iter"), "after_step"),
    **dict.fromkeys(("on_validation_start", "on_eval_begin"), "before_eval"),
    **dict.fromkeys(("on_evaluate", "on_validation_end", "on_eval_end"), "after_eval"),
    **dict.fromkeys(("on_save", "on_save_checkpoint", "after_save_checkpoint"), "after_save"),
    **dict.fromkeys(("on_exception", "on_error"), "close"),
}
"""What other frameworks call a moment, and our name of it."""

EPOCHS = ("before_epoch", "after_epoch", "before_train_epoch", "after_train_epoch")
"""Moments that nothing has here, beside those that are called on_…epoch…: a batch may hold samples of two epochs."""

_PREFIXES = ("on_", "before_", "after_")


def refuse_unheard(hook: object, contract: type, moments: Collection[str], *, overrides: Collection[str]) -> None:
    """Refuses a method of a hook that has another framework's name, and warns of others that look like moments.

    `contract` is Hook itself, `overrides` names the moments that this hook has. What a hook calls itself is its own.
    """
    for name, method in _own_methods(hook, contract):
        if name in moments or not name.startswith(_PREFIXES) or _is_called(hook, contract, name):
            continue
        owner, ours = type(hook).__name__, ELSEWHERE.get(name)
        if name in EPOCHS or "epoch" in name:
            raise ConfigError(
                f"{owner}.{name} is never called: epochs are no moments here, for a batch may hold samples of two. Use "
                "after_step, where self.trainer.epoch says which one it is.",
                where=place_of(method),
            )
        if ours is not None and ours not in overrides:
            raise ConfigError(f"{owner}.{name} is never called here. Call it {ours}.", where=place_of(method))
        known = ", ".join(moments)
        if not overrides:
            raise ConfigError(
                f"{owner}.{name} is never called, nor is anything else of {owner}: the moments of a hook are {known}.",
                where=place_of(method),
            )
        logger.warning(
            "%s: %s.%s is no moment of a hook, and is not called by the loop.", place_of(method), owner, name
        )


def _own_methods(hook: object, contract: type) -> list[tuple[str, Any]]:
    """Returns the public methods of a hook's classes, down to Hook."""
    classes = [each for each in type(hook).__mro__ if each not in (contract, object)]
    found = {name: value for each in reversed(classes) for name, value in vars(each).items()}
    return [(name, value) for name, value in found.items() if inspect.isfunction(value) and not name.startswith("_")]


def _is_called(hook: object, contract: type, name: str) -> bool:
    """Does another method of the hook name it?"""
    functions = [
        value
        for each in type(hook).__mro__
        if each not in (contract, object)
        for value in vars(each).values()
        if inspect.isfunction(value)
    ]
    return any(name in inspect.unwrap(each).__code__.co_names for each in functions)
