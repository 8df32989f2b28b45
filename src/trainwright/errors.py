"""The errors that a user meets: what is wrong, what we got, where it came from, what to do.

Each takes the whole message and, where one is known, the place (`run.yaml:14`, `override trainer.lr=x`)
that the message starts with. Nothing here imports the rest of the package.
"""

from __future__ import annotations

import signal

HANG_EXIT_CODE = 75
"""How every rank of a run leaves in which one was stuck: sysexits.h's "temporary failure, try again".

A launcher that restarts on it goes on from the newest checkpoint (hooks/watch_for_hangs.py).
"""


def exit_code_of(signal_name: str) -> int:
    """How a run leaves that was told to by a signal and has saved its step: as a shell would say it."""
    return 128 + signal.Signals[signal_name].value


class TrainwrightError(Exception):
    """An error that is explained to the user in words; the command line shows it without a traceback."""

    def __init__(self, problem: str, *, where: object | None = None) -> None:
        self.problem = problem
        self.where = where
        super().__init__(f"{where}: {problem}" if where is not None else problem)


class ConfigError(TrainwrightError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class ComponentError(ConfigError):
    """A component cannot be found, or its arguments do not fit its constructor."""


class CheckpointError(TrainwrightError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class DataError(TrainwrightError):
    """A dataset, a sample or a batch cannot be used."""


class IncidentError(TrainwrightError):
    """An update went wrong (a loss that is not finite, a spike) and the config says that the run ends."""


class OutOfMemory(TrainwrightError):  # noqa: N818  # the words that everybody has for it
    """The device or the machine has no memory left for a step; the message says what holds it and what to change."""
