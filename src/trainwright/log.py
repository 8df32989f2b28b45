"""What the package says while it works, shown on stderr for those who have not set up logging themselves."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the time, as notebooks and tests exchange it."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """Logging sets it; there is nothing to keep."""


def show_log(level: int = logging.INFO) -> None:
    """Shows the package's messages from `level` on, once; of ranks other than the first only warnings."""
    package = logging.getLogger("trainwright")
    package.setLevel(min(level, logging.INFO))  # a quiet run's log.txt tells all the same what happened
    shown = next((handler for handler in package.handlers if isinstance(handler, _ToStderr)), None)
    if shown is None:
        shown = _ToStderr()
        shown.setFormatter(logging.Formatter("%(message)s"))
        package.addHandler(shown)
    # The first rank speaks for all; others are heard when something is wrong.
    shown.setLevel(level if os.environ.get("RANK", "0") == "0" else max(level, logging.WARNING))


def flush_log() -> None:
    """Writes out what handlers still hold, before a process leaves without saying good-bye."""
    for handler in logging.getLogger("trainwright").handlers:
        handler.flush()
