"""Checks the methods of user trainers and hooks before anything is built.

Python does not report `def run_step` although the loop calls `train_step`. Misspelled names and names of other
frameworks raise here with the file and line.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Collection, Iterator, Mapping
from types import CodeType
from typing import Any

from trainwright.errors import ConfigError
from trainwright.user_code.locations import location_of, parameters_of

logger = logging.getLogger(__name__)

OVERRIDE_POINTS = (
    *("forward", "train_step", "eval_step", "eval_begin", "eval_end", "train_loop_begin", "train_loop_end"),
    *("next_train_inputs", "next_eval_inputs", "post_init", "state_dict", "load_state_dict"),
)
"""The methods that a user trainer may override, in addition to the `build_*` methods."""

TRAINER_METHODS_ELSEWHERE: Mapping[str, str] = {
    "run_step": "train_step",
    "training_step": "train_step",
    "validation_step": "eval_step",
    **dict.fromkeys(("prediction_step", "test_step", "evaluation_loop"), "eval_step"),
    "compute_loss": "forward",
    **dict.fromkeys(
        ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer", "_prepare_inputs"),
        "next_train_inputs",
    ),
    **dict.fromkeys(("get_train_sampler", "_get_train_sampler"), "build_sampler"),
    **dict.fromkeys(("train_dataloader", "get_train_dataloader"), "build_train_data"),
    **dict.fromkeys(("val_dataloader", "get_eval_dataloader"), "build_eval_data"),
    "initialize": "post_init",
    "build_train_loader": "build_train_data",
    "build_test_loader": "build_eval_data",
}
"""Methods of trainers in other frameworks, and their names in this package."""

ALTERNATIVES: Mapping[str, str] = {
    "eval_reduce": "Override aggregate_logs(state, outputs) of a Task, and name it in the config: task",
    **dict.fromkeys(
        ("build_lr_scheduler", "create_scheduler", "lr_scheduler_step"),
        "Name the schedule in the config: trainer.schedule",
    ),
    **dict.fromkeys(
        ("test_dataloader", "get_test_dataloader"), "Name the dataset in the config: data.test, evaluated at the end"
    ),
    **dict.fromkeys(
        ("predict_step", "predict_dataloader"), "Load the model with load_checkpoint(RUN), and call it on your inputs"
    ),
    **dict.fromkeys(
        ("configure_gradient_clipping", "clip_gradients"), "Set trainer.max_grad_norm, or override train_step(batch)"
    ),
    **dict.fromkeys(
        (
            *("optimizer_step", "optimizer_zero_grad", "on_before_backward", "on_after_backward"),
            *("on_before_zero_grad", "on_before_optimizer_step"),
        ),
        "Override train_step(batch), which calls begin_update(), backward and apply()",
    ),
    "prepare_data": "Prepare the data in its dataset, or with data.process",
    "configure_callbacks": "Override build_hooks(cls, build), a class method",
    **dict.fromkeys(("configure_model", "configure_sharded_model"), "Override build_model(cls, build), a class method"),
    **dict.fromkeys(
        ("compute_metrics", "preprocess_logits_for_metrics"),
        "Name metrics in the config: evaluation.metrics; or override eval_step(batch)",
    ),
    **dict.fromkeys(("on_validation_batch_start", "on_validation_batch_end"), "Override eval_step(batch)"),
    **dict.fromkeys(("on_test_start", "on_test_epoch_start"), "Override eval_begin(self)"),
    **dict.fromkeys(("on_test_end", "on_test_epoch_end"), "Override eval_end(self, aggregated)"),
    **dict.fromkeys(("training_step_end", "validation_step_end"), "Return the metrics from forward(**batch)"),
    **dict.fromkeys(("validation_epoch_end", "test_epoch_end"), "Override eval_end(self, aggregated)"),
    "on_log": "Override train_loop_end(self), which returns the log line",
    "build_evaluator": "Name metrics in the config: evaluation.metrics; or override build_metrics() of a Task",
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), "Override state_dict() and load_state_dict(state)"),
    **dict.fromkeys(("on_train_epoch_start", "on_epoch_start"), "Add a hook with before_epoch(self)"),
    **dict.fromkeys(("on_train_epoch_end", "on_epoch_end", "training_epoch_end"), "Add a hook with after_epoch(self)"),
    **dict.fromkeys(
        ("configure_optimizers", "create_optimizer", "create_optimizer_and_scheduler"),
        "Override build_optimizers(cls, build, model), a class method",
    ),
}
"""Methods of trainers in other frameworks without a counterpart here, with advice."""

TASK_METHODS_ELSEWHERE: Mapping[str, str] = {
    "build_inputs": "Override build_dataset(split)",
    "build_losses": "Return the loss from forward(model, batch)",
    "inference_step": "Override forward(model, batch)",
    "process_metrics": "Return metrics from forward, or metric objects with update and compute from build_metrics()",
    "process_compiled_metrics": "Return metrics from forward, or metric objects from build_metrics()",
    **dict.fromkeys(
        ("train_step", "training_step"), "Override forward(model, batch), or train_step(batch) of a Trainer"
    ),
    **dict.fromkeys(
        ("validation_step", "eval_step"), "Override forward(model, batch), or eval_step(batch) of a Trainer"
    ),
    "initialize": "Load weights with model.pretrained, or in build_model()",
    "create_optimizer": "Name the optimizer in the config: trainer.optimizer",
}
"""Methods of tasks in other frameworks, with advice."""

HOOK_METHODS_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("on_train_begin", "on_train_start", "on_fit_start", "before_run"), "before_train"),
    **dict.fromkeys(("on_train_end", "on_fit_end", "after_run"), "after_train"),
    **dict.fromkeys(("on_epoch_begin", "on_epoch_start", "on_train_epoch_start", "before_train_epoch"), "before_epoch"),
    **dict.fromkeys(("on_epoch_end", "on_train_epoch_end", "after_train_epoch"), "after_epoch"),
    **dict.fromkeys(("on_step_begin", "on_train_batch_start", "before_iter", "before_train_iter"), "before_step"),
    **dict.fromkeys(("on_step_end", "on_train_batch_end", "after_iter", "after_train_iter"), "after_step"),
    **dict.fromkeys(("on_validation_start", "on_validation_epoch_start", "on_eval_begin"), "before_eval"),
    **dict.fromkeys(("on_evaluate", "on_validation_end", "on_validation_epoch_end", "on_eval_end"), "after_eval"),
    **dict.fromkeys(("on_save", "on_save_checkpoint", "after_save_checkpoint"), "after_save"),
    **dict.fromkeys(("on_exception", "on_error"), "close"),
}
"""Events of hooks in other frameworks, and their names in this package."""

_STAGED_EVENTS = {"setup": "before_train", "teardown": "close"}
"""Events of Lightning's hooks that are recognized by a parameter `stage`, because their names are common."""

GENERAL_NAMES: Mapping[str, tuple[str, str]] = {
    "setup": ("stage", "Build the parts in the build_* methods, or override post_init(self)"),
    "teardown": ("stage", "Add a hook with close(self)"),
    "log": ("start_time", "Override train_loop_end(self), which returns the log line"),
    "save_model": ("_internal_call", "Add a hook with after_save(self, path), or run trainwright export"),
}
"""Methods of trainers in other frameworks with common names: the parameter by which they are recognized, and what to
do instead."""

OFTEN_OWN = frozenset({"clip_gradients", "compute_metrics", "configure_model", "predict_step", "prepare_data"})
"""Methods of trainers in other frameworks that a script or a hook may call itself: they are reported, not rejected."""

ATTRIBUTES_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("log", "log_dict"), "Return metrics from forward, as (loss, {name: value}), or call self.storage.put_scalar"
    ),
    "current_epoch": "Use self.epoch",
    "should_stop": "Call stop(reason) to stop; stop_reason is the reason why it ended",
    **dict.fromkeys(
        ("callback_metrics", "logged_metrics"), "Use storage.latest(), or the logs of after_eval(self, logs)"
    ),
    "hparams": "Use self.config, such as self.config.trainer.NAME for an option of the trainer section",
    "args": "Use self.config, such as self.config.trainer.NAME for an option of the trainer section",
    "manual_backward": "Call update.backward(loss), with update = self.begin_update()",
    "accelerator": "Call update.backward(loss), with update = self.begin_update(); self.device is the device",
    **dict.fromkeys(
        ("lr_schedulers", "lr_scheduler"), "The schedule is the setting trainer.schedule, which the loop steps"
    ),
    "optimizer": 'Use self.optimizers["main"]',
    "logger": "Call self.storage.put_scalar; the setting writers has the loggers",
    **dict.fromkeys(("train_dataloader", "train_dataset"), "Use self.train_data"),
    **dict.fromkeys(("global_rank", "process_index"), "Use self.ranks.rank, or self.is_main_process"),
    **dict.fromkeys(("is_global_zero", "is_world_process_zero"), "Use self.is_main_process"),
}
"""Attributes of trainers in other frameworks, and what to use instead."""

_ARGUMENTS = {"forward": "**batch", "train_step": "batch", "eval_step": "batch", "build_train_data": "cls, build"}
_ARGUMENTS["build_eval_data"] = _ARGUMENTS["build_train_data"]
_ARGUMENTS |= {"next_train_inputs": "iterator", "build_sampler": "cls, build, dataset"}
_BUILD_ARGUMENTS = {"build_frozen_models": ", model", "build_optimizers": ", model", "build_sampler": ", dataset"}
_MIN_SIMILARITY = 0.85


def reject_wrong_methods(trainer_class: type, contract: type) -> None:
    """Rejects methods of a user trainer that are misspelled, named as in other frameworks, or not class methods.

    `contract` is Trainer itself. A name of another framework is accepted if the trainer also overrides this package's
    method, or calls it.
    """
    builders = [name for name in vars(contract) if name.startswith("build_")]
    for owner, name, method in _user_methods(trainer_class, contract):
        label, where = f"{owner.__name__}.{name}", location_of(method)
        if name in builders and not isinstance(method, classmethod | staticmethod):
            raise ConfigError(
                f"{label} must be a class method, because components are built before the trainer. Write @classmethod "
                f"above it, and (cls, build{_BUILD_ARGUMENTS.get(name, '')}) as its arguments.",
                where=where,
            )
        ours, instead = TRAINER_METHODS_ELSEWHERE.get(name), _alternative(name, method)
        is_own = (ours or instead) and is_used(trainer_class, name, contract)
        if hasattr(contract, name) or is_own:
            continue
        if ours is not None and _function(trainer_class, ours) is _function(contract, ours):
            raise ConfigError(f"{label} is never called. Call it {ours}({_ARGUMENTS.get(ours, '')}).", where=where)
        if instead is not None and name in OFTEN_OWN:
            logger.warning(
                "%s: %s is not called by the trainer, unlike in other frameworks. %s.", where, label, instead
            )
            continue
        if instead is not None:
            raise ConfigError(f"{label} is never called. {instead}.", where=where)
        close = difflib.get_close_matches(name, (*OVERRIDE_POINTS, *builders), n=1, cutoff=_MIN_SIMILARITY)
        if close:
            raise ConfigError(
                f"{label} is never called: Trainer has no such method. Did you mean {close[0]}? If not, use a name "
                "that is less similar.",
                where=where,
            )


def _alternative(name: str, method: Any) -> str | None:
    """Returns what to do instead of a method of a trainer in another framework that has no counterpart here."""
    if name in GENERAL_NAMES:
        parameter, instead = GENERAL_NAMES[name]
        return instead if parameter in (parameters_of(method) or {}) else None
    event = HOOK_METHODS_ELSEWHERE.get(name)
    return ALTERNATIVES.get(name) or (None if event is None else f"Add a hook with {event}")


def reject_task_methods(task_class: type, contract: type) -> None:
    """Rejects methods of a task that are named as in other frameworks, unless the task calls them itself.

    `contract` is Task itself.
    """
    for owner, name, method in _user_methods(task_class, contract):
        if name in TASK_METHODS_ELSEWHERE and not is_used(task_class, name, contract):
            problem = f"{owner.__name__}.{name} is never called. {TASK_METHODS_ELSEWHERE[name]}."
            raise ConfigError(problem, where=location_of(method))


def check_model_methods(model: object, *, calls_model: bool) -> None:
    """Checks a model that is a module of Lightning, whose steps no loop calls here.

    Raises for its training_step if `calls_model`: if neither the trainer nor the task overrides forward, so that the
    loss comes from the model's forward; a training_step that another of its methods calls is accepted. Logs the
    names of its other methods that the run does not call.
    """
    others = ("configure_optimizers", "validation_step", "test_step", "train_dataloader", "val_dataloader")
    theirs = {"training_step", *others, *HOOK_METHODS_ELSEWHERE}
    methods = inspect.getmembers(type(model), inspect.isroutine)
    is_called = any("training_step" in names_used(method) for name, method in methods if name not in theirs)
    steps = [name for name in ("training_step", "configure_optimizers") if _defined_by_user(type(model), name)]
    if not steps:
        return
    name, where = type(model).__name__, location_of(getattr(type(model), steps[0]))
    if calls_model and "training_step" in steps and not is_called:
        raise ConfigError(
            f"{name}.training_step is never called: the loss is that of the model's forward. Write its body as "
            "forward(self, **batch) of a Trainer, or call it from a function: train(model, data, forward=lambda model, "
            "batch: model.training_step(batch, 0)).",
            where=where,
        )
    uncalled = [each for each in (*others, *HOOK_METHODS_ELSEWHERE) if _defined_by_user(type(model), each)]
    if uncalled:
        logger.warning(
            "%s: the run does not call %s of %s. Use settings or methods of the trainer instead.",
            where,
            ", ".join(uncalled),
            name,
        )


def _defined_by_user(kind: type, name: str) -> bool:
    """Returns True if a class of the user defines a method, and not one of a library such as Lightning."""
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    return owner is not None and owner.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning", "torch")


def reject_half_state(kind: type, contract: type) -> None:
    """Rejects a trainer, task or hook with only one of `state_dict` and `load_state_dict`: nothing would be restored.

    `contract` is the class with the defaults.
    """
    own = [
        name
        for name in ("state_dict", "load_state_dict")
        if hasattr(kind, name) and _function(kind, name) is not _function(contract, name)
    ]
    if len(own) == 1:
        missing = "load_state_dict(self, state)" if own == ["state_dict"] else "state_dict(self)"
        effect = "its result is saved, but never restored" if own == ["state_dict"] else "nothing is saved for it"
        raise ConfigError(
            f"{kind.__name__} defines {own[0]}, but not {missing.partition('(')[0]}: {effect}. Define {missing} too.",
            where=location_of(getattr(kind, own[0])),
        )


def reject_uncalled(hook: object, contract: type, events: Collection[str], *, overrides: Collection[str]) -> None:
    """Rejects methods of a hook that are named as in other frameworks, and warns of others that look like events.

    `contract` is Hook itself, `overrides` the events that this hook has. Methods that the hook calls are accepted.
    """
    for _, name, method in _user_methods(type(hook), contract):
        is_event_like = name.startswith(("on_", "before_", "after_"))
        ours = HOOK_METHODS_ELSEWHERE.get(name)
        if name in _STAGED_EVENTS and "stage" in (parameters_of(method) or {}):
            is_event_like, ours = True, _STAGED_EVENTS[name]
        if name in events or not is_event_like or is_used(type(hook), name, contract):
            continue
        owner, where = type(hook).__name__, location_of(method)
        if ours is not None and ours not in overrides:
            raise ConfigError(f"{owner}.{name} is never called. Call it {ours}.", where=where)
        if ours is None and "epoch" in name:
            raise ConfigError(
                f"{owner}.{name} is never called. The events of epochs are before_epoch and after_epoch.", where=where
            )
        if not overrides:
            raise ConfigError(
                f"{owner}.{name} is never called, and {owner} has no other event. The events of a hook are "
                f"{', '.join(events)}.",
                where=where,
            )
        logger.warning("%s: %s.%s is not an event of a hook: the loop does not call it.", where, owner, name)


def names_used(function: Any) -> set[str]:
    """Returns the names and attributes that a function uses, including those of its inner functions."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    pending, names = [code] if code else [], set()
    while pending:
        each = pending.pop()
        names |= {*each.co_names}
        pending += [constant for constant in each.co_consts if isinstance(constant, CodeType)]
    return names


def _user_methods(kind: type, contract: type) -> Iterator[tuple[type, str, Any]]:
    """Yields the class, name and function of each public method of a class, without those of its contract."""
    seen: set[str] = set()
    for owner in kind.__mro__:
        for name, value in vars(owner).items() if owner not in (contract, object) else ():
            is_method = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
            is_private = name.startswith("_") and name not in TRAINER_METHODS_ELSEWHERE
            if is_method and not is_private and name not in seen:
                seen.add(name)
                yield owner, name, value


def is_used(kind: type, name: str, contract: type) -> bool:
    """Returns True if any method of a class, without those of its contract, uses this name."""
    return any(
        name in names_used(each)
        for owner in kind.__mro__
        if owner is not contract
        for each in vars(owner).values()
        if inspect.isroutine(each)
    )


def _function(kind: type, name: str) -> Any:
    method = getattr(kind, name)
    return getattr(method, "__func__", method)  # each access to a class method returns another object
