"""The errors that a user meets: what is wrong, what we got, where it came from, what to do.

Each takes the whole message and, where one is known, the place (`run.yaml:14`, `override trainer.lr=x`)
that the message starts with. Nothing here imports the rest of the package.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import TracebackType

HANG_EXIT_CODE = 75
"""How every rank of a run leaves in which one was stuck: sysexits.h's "temporary failure, try again".

A launcher that restarts on it goes on from the newest checkpoint (hooks/watchdog.py).
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


def shorten_tracebacks() -> None:
    """Lets a script that ends with an explained error show its one line, as the command line does.

    Where somebody else shows errors (a debugger, a service) nothing changes. A log level of DEBUG shows tracebacks.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_in_words


def _show_in_words(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    is_explained = isinstance(error, TrainwrightError)
    if not is_explained or logging.getLogger("trainwright").getEffectiveLevel() <= logging.DEBUG:
        sys.__excepthook__(kind, error, frames)
        return
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"{'' if rank == '0' else f'rank {rank}: '}error: {error}\n")


class ConfigError(TrainwrightError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class ComponentError(ConfigError):
    """A component cannot be found, or its arguments do not fit its constructor."""


class CheckpointError(TrainwrightError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class DataError(TrainwrightError):
    """A dataset, a sample or a batch cannot be used."""


class AnomalyError(TrainwrightError):
    """An update went wrong (a loss that is not finite, a spike) and the config says that the run ends."""


class HostReadError(TrainwrightError):
    """A step that is being recorded asked for something that differs from step to step, such as a tensor's value."""


class OutOfMemory(TrainwrightError):  # noqa: N818  # the words that everybody has for it
    """The device or the machine has no memory left for a step; the message says what holds it and what to change."""
