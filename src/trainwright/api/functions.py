"""`train(model, data, …)`: training from a notebook or a short script.

training_main.py and arguments.py have `training_main` and `get_args`, SwissArmyTransformer's form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainwright.build.run import build_trainer
from trainwright.config import Node, Origin, RunConfig
from trainwright.config.interpolation import escape_plain
from trainwright.errors import ConfigError, shorten_tracebacks
from trainwright.log import show_log
from trainwright.loop.hook import Hook
from trainwright.loop.task import Task
from trainwright.loop.trainer import Builder, Trainer
from trainwright.user_code.locations import caller
from trainwright.user_code.signatures import reject_wrong_call

Forward = Callable[[torch.nn.Module, Any], Any]


class FunctionTask(Task):
    """A task whose forward is a function `forward(model, batch)`."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """Calls the function."""
        return self._forward(model, batch)


class PartsTrainer(Trainer):
    """The trainer in the config of a run of `train`, whose model and data exist in the program only."""

    @classmethod
    def build_model(cls, build: Builder) -> torch.nn.Module:
        """Raises if the run is loaded from its config."""
        raise ConfigError(
            "This run was created by train(model, data, …), whose model and data are not in the config. Call train "
            "again with the same arguments: if the run has ended, it returns the trainer without training, with the "
            "trained model and .evaluate().",
            where=build.config.origin("trainer.type"),
        )


TRAINER = f"{PartsTrainer.__module__}:{PartsTrainer.__qualname__}"


def train(
    model: torch.nn.Module,
    data: Any,
    *,
    forward: Forward | None = None,
    eval_data: Any = None,
    collator: Callable[[list[Any]], Any] | None = None,
    hooks: Sequence[Hook] = (),
    max_steps: int,
    batch_size: int = 32,
    lr: float = 1e-3,
    name: str = "notebook",
    overrides: Sequence[str] = (),
    fresh: bool = False,
) -> Trainer:
    """Trains a model on a dataset and returns the trainer, which has the model, the step and the storage.

    `forward(model, batch)` returns a loss, or (loss, metrics); by default the model is called with the batch.
    `eval_data` is a dataset, or several by name. `overrides` sets any other setting, as on the command line:
    `overrides=["trainer.schedule={type: cosine}"]`. Calling `train` again resumes the run of that name;
    `fresh=True` starts over.
    """
    shorten_tracebacks()
    if forward is not None:
        reject_wrong_call(forward, ("model", "batch"), role="forward")
    if collator is not None:
        reject_wrong_call(collator, ("samples",), role="collator")
    eval_sets = eval_data if isinstance(eval_data, Mapping) else {} if eval_data is None else {"eval": eval_data}

    class GivenParts(PartsTrainer):
        @classmethod
        def build_task(cls, build: Builder) -> Task:
            return build.task() if forward is None else FunctionTask(forward)

        @classmethod
        def build_model(cls, build: Builder) -> torch.nn.Module:
            return model

        @classmethod
        def build_train_data(cls, build: Builder) -> Any:
            return data

        @classmethod
        def build_eval_data(cls, build: Builder) -> Mapping[str, Any]:
            return eval_sets

        @classmethod
        def build_collator(cls, build: Builder) -> Any:
            return build.collator() if collator is None else collator

        @classmethod
        def build_hooks(cls, build: Builder) -> list[Hook]:
            return [*build.hooks(), *hooks]

    show_log()
    config = _config_of(name, max_steps=max_steps, batch_size=batch_size, lr=lr, overrides=overrides)
    trainer = build_trainer(config, GivenParts, fresh=fresh)
    trainer.train()
    return trainer


def _config_of(name: str, *, max_steps: int, batch_size: int, lr: float, overrides: Sequence[str]) -> RunConfig:
    settings = {
        "name": _given("name", name),
        "data": {
            "train": _given("data", None),
            "eval": _given("eval_data", {}),
        },  # in the program; the origins are for errors
        "trainer": {
            "type": TRAINER,
            "max_steps": _given("max_steps", max_steps),
            "global_batch_size": _given("batch_size", batch_size),
            "optimizer": {"type": "adamw", "lr": _given("lr", lr)},
        },
    }
    config = RunConfig.from_dict(settings, overrides, where=Origin.parse(caller()))
    if config.trainer.type != TRAINER:
        raise ConfigError(
            f"trainer.type: {config.trainer.type} has no effect, because train(…) defines the trainer. Remove it, or "
            "use run_experiment(config, trainer=MyTrainer).",
            where=config.origin("trainer.type"),
        )
    return config


def _given(argument: str, value: Any) -> Node:
    """Returns a setting whose origin is an argument of `train`."""
    return Node(escape_plain(value), Origin.parse(caller(), f"train({argument}=…)"))
