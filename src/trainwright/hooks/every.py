"""Calls any function every n steps: a hook without a class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright import registry
from trainwright.errors import ConfigError
from trainwright.loop.hook import Hook


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
