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
    package.setLevel(level)
    if any(isinstance(handler, _ToStderr) for handler in package.handlers):
        return
    handler = _ToStderr()
    # The first rank speaks for all; others are heard when something is wrong.
    handler.setLevel(logging.DEBUG if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
