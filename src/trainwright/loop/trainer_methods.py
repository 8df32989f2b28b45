"""Looks at a user's trainer before anything is built: methods that nobody would call, or not as they expect.

Python says nothing of `def run_step` where the loop calls `train_step`: the run would train without it. What the
constructor of a trainer left out is half_made.py's.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainwright.errors import ConfigError

OVERRIDE_POINTS = (
    *("forward", "train_step", "eval_step", "eval_begin", "eval_end", "train_loop_begin", "train_loop_end"),
    *("next_train_inputs", "next_eval_inputs", "post_init"),
)
"""What a user's trainer may override, beside the `build_*` methods."""

ELSEWHERE: Mapping[str, str] = {
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


def refuse_wrong_methods(trainer_class: type, contract: type) -> None:
    """Refuses methods of a user's trainer with a misspelt name, another framework's, or that are no class methods.

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
        if hasattr(contract, name) or ((name in ELSEWHERE or name in OF_OTHERS) and _is_called(trainer_class, name)):
            continue
        ours = ELSEWHERE.get(name)
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
