"""`train(model, data, …)`: training from a notebook or a short script.

train_arguments.py converts its arguments to settings. training_main.py and arguments.py have `training_main` and
`get_args`, SwissArmyTransformer's form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Never

import torch

from trainwright.api.train_arguments import (
    CODE,
    component,
    errors_name_arguments,
    fingerprints,
    given,
    is_local,
    local_optimizer,
    metric_arguments,
    optimizer_component,
    precision_name,
    reject_argument,
)
from trainwright.build.run import build_trainer
from trainwright.config import Origin, RunConfig
from trainwright.config.component import type_of
from trainwright.config.elsewhere import advice_elsewhere
from trainwright.config.problems import suggest
from trainwright.config.sections import TrainerSection
from trainwright.errors import ConfigError, shorten_tracebacks
from trainwright.log import run_log, show_log_unless_configured
from trainwright.loop.hook import Hook
from trainwright.loop.task import Task
from trainwright.loop.trainer import Builder, Trainer
from trainwright.user_code.locations import caller, location_of, parameters_of
from trainwright.user_code.signatures import reject_wrong_call

Forward = Callable[[torch.nn.Module, Any], Any]


class FunctionTask(Task):
    """A task whose forward is a function `forward(model, batch)`; with None the model is called with the batch."""

    def __init__(self, forward: Forward | None, metrics: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._forward = forward
        self._metrics = metrics

    @property
    def is_default(self) -> bool:
        """True if it is the default task."""
        return self._forward is None and not self._metrics

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """Calls the function."""
        return super().forward(model, batch) if self._forward is None else self._forward(model, batch)

    def build_metrics(self) -> dict[str, Any]:
        """Returns the metrics that are objects."""
        return dict(self._metrics)


class PartsTrainer(Trainer):
    """The trainer in the config of a run of `train`, whose model and data exist only in the program."""

    @classmethod
    def build_model(cls, build: Builder) -> torch.nn.Module:
        """Raises if the run is loaded from its config."""
        raise ConfigError(
            "This run was created by train(model, data, …), whose model and data are not in the config. For its "
            "weights, create the model and call load_checkpoint(RUN, model=model). To evaluate it, call train again "
            "with the same arguments: a finished run returns its trainer without training.",
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
    sampler: Any = None,
    hooks: Sequence[Hook] = (),
    metrics: Any = None,
    max_steps: int | None = None,
    max_epochs: float | None = None,
    batch_size: int = 32,
    optimizer: Any = None,
    lr: float | None = None,
    schedule: Any = None,
    device: str | torch.device | None = None,
    precision: str | torch.dtype | None = None,
    name: str = "notebook",
    overrides: Sequence[str] = (),
    fresh: bool = False,
    accept_changes: bool = False,
    **others: Never,
) -> Trainer:
    """Trains a model on a dataset and returns the trainer.

    Calling `train` again resumes the run of that name. A component is a name (`"lion"`), a mapping with `type` and
    arguments (`{"type": "lion", "lr": 1e-4}`), a `Component`, a class, or a `functools.partial` of a class. An argument
    that is not listed raises, with the name of the one of the same meaning.

    Args:
        model: The module to train, on any device. It is moved and trained in place.
        data: The training dataset: samples by index, or a stream.
        forward: `forward(model, batch)` returns a loss, `(loss, metrics)`, or a mapping with `loss`. Default: the
            model is called with the batch, `model(**batch)`.
        eval_data: A dataset, or several by name. Default: no evaluation.
        collator: A function from a list of samples to a batch. Default: stacks tensors.
        sampler: The order of the samples: a component, or a torch Sampler. Default: shuffled by the seed.
        hooks: Objects with events such as `after_step`.
        metrics: Metrics of the evaluation: a name, or a mapping from names to components or objects with `update` and
            `compute`.
        max_steps: The number of updates.
        max_epochs: The number of passes over the data. The first limit that is reached ends the run.
        batch_size: Samples per update, over all ranks.
        optimizer: A component, or an optimizer of this model's parameters. Default: `adamw`.
        lr: The learning rate, unless `optimizer` has its own. Default: that of the optimizer, or 1e-3.
        schedule: The learning-rate schedule, a component. Default: constant.
        device: `"cpu"`, `"cuda"`, `"tpu"`, or a `torch.device`. Default: the fastest one.
        precision: `"fp32"`, `"bf16"`, `"fp16"`, `"fp8"`, or the dtype. Default: bf16 on GPUs, fp32 on CPUs.
        name: The run folder is `runs/NAME`.
        overrides: Any other setting, as on the command line: `["evaluation.every_steps=50"]`.
        fresh: Starts over. The earlier run is kept in `runs/NAME.old`.
        accept_changes: Continues although code or settings that affect the result differ from those of the saved run.

    Returns:
        The trainer, which has the model, the step, the curves and the storage.

    >>> data = [{"x": torch.randn(8), "labels": torch.tensor(index % 4)} for index in range(64)]
    >>> model = torch.nn.Linear(8, 4)
    >>> def forward(model, batch):
    ...     return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])
    >>> trainer = train(model, data, forward=forward, max_epochs=2, batch_size=16)
    >>> trainer.step, trainer.epoch
    (8, 1)
    """
    shorten_tracebacks()
    with errors_name_arguments(overrides, has_optimizer=optimizer is not None):
        for argument in others:
            reject_argument(argument, known=parameters_of(train) or ())
        if forward is not None:
            reject_wrong_call(forward, ("model", "batch"), role="forward")
            _reject_batch_first(forward)
        if collator is not None:
            reject_wrong_call(collator, ("samples",), role="collator")
        _reject_wrong_parts(model, optimizer, lr=lr, schedule=schedule)
        kind = optimizer.func if isinstance(optimizer, partial) else optimizer
        is_built_here = isinstance(optimizer, torch.optim.Optimizer)
        if isinstance(kind, type) and is_local(kind):
            is_built_here, optimizer = True, local_optimizer(optimizer, lr)
        metric_components, metric_objects = metric_arguments(metrics)
        optional = {
            "max_steps": max_steps,
            "max_epochs": max_epochs,
            "optimizer": None if is_built_here else optimizer_component(optimizer, lr),
            "schedule": None if schedule is None else component("schedule", schedule, example='{"type": "cosine"}'),
        }
        is_sampler = hasattr(sampler, "__iter__") and not isinstance(sampler, str | Mapping | type)
        order = None
        if sampler is not None and not is_sampler:
            order = component("sampler", sampler, example='{"type": "weighted", "weights": [1, 2, 1]}')
        objects = {**metric_objects, **({"sampler": sampler} if is_sampler else {})}
        chosen = {"device": None if device is None else str(device)}
        chosen["precision"] = None if precision is None else precision_name(precision)
        settings = {
            "name": given("name", name),
            "data": {  # in the program; the origins are for errors
                "train": given("data", None),
                "eval": given("eval_data", {}),
                **_given_only({"sampler": order}),
            },
            "trainer": {
                "type": TRAINER,
                **_given_only(optional),
                "global_batch_size": given("batch_size", batch_size),
                CODE: fingerprints(model, data, {"forward": forward, "collator": collator}, optimizer, hooks, objects),
            },
            "runtime": _given_only(chosen),
            "evaluation": {"metrics": given("metrics", metric_components)} if metric_components else {},
        }
        config = _config_of(settings, overrides)
        has_sets = len(eval_data) > 0 if isinstance(eval_data, Mapping) else eval_data is not None
        if (metric_components or metric_objects) and not has_sets and config.data.test is None:
            raise ConfigError("metrics: have no effect without eval_data. Pass both, or neither.", where=caller())
        parts = _given_parts(
            model,
            data,
            FunctionTask(forward, metric_objects),
            eval_data=eval_data,
            collator=collator,
            sampler=sampler if is_sampler else None,
            hooks=hooks,
            build_optimizer=partial(_given_optimizer, optimizer) if is_built_here else None,
        )
        show_log_unless_configured()
        with run_log() as open_logs, _restored_settings(optimizer):
            trainer = build_trainer(config, parts, fresh=fresh, accept_changes=accept_changes)
            if not trainer.is_finished:
                open_logs(*trainer.log_files)
            trainer.train()
        return trainer


def _given_parts(
    model: torch.nn.Module,
    data: Any,
    task: FunctionTask,
    *,
    eval_data: Any,
    collator: Callable[[list[Any]], Any] | None,
    sampler: Any,
    hooks: Sequence[Hook],
    build_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] | None,
) -> type[Trainer]:
    """Returns a trainer class that builds its parts from objects of the program."""
    eval_sets = eval_data if isinstance(eval_data, Mapping) else {} if eval_data is None else {"eval": eval_data}

    class GivenParts(PartsTrainer):
        @classmethod
        def build_task(cls, build: Builder) -> Task:
            return build.task() if task.is_default else task

        @classmethod
        def build_model(cls, build: Builder) -> torch.nn.Module:
            return model

        @classmethod
        def build_optimizers(cls, build: Builder, model: torch.nn.Module) -> Any:
            return build.optimizers(model) if build_optimizer is None else build_optimizer(model)

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
        def build_sampler(cls, build: Builder, dataset: Any) -> Any:
            return build.sampler(dataset) if sampler is None else sampler

        @classmethod
        def build_hooks(cls, build: Builder) -> list[Hook]:
            return [*build.hooks(), *hooks]

    return GivenParts


def _config_of(settings: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    config = RunConfig.from_dict(settings, overrides, where=Origin.parse(caller()))
    if config.trainer.type != TRAINER:
        raise ConfigError(
            f"trainer.type: {config.trainer.type} has no effect, because train(…) defines the trainer. Remove it, or "
            "use run_experiment(config, trainer=MyTrainer).",
            where=config.origin("trainer.type"),
        )
    for key in config.trainer.options:
        if key != CODE:
            advice = advice_elsewhere(key) or suggest(key, TrainerSection.model_fields)
            raise ConfigError(
                f"trainer.{key}: has no effect, because only a custom trainer has options. {advice}",
                where=config.origin(f"trainer.{key}"),
            )
    return config


def _given_only(values: Mapping[str, Any]) -> dict[str, Any]:
    return {argument: given(argument, value) for argument, value in values.items() if value is not None}


def _reject_batch_first(forward: Forward) -> None:
    """Raises for a function of (batch, batch_idx) or (batch, model), which would receive the model as its batch."""
    first = next(iter((parameters_of(forward) or {}).values()), None)
    if first is not None and first.name in ("batch", "inputs") and first.kind is not first.VAR_POSITIONAL:
        raise ConfigError(
            f"forward is called with the model first, but its first parameter is named {first.name}. Let it accept "
            "(model, batch); for a training_step(batch, batch_idx) pass forward=lambda model, batch: "
            "model.training_step(batch, 0).",
            where=location_of(forward),
        )


def _reject_wrong_parts(model: Any, optimizer: Any, *, lr: float | None, schedule: Any) -> None:
    """Raises for objects that would have no effect, or fail later with a less clear error."""
    if not isinstance(model, torch.nn.Module):
        advice = f" Pass an object: {model.__name__}(…)." if isinstance(model, type) else ""
        raise ConfigError(f"model: must be a torch.nn.Module; got {model!r}.{advice}", where=caller())
    if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
        raise ConfigError(
            f"schedule: this {type(schedule).__name__} is an object, whose state a resumed run could not "
            f'restore. Pass a component: {{"type": "{type_of(type(schedule))}", …}} with its arguments.',
            where=caller(),
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    if lr is not None:
        raise ConfigError(
            f"lr={lr:g}: has no effect, because optimizer is an object with its own rate.", where=caller()
        )
    own = {id(parameter) for parameter in model.parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_others = sum(id(parameter) not in own for parameter in updated)
    if num_others:
        raise ConfigError(
            f"optimizer: {num_others} of its {len(updated)} parameters are not parameters of this model, which may "
            "have been created again since. Create the optimizer from its model.parameters(), or pass the class.",
            where=caller(),
        )


def _given_optimizer(optimizer: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer that the program has created, or one of a local class."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not isinstance(optimizer, torch.optim.Optimizer):
        made: torch.optim.Optimizer = optimizer(trained)
        return made
    own = {id(parameter) for parameter in model.parameters()}
    if not all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        kind = type(optimizer).__name__
        raise ConfigError(
            f"optimizer: this {kind} has the parameters of the model before it was sharded. Pass the class, "
            f"optimizer={kind}, or a component.",
            where=caller(),
        )
    return optimizer


@contextmanager
def _restored_settings(optimizer: Any) -> Iterator[None]:
    """Restores the settings of an optimizer's groups at the end, such as its rates before a schedule or a hook.

    The next call then finds those that the program has set; a resumed run loads its own.
    """
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    try:
        yield
    finally:
        for group, before in zip(groups, settings, strict=False):  # an unfrozen parameter may have added a group
            for name in [name for name in group if name != "params" and name not in before]:
                del group[name]
            group.update(before)
