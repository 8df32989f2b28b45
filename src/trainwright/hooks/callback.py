"""Hooks from plain functions: `CallbackHook`, and `Every(n)`, which calls one every n steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.config.problems import suggest
from trainwright.errors import ConfigError
from trainwright.loop.hook import EVENT_ARGUMENTS, HOOK_EVENTS, Hook
from trainwright.registry import resolve as registry
from trainwright.user_code.locations import caller
from trainwright.user_code.signatures import reject_wrong_call


class CallbackHook(Hook):
    """Calls each function with the trainer, and the arguments of the event, at the event that it is given for.

    >>> hook = CallbackHook(after_step=lambda trainer: print(trainer.step))
    >>> hook = CallbackHook(after_eval=lambda trainer, logs: print(logs["valid/loss"]))

    An event without a function costs nothing.
    """

    def __init__(self, **functions: Callable[..., None] | None) -> None:
        given = {event: function for event, function in functions.items() if function is not None}
        for event, function in given.items():
            if event not in HOOK_EVENTS:
                problem = f"CallbackHook: {event} is not an event of a hook. {suggest(event, HOOK_EVENTS)}"
                raise ConfigError(problem, where=caller())
            arguments = ("trainer", *EVENT_ARGUMENTS.get(event, ()))
            reject_wrong_call(function, arguments, role=f"CallbackHook's {event}")
            setattr(self, event, self._with_trainer(function))
        if not given:
            raise ConfigError(
                "CallbackHook has no function. Pass one, such as after_step=log, with log(trainer).", where=caller()
            )

    def _with_trainer(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            function(self.trainer, *arguments)

        call.user_function = function  # type: ignore[attr-defined]  # for messages
        return call


class Every:
    """`Every(n)(fn)` is a hook that calls `fn(trainer)` after each step that is a multiple of n.

    `Every(epochs=n)(fn)` calls it at the end of every nth epoch.

    >>> hook = Every(100)(lambda trainer: print(trainer.step))
    >>> hook = Every(epochs=1)(lambda trainer: print(trainer.epoch))
    """

    def __init__(self, steps: int | None = None, *, epochs: int | None = None) -> None:
        if (steps is None) == (epochs is None):
            raise ConfigError("Every: pass a number of steps, or epochs=n.")
        name, period = ("steps", steps) if epochs is None else ("epochs", epochs)
        if not isinstance(period, int) or period < 1:
            raise ConfigError(
                f"Every({'' if epochs is None else 'epochs='}{period!r}): give a positive integer number of {name}."
            )
        self.steps = steps
        self.epochs = epochs

    def __call__(self, function: Callable[[Any], None]) -> Hook:
        """Returns the hook."""

        steps, epochs = self.steps, self.epochs
        if steps is None:
            assert epochs is not None
            return CallbackHook(
                after_epoch=lambda trainer: function(trainer) if (trainer.epoch + 1) % epochs == 0 else None
            )

        def call_if_due(trainer: Any) -> None:
            if trainer.step % steps == 0:
                function(trainer)

        call_if_due.user_function = function  # type: ignore[attr-defined]
        return CallbackHook(after_step=call_if_due)


def every_from_config(call: str, project_dir: Path, steps: int | None = None, epochs: int | None = None) -> Hook:
    """Builds the hook of `{type: every, steps: 100, call: file.py:function}`, or with `epochs: 1` instead of steps."""
    return Every(steps, epochs=epochs)(registry.find("hook", call, project_dir=project_dir, label="hooks.every.call"))


def callback_from_config(project_dir: Path, **functions: str) -> Hook:
    """Builds the hook of `{type: callback, after_step: file.py:function}`; the function receives the trainer."""
    return CallbackHook(
        **{
            event: registry.find("hook", name, project_dir=project_dir, label=f"hooks.callback.{event}")
            for event, name in functions.items()
        }
    )
