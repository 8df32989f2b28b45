"""`training_main`: SwissArmyTransformer's way in. Five functions and a Namespace become one Trainer and one Task.

The loop is the one that every run has (loop/trainer.py). Here a batch is put into an iterator of one, the user's
forward_step is called with it, and what it returned is read; flags are arguments.py's, the model function_model.py's.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from trainwright.build import build_evaluator, sets_of
from trainwright.config import RunConfig
from trainwright.doors.arguments import with_defaults
from trainwright.doors.begin_from import begun_from, is_spent
from trainwright.doors.cut_batches import cut_batches
from trainwright.doors.forward_steps import ForwardStep, final_metrics, per_sample, run_step
from trainwright.doors.function_checks import refuse_wrong_functions
from trainwright.doors.function_data import CreateDataset, FunctionData
from trainwright.doors.function_model import InitFunction, make_model
from trainwright.doors.function_settings import config_of
from trainwright.doors.timers import Timers
from trainwright.errors import ConfigError, TrainwrightError, shorten_tracebacks
from trainwright.log import show_log
from trainwright.loop.builder import Builder
from trainwright.loop.task import Task
from trainwright.loop.trainer import Trainer
from trainwright.main import evaluate_checkpoint, run_experiment, start_up
from trainwright.parallel import processes
from trainwright.user_code import place_of

logger = logging.getLogger(__name__)

SECONDS = "time/"
"""What the names of stopwatches begin with (timers.py)."""

HandleMetrics = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class UserFunctions:
    """What a user hands to training_main, and the Namespace that all of it gets."""

    args: argparse.Namespace
    flags: argparse.Namespace
    """The same with a value for every flag."""
    model_cls: Any
    forward_step: ForwardStep
    forward_step_eval: ForwardStep
    create_dataset: CreateDataset
    handle_metrics: HandleMetrics | None
    init: InitFunction | None
    collate: Callable[[list[Any]], Any] | None


def training_main(
    args: argparse.Namespace,
    model_cls: Any,
    forward_step_function: ForwardStep,
    create_dataset_function: CreateDataset,
    handle_metrics_function: HandleMetrics | None = None,
    init_function: InitFunction | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    forward_step_eval: ForwardStep | None = None,
) -> torch.nn.Module:
    """Trains a model as the flags of `get_args` say, and returns it. Calling it again continues the run.

    `model_cls`: a class, called with `args` if that is its first parameter's name, or a model that exists.
    `forward_step_function(data_iterator, model, args, timers)`: a loss, or (loss, {name: metric}); it calls
    `next(data_iterator)` once, which is one micro-batch on the device. A metric is one number, or one a sample; one
    called loss is left out, for the loss itself has that name.
    `create_dataset_function(path, args)`: the dataset of a path of --train-data, --valid-data or --test-data.
    `handle_metrics_function({name: tensor over all samples})`: the final metrics of an evaluation. A metric that is
    one number for its batch is repeated for each sample of it.
    `init_function(args, model)`: changes the model, once, just before training.
    `collate_fn(samples)`: a batch; without it samples that are dicts or tuples are stacked.
    `forward_step_eval`: what an evaluation calls in place of the forward step.

    `args` is passed on as it is and never changed. A process that is told to leave saves its step and exits.
    """
    refuse_wrong_functions(locals())
    shorten_tracebacks()
    show_log()
    config = config_of(args)
    flags = with_defaults(args)
    if flags.mode == "finetune" and flags.load is not None and not flags.fresh and is_spent(Path(flags.load), config):
        flags.load = None

    class GivenFunctions(FunctionTrainer):
        functions = UserFunctions(
            args=args,
            flags=flags,
            model_cls=model_cls,
            forward_step=forward_step_function,
            forward_step_eval=forward_step_eval or forward_step_function,
            create_dataset=create_dataset_function,
            handle_metrics=handle_metrics_function,
            init=init_function,
            collate=collate_fn,
        )

    if flags.mode == "inference":
        return _infer(GivenFunctions, config, flags.load)
    copies = flags.mode == "pretrain" and flags.load is not None and processes.place().rank == 0
    with begun_from(Path(flags.load), config) if copies else nullcontext():
        model, _ = run_experiment(
            config, trainer=GivenFunctions, fresh=flags.fresh, accept_changes=flags.accept_changes
        )
    return model


class FunctionTrainer(Trainer):
    """A trainer whose forward is the user's forward step; training_main makes a subclass that has the functions."""

    functions: ClassVar[UserFunctions | None] = None

    @classmethod
    def build_task(cls, build: Builder) -> Task:
        """Returns the task that makes the model and the datasets by the user's functions."""
        functions = cls._given()
        return FunctionsTask(functions) if functions.handle_metrics is None else MeasuredTask(functions)

    @classmethod
    def build_collator(cls, build: Builder) -> Any:
        """Returns the user's collate_fn, or the one that stacks."""
        collate = cls._given().collate
        return build.collator() if collate is None else cut_batches(collate, build.config.trainer.accumulation or 1)

    @classmethod
    def _given(cls) -> UserFunctions:
        if cls.functions is None:
            raise ConfigError(
                "This run was made by training_main, whose functions no config holds. Call training_main with the "
                "same arguments; --mode inference evaluates and returns the trained model."
            )
        return cls.functions

    def post_init(self) -> None:
        """Makes the stopwatches that forward steps are given."""
        self.timers = Timers()

    def outputs_of(self, batch: Any) -> Any:
        """Returns the loss and metrics that the user's forward step gives for a micro-batch."""
        given, is_training = self._given(), self.eval_name is None
        function = given.forward_step if is_training else given.forward_step_eval
        call = (self.model, given.args, self.timers)
        return run_step(function, batch, *call, num_samples=self.samples_in_hand, is_training=is_training)

    def eval_step(self, batch: Any) -> Mapping[str, Any]:
        """Returns a batch's loss and metrics; for handle_metrics_function, one value a sample of each metric."""
        logs = super().eval_step(batch)
        given = self._given()
        if given.handle_metrics is None or not self.samples_in_hand:
            return logs
        return per_sample(logs, self.samples_in_hand, given.forward_step_eval)

    def eval_end(self, aggregated: Any) -> dict[str, Any]:
        """Returns the logs of a set without the seconds of stopwatches, which measure no model."""
        return {name: value for name, value in super().eval_end(aggregated).items() if not name.startswith(SECONDS)}


class FunctionsTask(Task):
    """Makes the model and the datasets by the user's functions."""

    def __init__(self, functions: UserFunctions) -> None:
        self._functions = functions
        self._data = FunctionData(functions.create_dataset, functions.args, functions.flags)

    def build_model(self) -> torch.nn.Module:
        """Makes or takes the model, and changes it as the flags and the init_function say."""
        given = self._functions
        return make_model(given.model_cls, given.args, given.flags, given.init)

    def build_dataset(self, split: str) -> Any:
        """Returns the set train, valid or test; None where there is none."""
        return self._data.dataset(split)


class MeasuredTask(FunctionsTask):
    """Gathers the metrics of all samples, and lets the user's function make the final ones of them."""

    def aggregate_logs(self, state: Any, outputs: Mapping[str, Any]) -> Any:
        """Adds a batch's values, which have one entry a sample."""
        state = {} if state is None else state
        for name, values in outputs.items():
            if isinstance(values, torch.Tensor | list):
                state.setdefault(name, []).append(values)
        return state

    def reduce_aggregated_logs(self, state: Any, step: int) -> dict[str, Any]:
        """Calls handle_metrics_function with the metrics over all samples."""
        handle = self._functions.handle_metrics
        assert handle is not None
        return final_metrics(handle, handle({name: self._joined(name, parts) for name, parts in state.items()}))

    def _joined(self, name: str, parts: list[Any]) -> Any:
        if isinstance(parts[0], list):
            return [item for part in parts for item in part]
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise TrainwrightError(
                f"The metric {name} has rows of shapes {' and '.join(map(str, sorted(shapes)))} in different batches, "
                "which make no tensor over all samples. Pad them to one shape.",
                where=place_of(self._functions.forward_step_eval),
            )
        return torch.cat(parts)


def _infer(trainer_class: type[FunctionTrainer], config: RunConfig, load: str | None) -> torch.nn.Module:
    """Evaluates the sets that are given with loaded weights, and returns the model; trains and writes nothing."""
    with start_up():
        trainer = build_evaluator(config, trainer_class)
        # Without --load the weights are the run's own.
        logs = evaluate_checkpoint(trainer, sets_of(trainer), "latest" if load is None else None)
        if logs:
            logger.info("%s", ", ".join(f"{name} {value:.4g}" for name, value in logs.items()))
        return trainer.model.eval()
