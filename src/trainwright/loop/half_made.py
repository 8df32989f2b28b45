"""Trainers whose constructor is a user's: what it left out is said in words, with the file and line to change."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from trainwright.errors import ConfigError, TrainwrightError
from trainwright.loop.builder import Surroundings

_GIVEN = (
    "config",
    "task",
    "model",
    "optimizer",
    "train_dataset",
    "validation_dataset",
    "surroundings",
    "checkpoint_exporter",
)
"""What `build_trainer` hands a constructor, by keyword; the last two reach Trainer's own through `**rest`."""

_CALL = "super().__init__(config, task, model, optimizer, train_dataset, validation_dataset, **rest)"


def refuse_wrong_constructor(trainer_class: type) -> None:
    """Refuses a trainer whose own constructor does not take what it is about to be handed."""
    name, owner, where = _constructor_of(trainer_class)
    if where is None:
        return
    try:
        inspect.signature(trainer_class).bind(**dict.fromkeys(_GIVEN))
    except TypeError as error:
        raise ConfigError(
            f"{owner}.__init__ does not take what trainers are built with ({error}), so {name} cannot be made. Write "
            "def __init__(self, config, task, model, optimizer, train_dataset=None, validation_dataset=None, "
            f"**rest), and in it {_CALL}.",
            where=where,
        ) from error


def take_surroundings(trainer: object, rest: dict[str, Any]) -> Surroundings:
    """Takes what `build_trainer` hands a trainer out of `rest`, or says that the constructor has not passed it on."""
    surroundings: Surroundings | None = rest.pop("surroundings", None)
    if surroundings is None:
        name, _, where = _constructor_of(type(trainer))
        raise TrainwrightError(
            f"{name} was made without its surroundings. Make it with build_trainer(config, {name}), and pass **rest on "
            "to super().__init__.",
            where=where,
        )
    if rest.get("checkpoint_exporter") is not None:
        name, _, where = _constructor_of(type(trainer))
        raise ConfigError(
            f"{name}.__init__: checkpoint_exporter has no effect, for the loop itself keeps the best checkpoint. Name "
            "the metric in the config, checkpoint: {keep_best: {metric: valid/loss, mode: min}}, and pass None on.",
            where=where,
        )
    return surroundings


def refuse_half_made(trainer: object, attribute: str) -> None:
    """Raises if a trainer's own constructor has not called that of Trainer by the time an attribute is read."""
    if torch.compiler.is_compiling():  # what Python would say is no part of a graph
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {attribute!r}")
    if "surroundings" in vars(trainer) or attribute.startswith("__"):
        return  # complete; Python itself may ask for a dunder of an object that is being copied
    name, owner, where = _constructor_of(type(trainer))
    if where is not None:
        raise TrainwrightError(
            f"{owner}.__init__ has not called super().__init__, so {name} has no `{attribute}`. Call {_CALL} first.",
            where=where,
        )


def _constructor_of(kind: type) -> tuple[str, str, str | None]:
    """Returns the class's name, that of the class whose `__init__` it has, and where that is; None for our own."""
    owner = next(each for each in kind.__mro__ if "__init__" in vars(each))
    code = getattr(owner.__init__, "__code__", None)  # type: ignore[misc]  # a class's own function, not a call
    is_ours = owner.__module__.startswith("trainwright.")
    where = None if is_ours or code is None else f"{code.co_filename}:{code.co_firstlineno}"
    return kind.__name__, owner.__name__, where
