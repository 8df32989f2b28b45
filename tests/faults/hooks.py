"""Hooks that do harm at a given event of a run."""

import os
import signal

from trainwright import Hook


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class At(Hook):
    """Calls `act(trainer)` once, at the end of a step or before one."""

    def __init__(self, step, act, *, event="after_step"):
        self.at, self.act, self.event = step, act, event

    def before_step(self):
        if self.event == "before_step" and self.trainer.step + 1 == self.at:
            self.act(self.trainer)

    def after_step(self):
        if self.event == "after_step" and self.trainer.step == self.at:
            self.act(self.trainer)


def kill_at(step, *, event="after_step"):
    """kill -9, before or after the update of a step."""
    return At(step, lambda trainer: die(), event=event)


class AfterSave(Hook):
    """Calls `act(path)` after the checkpoint of a step was committed."""

    def __init__(self, step, act):
        self.at, self.act = step, act

    def after_save(self, path):
        if path.name == f"step-{self.at:08d}":
            self.act(path)
