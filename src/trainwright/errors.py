"""Errors for users: what is wrong, what was given, where it was set, what to do.

Each has the full message and, if it is known, the source location (`run.yaml:14`, `override trainer.lr=x`), with which
the message starts. Credentials in URLs are masked.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import traceback
from types import TracebackType

from trainwright.safe_text import escape_controls, mask_secrets

HANG_EXIT_CODE = 75
"""The exit code of all ranks if one is stuck: "temporary failure, try again" in sysexits.h.

A launcher that restarts on it resumes from the newest checkpoint (hooks/watchdog.py).
"""


def exit_code_of(signal_name: str) -> int:
    """Returns the exit code of a run that was interrupted by a signal, like a shell."""
    return 128 + signal.Signals[signal_name].value


class TrainwrightError(Exception):
    """An error with a message for the user; the command line shows it without a traceback."""

    def __init__(self, problem: str, *, where: object | None = None) -> None:
        self.problem = mask_secrets(problem)
        self.where = where
        super().__init__(mask_secrets(f"{where}: {problem}" if where is not None else problem))

    def _render_traceback_(self) -> list[str]:
        """Returns the display in a notebook: the message without a traceback, as on the command line.

        The file of a cell, a temporary one, is shown as In[3]. Log level DEBUG shows tracebacks.
        """
        if logging.getLogger("trainwright").getEffectiveLevel() <= logging.DEBUG:
            return traceback.format_exception(self)
        text = escape_controls(str(self))
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        name_cell = getattr(getattr(shell, "compile", None), "format_code_name", lambda file: None)

        def replace(found: re.Match[str]) -> str:
            cell = name_cell(found[1])
            return found[0] if cell is None else f"{' '.join(cell)}, line {found[2]}"

        shown = re.sub(r"([^\s:]+):(\d+)", replace, text)
        return [f"{type(self).__name__}: {shown}"]


def shorten_tracebacks() -> None:
    """Makes a script that ends with a TrainwrightError print one line, like the command line.

    Has no effect if another excepthook is installed (a debugger, a service). Log level DEBUG shows tracebacks.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_error


def _print_error(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    if not isinstance(error, TrainwrightError) or logging.getLogger("trainwright").getEffectiveLevel() <= logging.DEBUG:
        sys.__excepthook__(kind, error, frames)
        return
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"{'' if rank == '0' else f'rank {rank}: '}error: {escape_controls(str(error))}\n")


class ConfigError(TrainwrightError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class TrustError(ConfigError):
    """A foreign run folder names code, which is not loaded without permission."""


class ComponentError(ConfigError):
    """A component cannot be found, or its arguments do not match its constructor."""


class CheckpointError(TrainwrightError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class DataError(TrainwrightError):
    """A dataset, a sample or a batch cannot be used."""


class WorkerLostError(DataError):
    """A process that reads data was killed, has ended or does not answer; a launcher may restart the run."""


class AnomalyError(TrainwrightError):
    """An anomaly (a loss that is not finite, a spike) for which the config ends the run."""


class HostReadError(TrainwrightError):
    """A step that is being captured reads a value that differs between steps, such as a tensor's value."""


class OutOfMemory(TrainwrightError):  # noqa: N818  # the common term
    """The device or the host has no memory left for a step; the message describes its usage and settings to change."""
