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


class Every:
    """`Every(n)(fn)` is a hook that calls `fn(trainer)` after each step that n divides.

    >>> hook = Every(100)(lambda trainer: print(trainer.step))
    """

    def __init__(self, steps: int) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"Every({steps!r}): give a whole, positive number of steps.")
        self.steps = steps

    def __call__(self, function: Callable[[Any], None]) -> Hook:
        """Returns the hook."""
        return CallEvery(self.steps, function)


class CallEvery(Hook):
    """Calls a function every n steps; made by `Every`."""

    def __init__(self, steps: int, function: Callable[[Any], None]) -> None:
        self.steps = steps
        self.function = function

    def after_step(self) -> None:
        """Calls the function when it is due."""
        if self.trainer.step % self.steps == 0:
            self.function(self.trainer)


def every_from_config(steps: int, call: str, project_dir: Path) -> Hook:
    """Makes the hook of `{type: every, steps: 100, call: file.py:function}`."""
    return Every(steps)(registry.find("hook", call, project_dir=project_dir, label="hooks.every.call"))


Act = Callable[..., None]


class CallbackHook(Hook):
    """Each function is called with the trainer at the event that it is given for, and with what that event tells.

    >>> hook = CallbackHook(after_step=lambda trainer: print(trainer.step))
    >>> hook = CallbackHook(after_eval=lambda trainer, logs: print(logs["valid/loss"]))

    An event without a function costs nothing.
    """

    def __init__(
        self,
        *,
        before_train: Act | None = None,
        after_train: Act | None = None,
        before_step: Act | None = None,
        after_step: Act | None = None,
        before_eval: Act | None = None,
        after_eval: Act | None = None,
        after_save: Act | None = None,
        on_anomaly: Act | None = None,
        close: Act | None = None,
        **unknown: Any,
    ) -> None:
        given = dict(locals())
        for name in unknown:
            problem = f"CallbackHook: {name} is no event of a hook. {suggest(name, HOOK_EVENTS)}"
            raise ConfigError(problem, where=caller())
        acts: dict[str, Act] = {event: given[event] for event in HOOK_EVENTS if given[event] is not None}
        if not acts:
            raise ConfigError(
                "CallbackHook was given no function. Give one, such as after_step=act, with act(trainer).",
                where=caller(),
            )
        for event, act in acts.items():
            reject_wrong_call(act, ("trainer", *EVENT_ARGUMENTS.get(event, ())), role=f"CallbackHook's {event}")
            setattr(self, event, self._with_trainer(act))

    def _with_trainer(self, act: Act) -> Act:
        def call(*arguments: Any) -> None:
            act(self.trainer, *arguments)

        return call


def callback_from_config(
    project_dir: Path,
    *,
    before_train: str | None = None,
    after_train: str | None = None,
    before_step: str | None = None,
    after_step: str | None = None,
    before_eval: str | None = None,
    after_eval: str | None = None,
    after_save: str | None = None,
    on_anomaly: str | None = None,
    close: str | None = None,
) -> Hook:
    """Makes the hook of `{type: callback, after_step: file.py:function}`; the function gets the trainer."""
    given = dict(locals())
    return CallbackHook(
        **{
            event: registry.find("hook", given[event], project_dir=project_dir, label=f"hooks.callback.{event}")
            for event in HOOK_EVENTS
            if given[event] is not None
        }
    )
