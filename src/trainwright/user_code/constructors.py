"""Checks the constructors of user trainers: what they accept, and whether they call `super().__init__`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NoReturn

from trainwright.errors import ConfigError, TrainwrightError
from trainwright.user_code.locations import is_user_code
from trainwright.user_code.methods import ATTRIBUTES_ELSEWHERE

_ARGUMENTS = ("config", "task", "model", "optimizer", "train_dataset", "validation_dataset", "context")
"""The keyword arguments that `build_trainer` passes; the last one reaches Trainer's own constructor through
`**rest`."""

_SUPER_CALL = "super().__init__(config, task, model, optimizer, train_dataset, validation_dataset, **rest)"


def check_constructor(trainer_class: type) -> None:
    """Raises if the constructor of a trainer does not accept its arguments."""
    name, owner, where = _constructor_of(trainer_class)
    if where is None:
        return
    try:
        inspect.signature(trainer_class).bind(**dict.fromkeys(_ARGUMENTS))
    except TypeError as error:
        raise ConfigError(
            f"{owner}.__init__ does not accept the arguments of a trainer ({error}), so {name} cannot be constructed. "
            "Write def __init__(self, config, task, model, optimizer, train_dataset=None, validation_dataset=None, "
            f"**rest) and call {_SUPER_CALL}.",
            where=where,
        ) from error


def reject_missing_context(trainer_class: type) -> NoReturn:
    """Raises for a trainer that was constructed directly, or whose constructor does not pass on `**rest`."""
    name, _, where = _constructor_of(trainer_class)
    raise TrainwrightError(
        f"{name} was constructed without its context. Construct it with build_trainer(config, {name}), and pass "
        "**rest to super().__init__.",
        where=where,
    )


def reject_unknown_arguments(trainer_class: type, arguments: Iterable[str]) -> NoReturn:
    """Raises for arguments of `super().__init__` that would have no effect."""
    name, _, where = _constructor_of(trainer_class)
    raise ConfigError(
        f"{name}.__init__ passes unknown arguments to super().__init__: {', '.join(arguments)}. They would have no "
        "effect. Settings belong in the config; what a trainer builds, such as data or hooks, in its build_* methods.",
        where=where,
    )


def check_constructed(trainer: object, attribute: str) -> None:
    """Raises if an attribute is missing because a user constructor has not called `super().__init__` yet."""
    if "context" in vars(trainer) or attribute.startswith("__"):
        return  # complete; Python may look up a special method of an object that is being copied
    name, owner, where = _constructor_of(type(trainer))
    if where is not None:
        raise TrainwrightError(
            f"{owner}.__init__ has not called super().__init__, so {name} has no attribute `{attribute}`. Call "
            f"{_SUPER_CALL} first.",
            where=where,
        )


def explain_attribute(trainer: object, attribute: str) -> None:
    """Raises an AttributeError with advice for attributes that trainers have in other frameworks."""
    instead = ATTRIBUTES_ELSEWHERE.get(attribute)
    # A property of the user's class whose body fails has an error of its own.
    if instead is not None and not hasattr(type(trainer), attribute):
        raise AttributeError(f"'{type(trainer).__name__}' object has no attribute '{attribute}'. {instead}.")


def _constructor_of(trainer_class: type) -> tuple[str, str, str | None]:
    """Returns the name of the class, the class that defines its `__init__`, and where; None for our own."""
    owner: Any = next(each for each in trainer_class.__mro__ if "__init__" in vars(each))
    code = getattr(owner.__init__, "__code__", None)
    where = None if not is_user_code(owner) or code is None else f"{code.co_filename}:{code.co_firstlineno}"
    return trainer_class.__name__, owner.__name__, where
