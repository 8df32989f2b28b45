"""Trainers and tasks that a program gives in code: what the run's config.yaml says of them.

    recorded          writes the words into the config by which the registry finds a class again
    GivenTrainer      and the others below stand for what nothing finds again; whoever reads the config and has no class
                      at hand is refused by its name, for the default in its place would train or measure another thing
    unnamed_trainer   is what build_trainer notes of its class, beside a config that is the caller's and stays as it is

A file's trainer and task are the config's own (registry.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from trainwright import registry
from trainwright.built_ins import BUILT_INS
from trainwright.config import Component, RunConfig
from trainwright.config.component import type_of
from trainwright.errors import ConfigError
from trainwright.loop.builder import Builder
from trainwright.loop.task import Task
from trainwright.loop.trainer import Trainer

IN_CODE = "in_code"
"""The trainer's option that holds the name of a class which nothing finds again."""
_FREE_METHODS = {"build_hooks", "build_writers"}
"""What may change between two starts of a run: it leaves the mathematics alone. A hook's state is asked for by name."""


class GivenTrainer(Trainer):
    """Stands in a config for a trainer that was given in code. The model is the config's, so that it can be loaded."""

    @classmethod
    def build_eval_data(cls, build: Builder) -> Mapping[str, Any]:
        """Refuses: the trainer's own methods would be missing in a training, and in an evaluation."""
        _refuse_trainer(build)


class GivenTrainerWithModel(GivenTrainer):
    """Stands for one that makes the model as well."""

    @classmethod
    def build_model(cls, build: Builder) -> torch.nn.Module:
        """Refuses: nobody knows the model."""
        _refuse_trainer(build)


class GivenTask(Task):
    """Stands in a config for a task that was given in code. The model is the config's, so that it can be loaded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def build_metrics(self) -> dict[str, Any]:
        """Refuses: the task's own methods would be missing in a training, and in an evaluation."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        short = self._name.rpartition(".")[2]
        raise ConfigError(
            f"task: that of this run was given in code ({self._name}), and no config tells how it was made. Give it "
            f"again: run_experiment(config, task={short}(…)); or name it in the config, with its arguments: "
            f"task: {{type: file.py:{short}}}."
        )


class GivenTaskWithModel(GivenTask):
    """Stands for one that makes the model as well."""

    def build_model(self) -> torch.nn.Module:
        """Refuses: nobody knows the model."""
        self._refuse()


def recorded(config: RunConfig, trainer_class: type[Trainer] | None, task: Task | None = None) -> RunConfig:
    """Returns the config with the class and the task that are used in place of its own; None: its own is used."""
    values: dict[str, Any] = {}
    if trainer_class is not None and not _is_the_config_s(config, trainer_class):
        words, name = _words_of(trainer_class, config), None
        if words is None:
            makes_model = trainer_class.build_model.__func__ is not Trainer.build_model.__func__  # type: ignore[attr-defined]  # of class methods
            words = _reference(GivenTrainerWithModel if makes_model else GivenTrainer)
            name = _reference(trainer_class).replace(":", ".")
        values["trainer.type"] = words
        if name is not None or IN_CODE in config.trainer.options:
            values[f"trainer.{IN_CODE}"] = name
    component = component_of(task, config)
    if component is not None and config.task is None:
        values["task"] = component
    return config.derive(values) if values else config


def unnamed_trainer(config: RunConfig, trainer_class: type[Trainer]) -> str | None:
    """Returns what a class is called that trains a run beside its config; None where the config names it."""
    name = trainer_named_in(recorded(config, trainer_class))
    return None if name == trainer_named_in(config) else name


def component_of(task: Task | None, config: RunConfig) -> Component | None:
    """Returns the section that stands for a task: its class where that has no constructor; else only its name."""
    if task is None or type(task) is Task:
        return None
    kind = type(task)
    words = _words_of(kind, config) if kind.__init__ is Task.__init__ else None
    if words is not None:
        return Component(words)
    stands_in = GivenTask if kind.build_model is Task.build_model else GivenTaskWithModel
    return Component(_reference(stands_in), name=_reference(kind).replace(":", "."))


def is_found_again(config: RunConfig) -> bool:
    """Does the config find the run's trainer and task?"""
    return config.trainer.options.get(IN_CODE) is None and (config.task is None or not _stands_in(config.task))


def trainer_named_in(config: RunConfig) -> str:
    """Returns what the config says of its trainer, for messages."""
    return str(config.trainer.options.get(IN_CODE) or config.trainer.type)


def task_named_in(config: RunConfig) -> str:
    """Returns what the config says of its task, for messages."""
    if config.task is None:
        return "the default"
    return str(config.task.arguments["name"]) if _stands_in(config.task) else config.task.type


def _stands_in(task: Component) -> bool:
    return task.type in (_reference(GivenTask), _reference(GivenTaskWithModel))


def _is_the_config_s(config: RunConfig, trainer_class: type[Trainer]) -> bool:
    """Does the config name this class already, one that has only other hooks and writers, or the door that made it?"""
    try:
        found = registry.find("trainer", config.trainer.type, project_dir=config.project_dir)
    except ConfigError:
        return False
    if not isinstance(found, type):
        return False
    if not issubclass(trainer_class, found):
        return False
    if _reference(trainer_class) == _reference(found):  # itself, or with a task that it was given (main.py)
        return True
    between = trainer_class.__mro__[: trainer_class.__mro__.index(found)]
    own = {name for each in between for name in vars(each) if not name.startswith("__")}
    return own <= _FREE_METHODS or found.__module__.startswith("trainwright.doors.")


def _words_of(kind: type, config: RunConfig) -> str | None:
    """Returns the words by which a later process finds a class; None where none would."""
    reference = _reference(kind)
    for name, built_in in (*BUILT_INS["trainer"].items(), *BUILT_INS["task"].items()):
        if built_in == reference:
            return name
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        return None
    words = type_of(kind)
    file, _, name = words.rpartition(":")
    if kind.__module__ == "__main__" and not _may_be_imported(file):
        return None
    if file.endswith(".py") and Path(file).is_relative_to(config.project_dir):
        return f"{Path(file).relative_to(config.project_dir).as_posix()}:{name}"  # the folder may be moved
    return words


def _may_be_imported(file: str) -> bool:
    """Can this program's file be read for its classes, without running the program once more?"""
    try:
        return "__main__" in Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False  # a notebook, or text that came through a pipe


def _reference(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _refuse_trainer(build: Builder) -> NoReturn:
    name = str(build.config.trainer.options.get(IN_CODE))
    short = name.rpartition(".")[2]
    raise ConfigError(
        f"trainer: that of this run was given in code ({name}), where nothing finds it again: inside of a function, in "
        'a notebook, or in a program without `if __name__ == "__main__":`. Give it again: '
        f"run_experiment(config, trainer={short}); or move it to the top level of a file of its own.",
        where=build.config.origin("trainer.type"),
    )
