"""The contract of a hook: methods that the loop calls at events of the run.

A hook does not change the math (override Trainer or Task for that), and it logs by putting scalars into
`self.trainer.storage`. The loop in trainer.py calls the events.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainwright.errors import ConfigError
from trainwright.user_code.locations import is_user_code, location_of
from trainwright.user_code.methods import reject_half_state, reject_uncalled
from trainwright.user_code.signatures import reject_wrong_call

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

HOOK_EVENTS = (
    "before_train",
    "after_train",
    "before_epoch",
    "after_epoch",
    "before_step",
    "after_step",
    "before_eval",
    "after_eval",
    "after_save",
    "on_anomaly",
    "close",
)
EVENT_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "after_eval": ("logs",),
    "after_save": ("path",),
    "on_anomaly": ("anomaly",),
}
"""The arguments of events; events that are not listed have none."""


class Hook:
    """Methods called at events of the run; override those you need. No `super().__init__()` is needed.

        before_train                        once, after state was restored
        for each update:
            before_epoch                    where its first sample is the first of another epoch than before
            before_step
            ... the update ...
            after_step                      trainer.step counts it already
            before_eval, after_eval(logs)   where an evaluation is due; logs is {} if the evaluation failed
            after_epoch                     where the update used the last sample of an epoch
            after_save(path)                where a checkpoint was committed, on every rank
        after_train                         once, after success
        close                               once, always

    Hooks are called in the order in which they are registered, on every rank.
    """

    trainer: Trainer
    """Set before any event is called."""
    copies_of_weights: int = 0
    """The number of copies of all weights that the hook keeps on the device; `micro_batch_size: auto` leaves room for
    them."""
    evaluates_averaged: bool = True
    """Whether evaluations use `averaged_weights`, and by default also load_checkpoint, export and generate."""

    def before_train(self) -> None:
        """Called once before the first step, with all state restored."""

    def after_train(self) -> None:
        """Called once after the last step, not after an error or an interruption."""

    def before_epoch(self) -> None:
        """Called before the first step of an epoch, `trainer.epoch`; not again if a run resumes within the epoch."""

    def after_epoch(self) -> None:
        """Called after the step that uses the last sample of an epoch, `trainer.epoch`, and after its evaluation.

        `trainer.storage.latest()` has the metrics of the step and of its evaluation. Values that are put here belong to
        the line of this step, and changes of state to its checkpoint.
        """

    def before_step(self) -> None:
        """Called before the batch of an update is fetched."""

    def after_step(self) -> None:
        """Called after each update, before evaluating, writing and saving."""

    def before_eval(self) -> None:
        """Called before an evaluation of all its sets. To evaluate with other weights, use `averaged_weights`."""

    def after_eval(self, logs: Mapping[str, Any]) -> None:
        """Called after an evaluation with its logs, such as {"valid/loss": 0.3}; after a failed one with {}."""

    def after_save(self, path: Path) -> None:
        """Called at the first step boundary after a checkpoint was committed."""

    def on_anomaly(self, anomaly: Any) -> None:
        """Called after an anomaly that does not end the run."""

    def close(self) -> None:
        """Called once at the end, also after an error: release resources here."""

    def averaged_weights(self) -> Mapping[str, torch.Tensor]:
        """Returns weights to evaluate with instead of the trained ones, by the names in the model; {} for none.

        The loop copies them into the model from `before_eval` to `after_eval`, and saves them in each checkpoint;
        weights that are also in `state_dict` are saved once. Other weights are those of the training.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs: nested dicts, lists, numbers, strings and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`: before `before_train`, and again after a rollback.

        Tensors are in host memory: move them to the device where they are used.
        """


def call_each(functions: Iterable[Callable[..., None]], *arguments: Any) -> list[Exception]:
    """Calls all of them even if some raise; returns the exceptions."""
    errors = []
    for function in functions:
        try:
            function(*arguments)
        except Exception as error:
            errors.append(error)
    return errors


class HookCalls:
    """Calls the hooks of a run. Only methods that a hook overrides are called, so an unused event costs nothing.

    Events other than `close` are called on all ranks, within the context `within`.
    """

    def __init__(self, hooks: Iterable[Hook]) -> None:
        if not isinstance(hooks, Iterable):
            raise ConfigError(f"build_hooks returned {hooks!r}. Return a list, such as [*build.hooks(), MyHook()].")
        self.hooks = list(hooks)
        self.within: AbstractContextManager[Any] = nullcontext()
        for hook in self.hooks:
            _check_is_hook(hook)
            _reject_misspelt(hook)
            reject_half_state(type(hook), Hook)
            own = [event for event in HOOK_EVENTS if _overrides(hook, event)]
            reject_uncalled(hook, Hook, HOOK_EVENTS, overrides=own)
            for event in own:
                reject_wrong_call(getattr(hook, event), EVENT_ARGUMENTS.get(event, ()), role=event)
        self._calls: dict[str, list[Callable[..., None]]] = {
            event: [getattr(hook, event) for hook in self.hooks if _overrides(hook, event)] for event in HOOK_EVENTS
        }
        self.before_step = self._calls["before_step"]
        self.after_step = self._calls["after_step"]

    def check_after_each(self, check: Callable[[Callable[..., None]], None]) -> None:
        """Calls `check` with each method of a user's hook after it was called."""

        def checked(function: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: Any) -> None:
                function(*arguments)
                check(function)

            owner = getattr(function, "__self__", function)
            return call if is_user_code(type(owner)) or hasattr(function, "user_function") else function

        for functions in self._calls.values():
            functions[:] = map(checked, functions)

    def call(self, event: str, *arguments: Any) -> None:
        """Calls one event of every hook that overrides it."""
        with self.within:
            for function in self._calls[event]:
                function(*arguments)

    def call_all(self, event: str, *arguments: Any) -> list[Exception]:
        """Calls one event of every hook even if some raise; returns the exceptions."""
        with self.within if event != "close" else nullcontext():
            return call_each(self._calls[event], *arguments)

    def averaged_weights(self) -> tuple[Mapping[str, torch.Tensor], bool]:
        """Returns the averaged weights of the hook that has any, and whether evaluations use them."""
        found = [
            (hook, weights)
            for hook in self.hooks
            if _overrides(hook, "averaged_weights")
            if (weights := hook.averaged_weights())
        ]
        if len(found) > 1:
            names = " and ".join(type(hook).__name__ for hook, _ in found)
            raise ConfigError(f"hooks: {names} both have averaged weights, but an evaluation uses one set. Keep one.")
        for hook, weights in found:
            return weights, getattr(hook, "evaluates_averaged", True)
        return {}, False

    def has(self, event: str) -> bool:
        """Returns True if a hook has this event."""
        return bool(self._calls[event])

    def owners(self, event: str) -> list[Hook]:
        """Returns the hooks that have an event."""
        return [hook for hook in self.hooks if _overrides(hook, event)]

    def keyed(self) -> dict[str, Hook]:
        """Returns the hooks by the key of their state: the class name, with an ordinal if a class repeats."""
        keyed: dict[str, Hook] = {}
        for hook in self.hooks:
            if not hasattr(hook, "state_dict"):
                continue  # a hook that does not inherit from Hook and has no state
            name = type(hook).__name__
            number = sum(type(other).__name__ == name for other in keyed.values()) + 1
            keyed[name if number == 1 else f"{name}#{number}"] = hook
        return keyed


def _check_is_hook(hook: Any) -> None:
    """Raises for a class or a function instead of a hook object."""
    name = getattr(hook, "__name__", repr(hook))
    if isinstance(hook, type):
        raise ConfigError(f"{name} is a class, but a hook is an object of one. Pass {name}() instead.")
    if callable(hook) and not any(hasattr(hook, event) for event in HOOK_EVENTS):
        raise ConfigError(
            f"{name} is a function, not a hook. Pass Every(n)({name}), or CallbackHook(after_step={name})."
        )


def _reject_misspelt(hook: Hook) -> None:
    """Rejects a method whose name resembles an event, because it would never be called."""
    for name, value in vars(type(hook)).items():
        if callable(value) and not name.startswith("_") and not hasattr(Hook, name):
            close = difflib.get_close_matches(name, HOOK_EVENTS, n=1, cutoff=0.85)
            if close:
                raise ConfigError(
                    f"{type(hook).__name__}.{name} is not an event of a hook. Did you mean {close[0]}?",
                    where=location_of(value),
                )


def _overrides(hook: Hook, event: str) -> bool:
    # A hook need not inherit from Hook or define every event; an event may be an attribute of the class or of the
    # object.
    own = getattr(hook, event, None)
    return own is not None and getattr(own, "__func__", None) is not getattr(Hook, event)
