"""The package's log: on stderr, unless the program configures logging, and in the run's files.

Rank 0 logs to stderr, other ranks only errors; logs/rank-N.txt in the run folder has the log of each rank.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_MAX_BUFFERED_RECORDS = 10_000


def json_text(value: Any, **options: Any) -> str:
    """Returns strict JSON, which has no NaN and no infinities: they are null. `options` are those of json.dumps.

    >>> json_text({"step": 3, "loss": float("nan")})
    '{"step": 3, "loss": null}'
    """
    default = options.pop("default", None)

    def walk(item: Any) -> Any:
        if isinstance(item, float):
            return item if math.isfinite(item) else None
        if isinstance(item, Mapping):
            return {key: walk(each) for key, each in item.items()}
        if isinstance(item, list | tuple):
            return [walk(each) for each in item]
        is_known = item is None or isinstance(item, str | int)
        return item if is_known or default is None else walk(default(item))

    return json.dumps(walk(value), allow_nan=False, **options)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which notebooks and tests replace."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """Ignores the assignment by logging."""


def show_log(level: int = logging.INFO) -> None:
    """Shows the package's messages from `level` on stderr; ranks other than 0 show only errors."""
    package = logging.getLogger("trainwright")
    package.setLevel(min(level, logging.INFO))  # log.txt also has INFO in a quiet run
    shown = next((handler for handler in package.handlers if isinstance(handler, _StderrHandler)), None)
    if shown is None:
        shown = _StderrHandler()
        shown.setFormatter(logging.Formatter("%(message)s"))
        package.addHandler(shown)
    # A warning that thousands of ranks print would hide everything else.
    shown.setLevel(level if os.environ.get("RANK", "0") == "0" else max(level, logging.ERROR))


def flush_log() -> None:
    """Flushes all handlers, for a process that exits without cleanup."""
    for handler in logging.getLogger("trainwright").handlers:
        handler.flush()


def rank_log(folder: Path, rank: int) -> Path:
    """Returns the log file of a rank in a run with several processes."""
    return folder / "logs" / f"rank-{rank}.txt"


@contextmanager
def run_log() -> Iterator[Callable[..., None]]:
    """Buffers the package's log until the run's files are known; yields a function that opens these paths.

    The function is called at most once. An error that ends the context is written to the files with its traceback.
    """
    package = logging.getLogger("trainwright")
    level = package.level
    if level == logging.NOTSET:
        package.setLevel(logging.INFO)  # a script without logging configuration
    buffer = _Buffer()
    package.addHandler(buffer)
    files: list[logging.FileHandler] = []

    def open_files(*paths: Path) -> None:
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            file = logging.FileHandler(path, encoding="utf-8")
            file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            for record in buffer.records:
                file.handle(record)
            package.addHandler(file)
            files.append(file)
        package.removeHandler(buffer)

    try:
        yield open_files
    except Exception as error:
        for file in files:  # the caller shows it on the terminal
            file.handle(logging.LogRecord("trainwright", logging.ERROR, __file__, 0, "%s", (error,), sys.exc_info()))
        raise
    finally:
        package.setLevel(level)
        for handler in (buffer, *files):
            package.removeHandler(handler)
            handler.close()


class _Buffer(logging.Handler):
    """Buffers records until the run's files are open."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.records) < _MAX_BUFFERED_RECORDS:
            self.records.append(record)
