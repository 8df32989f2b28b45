"""The package's log: on stderr, unless the program configures logging, and in the run's files.

Rank 0 logs to stderr, other ranks only errors; logs/rank-N.txt in the run folder has the log of each rank. A run
continues if its terminal is closed (`outlive_console`).
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from trainwright.safe_text import safe

logger = logging.getLogger(__name__)

_MAX_BUFFERED_RECORDS = 10_000


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which notebooks and tests replace.

    In a notebook, which shows stderr as errors, messages below WARNING go to `sys.stdout`.
    """

    _level = logging.NOTSET

    def show_from(self, level: int) -> None:
        """Shows messages from `level`; ranks other than 0 show only errors."""
        self.setFormatter(_SafeFormatter("%(message)s"))
        # A warning from thousands of ranks would hide everything else.
        self.setLevel(level if os.environ.get("RANK", "0") == "0" else max(level, logging.ERROR))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, under the handler's lock."""
        self._level = record.levelno
        super().emit(record)

    @property
    def stream(self) -> TextIO:
        return sys.stdout if self._level < logging.WARNING and in_notebook() else sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """Ignores the assignment by logging."""


class _WarningsHandler(_StderrHandler):
    """Shows warnings of a run in a program that has not configured logging.

    Python does the same for a logger without handlers (`logging.lastResort`), but a run has handlers for its files.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, unless the program has configured logging since the start of the run."""
        if not _has_own_handlers(logging.getLogger("trainwright")):
            super().emit(record)


def in_notebook() -> bool:
    """Returns True in a Jupyter kernel, whose outputs a browser shows; False in a terminal with IPython."""
    # Another thread may be importing IPython, in which case the module has no get_ipython yet.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class _SafeFormatter(logging.Formatter):
    """Masks credentials and escapes control characters, also those of tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record))


def show_log(level: int = logging.INFO) -> None:
    """Shows the package's messages from `level` on stderr; ranks other than 0 show only errors."""
    package = logging.getLogger("trainwright")
    package.setLevel(min(level, logging.INFO))  # log.txt also has INFO in a quiet run
    shown = next((handler for handler in package.handlers if isinstance(handler, _StderrHandler)), None)
    if shown is None:
        shown = _StderrHandler()
        package.addHandler(shown)
    shown.show_from(level)


def show_log_unless_configured() -> None:
    """Shows the package's messages on stderr, from INFO, for a script or a notebook.

    A program that has configured logging keeps its configuration: a level of the logger `trainwright` is respected, and
    handlers of the root logger (`logging.basicConfig`) or of `trainwright` show the messages instead, from their level.
    """
    package = logging.getLogger("trainwright")
    if _has_own_handlers(package):
        for handler in [each for each in package.handlers if isinstance(each, _StderrHandler)]:
            package.removeHandler(handler)  # of an earlier call
        return
    level = package.level
    show_log(logging.INFO if level == logging.NOTSET else level)
    package.setLevel(logging.INFO if level == logging.NOTSET else level)


def is_progress_shown() -> bool:
    """Returns True unless the log level is above INFO, by the program's configuration or on the command line (`-q`)."""
    package = logging.getLogger("trainwright")
    shown = next((handler for handler in package.handlers if type(handler) is _StderrHandler), None)
    is_quiet = shown is not None and shown.level > logging.INFO and os.environ.get("RANK", "0") == "0"
    return package.isEnabledFor(logging.INFO) and not is_quiet


def _has_own_handlers(package: logging.Logger) -> bool:
    """Returns True if the program has configured logging."""
    own = (_StderrHandler, _Buffer, _RunFile)
    return bool(logging.getLogger().handlers) or any(not isinstance(each, own) for each in package.handlers)


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
    Within another such context nothing happens: the outer one writes the files.
    """
    package = logging.getLogger("trainwright")
    if any(isinstance(handler, _Buffer | _RunFile) for handler in package.handlers):
        yield lambda *paths: None
        return
    level = package.level
    if level == logging.NOTSET and not _has_own_handlers(package):
        package.setLevel(logging.INFO)  # a script without logging configuration
    buffer = _Buffer()
    package.addHandler(buffer)
    warnings = _WarningsHandler()
    if not _has_own_handlers(package) and not any(isinstance(each, _StderrHandler) for each in package.handlers):
        warnings.show_from(logging.WARNING)
        package.addHandler(warnings)
    files: list[_RunFile] = []

    def open_files(*paths: Path) -> None:
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            file = _RunFile(path, encoding="utf-8")
            file.setFormatter(_SafeFormatter("%(asctime)s %(levelname)s %(message)s"))
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
        for handler in (buffer, warnings, *files):
            package.removeHandler(handler)
            handler.close()


class _RunFile(logging.FileHandler):
    """Writes a log file of the run."""


class _Buffer(logging.Handler):
    """Buffers records until the run's files are open."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.records) < _MAX_BUFFERED_RECORDS:
            self.records.append(record)


@contextmanager
def outlive_console() -> Iterator[None]:
    """Lets the program continue if its terminal is closed, or the reader of its pipe ends (`| head`).

    Further output is discarded, which is logged. Output is also discarded while its disk is full. Streams that a
    notebook or a test has replaced are not changed.
    """
    guarded: list[tuple[str, Any, _ConsoleFile]] = []
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper or _descriptor(stream) != descriptor:
            continue
        if _console_file(stream) is not None:
            continue  # an enclosing context
        file = _ConsoleFile(name, descriptor)
        replaced = io.TextIOWrapper(
            # With `python -u`, the stream has no buffer, and prints are shown immediately.
            file if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(file),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        guarded.append((name, stream, file))
        try:
            stream.flush()
        except OSError as error:
            file.discard(error)
        setattr(sys, name, replaced)
    try:
        yield
    finally:
        for name, stream, file in guarded:
            current = getattr(sys, name)
            current.flush()
            file.finish()
            if _console_file(current) is file:
                setattr(sys, name, stream)


def _console_file(stream: Any) -> _ConsoleFile | None:
    """Returns the file of a stream that `outlive_console` has replaced."""
    buffer = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", buffer)
    return file if isinstance(file, _ConsoleFile) else None


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # replaced, or closed
        return None


class _ConsoleFile(io.FileIO):
    """Standard output or error, which stays writable after its reader has ended."""

    def __init__(self, name: str, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._name = name
        self._note: threading.Thread | None = None

    def write(self, content: Any) -> int:
        """Writes the content, or discards it if nothing can receive it."""
        try:
            return super().write(content)
        except OSError as error:
            self.discard(error)
            return memoryview(content).nbytes

    def discard(self, error: OSError) -> None:
        """Discards all further text if the reader has ended, or only the current text if the disk is full; otherwise
        raises."""
        if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise error
        if error.errno in (errno.EPIPE, errno.EIO):
            # The descriptor, not the stream: libraries and child processes write to it too.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        if self._note is None:
            # In a thread, because the log may be waiting for this write.
            message = "%s is no longer readable (%s): its output is discarded, and the run continues."
            arguments = (message, self._name, error.strerror)
            self._note = threading.Thread(target=logger.warning, args=arguments, daemon=True)
            self._note.start()

    def finish(self) -> None:
        """Waits until the message is logged."""
        if self._note is not None:
            self._note.join()


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns each row as a line with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
