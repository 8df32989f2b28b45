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
from trainwright.user_code.locations import location_of

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
    "prediction_step": "eval_step",
    "compute_loss": "forward",
    **dict.fromkeys(("train_dataloader", "get_train_dataloader"), "build_train_data"),
    **dict.fromkeys(("val_dataloader", "get_eval_dataloader"), "build_eval_data"),
    "initialize": "post_init",
    "build_train_loader": "build_train_data",
    "build_test_loader": "build_eval_data",
}
"""Methods of trainers in other frameworks, and their names in this package."""

ALTERNATIVES: Mapping[str, str] = {
    "eval_reduce": "Override aggregate_logs(state, outputs) of a Task, and name it in the config: task",
    "build_lr_scheduler": "Name the schedule in the config: trainer.schedule",
    "build_evaluator": "Name metrics in the config: evaluation.metrics; or override build_metrics() of a Task",
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), "Override state_dict() and load_state_dict(state)"),
    **dict.fromkeys(("on_train_epoch_start", "on_epoch_start"), "Add a hook with before_epoch(self)"),
    **dict.fromkeys(("on_train_epoch_end", "on_epoch_end", "training_epoch_end"), "Add a hook with after_epoch(self)"),
    **dict.fromkeys(
        ("configure_optimizers", "create_optimizer"), "Override build_optimizers(cls, build, model), a class method"
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

_ARGUMENTS = {"forward": "**batch", "train_step": "batch", "eval_step": "batch", "build_train_data": "cls, build"}
_ARGUMENTS["build_eval_data"] = _ARGUMENTS["build_train_data"]
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
        ours = TRAINER_METHODS_ELSEWHERE.get(name)
        is_used = (ours or name in ALTERNATIVES) and _is_called(trainer_class, name)
        if hasattr(contract, name) or is_used:
            continue
        if ours is not None and _function(trainer_class, ours) is _function(contract, ours):
            raise ConfigError(f"{label} is never called. Call it {ours}({_ARGUMENTS.get(ours, '')}).", where=where)
        if name in ALTERNATIVES:
            raise ConfigError(f"{label} is never called. {ALTERNATIVES[name]}.", where=where)
        close = difflib.get_close_matches(name, (*OVERRIDE_POINTS, *builders), n=1, cutoff=_MIN_SIMILARITY)
        if close:
            raise ConfigError(
                f"{label} is never called: Trainer has no such method. Did you mean {close[0]}? If not, use a name "
                "that is less similar.",
                where=where,
            )


def reject_task_methods(task_class: type, contract: type) -> None:
    """Rejects methods of a task that are named as in other frameworks, unless the task calls them itself.

    `contract` is Task itself.
    """
    for owner, name, method in _user_methods(task_class, contract):
        if name in TASK_METHODS_ELSEWHERE and not _is_called(task_class, name):
            problem = f"{owner.__name__}.{name} is never called. {TASK_METHODS_ELSEWHERE[name]}."
            raise ConfigError(problem, where=location_of(method))


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
        if name in events or not is_event_like or _is_called(type(hook), name):
            continue
        owner, ours, where = type(hook).__name__, HOOK_METHODS_ELSEWHERE.get(name), location_of(method)
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
            if is_method and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield owner, name, value


def _is_called(kind: type, name: str) -> bool:
    """Returns True if any method of a class uses this name."""
    return any(
        name in names_used(each) for owner in kind.__mro__ for each in vars(owner).values() if inspect.isroutine(each)
    )


def _function(kind: type, name: str) -> Any:
    method = getattr(kind, name)
    return getattr(method, "__func__", method)  # each access to a class method returns another object
