"""What the package says while it works: on stderr for those who have not set up logging, and in the run's files.

Of several ranks the first is shown, others only when they fail; logs/rank-N.txt in the run folder has what each said.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_KEPT_RECORDS = 10_000


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the time, as notebooks and tests exchange it."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """Logging sets it; there is nothing to keep."""


def show_log(level: int = logging.INFO) -> None:
    """Shows the package's messages from `level` on, once; of ranks other than the first only errors."""
    package = logging.getLogger("trainwright")
    package.setLevel(min(level, logging.INFO))  # a quiet run's log.txt tells all the same what happened
    shown = next((handler for handler in package.handlers if isinstance(handler, _ToStderr)), None)
    if shown is None:
        shown = _ToStderr()
        shown.setFormatter(logging.Formatter("%(message)s"))
        package.addHandler(shown)
    # The first rank speaks for all: a warning that thousands of ranks show hides everything else.
    shown.setLevel(level if os.environ.get("RANK", "0") == "0" else max(level, logging.ERROR))


def flush_log() -> None:
    """Writes out what handlers still hold, before a process leaves without saying good-bye."""
    for handler in logging.getLogger("trainwright").handlers:
        handler.flush()


def rank_log(folder: Path, rank: int) -> Path:
    """Returns where a rank of a run of several processes writes all that it says."""
    return folder / "logs" / f"rank-{rank}.txt"


@contextmanager
def run_log() -> Iterator[Callable[..., None]]:
    """Keeps the package's log until the run's files are known: yields the call that takes their paths and opens them.

    It is called once, or never. An error that ends the context is written to the files, with its traceback.
    """
    package = logging.getLogger("trainwright")
    level = package.level
    if level == logging.NOTSET:
        package.setLevel(logging.INFO)  # a script need not set up logging to get a log
    kept = _Kept()
    package.addHandler(kept)
    files: list[logging.FileHandler] = []

    def open_files(*paths: Path) -> None:
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            file = logging.FileHandler(path, encoding="utf-8")
            file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            for record in kept.records:
                file.handle(record)
            package.addHandler(file)
            files.append(file)
        package.removeHandler(kept)

    try:
        yield open_files
    except Exception as error:
        for file in files:  # the terminal gets it from whoever called us
            file.handle(logging.LogRecord("trainwright", logging.ERROR, __file__, 0, "%s", (error,), sys.exc_info()))
        raise
    finally:
        package.setLevel(level)
        for handler in (kept, *files):
            package.removeHandler(handler)
            handler.close()


class _Kept(logging.Handler):
    """Keeps what was said at the start of a run: the model, the data, what was found of an earlier run."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.records) < _KEPT_RECORDS:
            self.records.append(record)
