"""Checks the methods of a user's trainer or hook before anything is built.

Python ignores `def run_step` where the loop calls `train_step`. Misspelled names and names of other frameworks raise
here with the file and line.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from trainwright.errors import ConfigError
from trainwright.user_code.locations import location_of

logger = logging.getLogger(__name__)

OVERRIDE_POINTS = (
    *("forward", "train_step", "eval_step", "eval_begin", "eval_end", "train_loop_begin", "train_loop_end"),
    *("next_train_inputs", "next_eval_inputs", "post_init"),
)
"""What a user's trainer may override, beside the `build_*` methods."""

TRAINER_METHODS_ELSEWHERE: Mapping[str, str] = {
    "run_step": "train_step",
    "training_step": "train_step",
    "validation_step": "eval_step",
    "initialize": "post_init",
    "build_train_loader": "build_train_data",
    "build_test_loader": "build_eval_data",
}
"""What other frameworks call a method, and our name of it."""

OF_OTHERS: Mapping[str, str] = {
    "eval_reduce": "Override aggregate_logs(state, outputs) of a Task, which is given to the run as its task",
    "build_lr_scheduler": "Name the schedule in the config: trainer.schedule",
    "build_evaluator": "Name metrics in the config: evaluation.metrics; or override build_metrics() of a Task",
    "configure_optimizers": "Override build_optimizers(cls, build, model), a class method",
}
"""What other frameworks' trainers have and ours has no method for, and what is done instead."""

_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("train_step", "eval_step"), "batch"),
    **dict.fromkeys(("build_train_data", "build_eval_data"), "cls, build"),
}

_RESEMBLES = 0.85


def reject_wrong_methods(trainer_class: type, contract: type) -> None:
    """Rejects methods of a user's trainer with a misspelt name, another framework's, or that are no class methods.

    `contract` is Trainer itself. A name of another framework is fine where the trainer overrides ours as well, or
    calls it itself.
    """
    builders = [name for name in vars(contract) if name.startswith("build_")]
    for owner, name, method in _own_methods(trainer_class, contract):
        if name in builders and not isinstance(method, classmethod | staticmethod):
            raise ConfigError(
                f"{owner.__name__}.{name} is no class method, but parts are built before there is a trainer. Write "
                f"@classmethod above it, and (cls, build{', model' * (name == 'build_optimizers')}) as its arguments.",
                where=_where(method),
            )
        if hasattr(contract, name) or (
            name in {**TRAINER_METHODS_ELSEWHERE, **OF_OTHERS} and _is_called(trainer_class, name)
        ):
            continue
        ours = TRAINER_METHODS_ELSEWHERE.get(name)
        if ours is not None and _function(trainer_class, ours) is _function(contract, ours):
            call = f"{ours}({_ARGUMENTS.get(ours, '')})"
            raise ConfigError(f"{owner.__name__}.{name} is never called here. Call it {call}.", where=_where(method))
        if name in OF_OTHERS:
            raise ConfigError(f"{owner.__name__}.{name} is never called here. {OF_OTHERS[name]}.", where=_where(method))
        close = difflib.get_close_matches(name, (*OVERRIDE_POINTS, *builders), n=1, cutoff=_RESEMBLES)
        if close:
            raise ConfigError(
                f"{owner.__name__}.{name} is never called: Trainer has no such method. Did you mean {close[0]}? "
                "One of your own needs a name less like it.",
                where=_where(method),
            )


def _own_methods(trainer_class: type, contract: type) -> Iterator[tuple[type, str, Any]]:
    """Yields the public methods of a user's classes, down to Trainer: the class, the name, and what stands there."""
    for owner in trainer_class.__mro__:
        if owner is contract or owner is object:
            continue
        for name, value in vars(owner).items():
            is_method = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
            if is_method and not name.startswith("_"):
                yield owner, name, value


def _function(kind: type, name: str) -> Any:
    method = getattr(kind, name)
    return getattr(method, "__func__", method)  # each look at a class method makes another object


def _is_called(trainer_class: type, name: str) -> bool:
    """Does another method of the trainer's own classes name it?"""
    methods = (getattr(each, "__func__", each) for owner in trainer_class.__mro__ for each in vars(owner).values())
    return any(name in inspect.unwrap(each).__code__.co_names for each in methods if inspect.isfunction(each))


def _where(method: Callable[..., Any]) -> str | None:
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


HOOK_METHODS_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("on_train_begin", "on_train_start", "on_fit_start", "before_run"), "before_train"),
    **dict.fromkeys(("on_train_end", "on_fit_end", "after_run"), "after_train"),
    **dict.fromkeys(("on_step_begin", "on_train_batch_start", "before_iter", "before_train_iter"), "before_step"),
    **dict.fromkeys(("on_step_end", "on_train_batch_end", "after_iter", "after_train_iter"), "after_step"),
    **dict.fromkeys(("on_validation_start", "on_eval_begin"), "before_eval"),
    **dict.fromkeys(("on_evaluate", "on_validation_end", "on_eval_end"), "after_eval"),
    **dict.fromkeys(("on_save", "on_save_checkpoint", "after_save_checkpoint"), "after_save"),
    **dict.fromkeys(("on_exception", "on_error"), "close"),
}
"""What other frameworks call an event, and our name of it."""

EPOCHS = ("before_epoch", "after_epoch", "before_train_epoch", "after_train_epoch")
"""Events that nothing has here, beside those that are called on_…epoch…: a batch may hold samples of two epochs."""

_PREFIXES = ("on_", "before_", "after_")


def reject_uncalled(hook: object, contract: type, events: Collection[str], *, overrides: Collection[str]) -> None:
    """Rejects a method of a hook that has another framework's name, and warns of others that look like events.

    `contract` is Hook itself, `overrides` names the events that this hook has. What a hook calls itself is its own.
    """
    for name, method in _own_hook_methods(hook, contract):
        if name in events or not name.startswith(_PREFIXES) or _calls_method(hook, contract, name):
            continue
        owner, ours = type(hook).__name__, HOOK_METHODS_ELSEWHERE.get(name)
        if name in EPOCHS or "epoch" in name:
            raise ConfigError(
                f"{owner}.{name} is never called: epochs are no events here, for a batch may hold samples of two. Use "
                "after_step, where self.trainer.epoch says which one it is.",
                where=location_of(method),
            )
        if ours is not None and ours not in overrides:
            raise ConfigError(f"{owner}.{name} is never called here. Call it {ours}.", where=location_of(method))
        known = ", ".join(events)
        if not overrides:
            raise ConfigError(
                f"{owner}.{name} is never called, nor is anything else of {owner}: the events of a hook are {known}.",
                where=location_of(method),
            )
        logger.warning(
            "%s: %s.%s is no event of a hook, and is not called by the loop.", location_of(method), owner, name
        )


def _own_hook_methods(hook: object, contract: type) -> list[tuple[str, Any]]:
    """Returns the public methods of a hook's classes, down to Hook."""
    classes = [each for each in type(hook).__mro__ if each not in (contract, object)]
    found = {name: value for each in reversed(classes) for name, value in vars(each).items()}
    return [(name, value) for name, value in found.items() if inspect.isfunction(value) and not name.startswith("_")]


def _calls_method(hook: object, contract: type, name: str) -> bool:
    """Does another method of the hook name it?"""
    functions = [
        value
        for each in type(hook).__mro__
        if each not in (contract, object)
        for value in vars(each).values()
        if inspect.isfunction(value)
    ]
    return any(name in inspect.unwrap(each).__code__.co_names for each in functions)
