"""Calls plain functions at moments of the run: a hook without a class.

For one function every n steps see every.py; for what needs state of its own write a class (loop/hook.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright import registry
from trainwright.config.problems import suggest
from trainwright.errors import ConfigError
from trainwright.loop.calls import refuse_wrong_call
from trainwright.loop.hook import MOMENTS, TOLD, Hook
from trainwright.user_code import caller

Act = Callable[..., None]


class CallbackHook(Hook):
    """Each function is called with the trainer at the moment that it is given for, and with what that moment tells.

    >>> hook = CallbackHook(after_step=lambda trainer: print(trainer.step))
    >>> hook = CallbackHook(after_eval=lambda trainer, logs: print(logs["valid/loss"]))

    A moment without a function costs nothing.
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
        on_incident: Act | None = None,
        close: Act | None = None,
        **unknown: Any,
    ) -> None:
        given = dict(locals())
        for name in unknown:
            problem = f"CallbackHook: {name} is no moment of a hook. {suggest(name, MOMENTS)}"
            raise ConfigError(problem, where=caller())
        acts: dict[str, Act] = {moment: given[moment] for moment in MOMENTS if given[moment] is not None}
        if not acts:
            raise ConfigError(
                "CallbackHook was given no function. Give one, such as after_step=act, with act(trainer).",
                where=caller(),
            )
        for moment, act in acts.items():
            refuse_wrong_call(act, ("trainer", *TOLD.get(moment, ())), role=f"CallbackHook's {moment}")
            setattr(self, moment, self._with_trainer(act))

    def _with_trainer(self, act: Act) -> Act:
        def call(*told: Any) -> None:
            act(self.trainer, *told)

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
    on_incident: str | None = None,
    close: str | None = None,
) -> Hook:
    """Makes the hook of `{type: callback, after_step: file.py:function}`; the function gets the trainer."""
    given = dict(locals())
    return CallbackHook(
        **{
            moment: registry.find("hook", given[moment], project_dir=project_dir, label=f"hooks.callback.{moment}")
            for moment in MOMENTS
            if given[moment] is not None
        }
    )
