"""Shows the progress of long operations, such as tokenizing or saving: a bar in the last row of a terminal, otherwise
lines in the log.

    with progress("Tokenizing", total=len(rows), unit="rows") as advance:
        for row in rows:
            ...
            advance()

Any module may call it, in any thread; rank 0 shows it. An operation of less than half a second shows nothing, and one
of less than two seconds logs nothing. writers/console.py draws its panel in `BottomRows` too.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from trainwright.log import in_notebook, is_progress_shown
from trainwright.safe_text import safe

logger = logging.getLogger(__name__)

SHOWN_AFTER_SECONDS, DRAWN_EVERY_SECONDS = 0.5, 0.25
LOGGED_AFTER_SECONDS, LOGGED_EVERY_SECONDS = 2.0, 60.0
"""Also the minimum time between the log lines of repeated operations, such as evaluations."""

_BAR_COLUMNS = 30
_BARS = "▁▂▃▄▅▆▇█"
_MIN_ROWS_ABOVE = 4
_SAVE_CURSOR, _RESTORE_CURSOR, _SCROLL_ALL, _ERASE_BELOW = "\x1b7", "\x1b8", "\x1b[r", "\x1b[J"


class Phase:
    """Work in progress. Call it with the completed amount: `advance()` for one item, `advance(4096)` for more."""

    def __init__(self, what: str, *, total: float | None = None, unit: str = "") -> None:
        self.what = what
        self.total = total
        """The total amount in `unit`; None if it is not yet known."""
        self.unit = unit
        self.done = 0.0
        self.start = time.monotonic()
        self.has_ended = threading.Event()

    def __call__(self, amount: float = 1) -> None:
        """Adds an amount of work that was done."""
        self.done += amount

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self.start

    def amounts(self) -> str:
        """Returns the completed fraction, and the remaining time if it can be estimated."""
        parts = [_amount(self.done, self.total, self.unit)] if self.done or self.total else []
        if self.total and 0 < self.done < self.total and self.seconds > 1:
            parts.append(f"{clock_text(self.seconds / self.done * (self.total - self.done))} left")
        return "  ".join(parts)

    def line(self, columns: int) -> str:
        """Returns a line of at most this width: the operation, a bar, the amounts and the time since the start."""
        from rich.cells import cell_len, set_cell_size

        parts = [safe(self.what)]
        if self.total:
            share = min(1.0, self.done / self.total)
            parts.append(f"{bar_text(share, _BAR_COLUMNS)} {share:4.0%}")
        parts += filter(None, [self.amounts(), clock_text(self.seconds)])
        line = "  ".join(parts)
        return line if cell_len(line) <= columns else set_cell_size(line, columns - 1) + "…"


@contextmanager
def progress(what: str, *, total: float | None = None, unit: str = "") -> Iterator[Phase]:
    """Shows an operation while the block runs; yields a function to report the completed part of `total`.

    `what` is a verb with an object, such as "Loading tokenizer.json". With `unit="bytes"` amounts are shown in MB.
    """
    phase = Phase(what, total=total, unit=unit)
    # A data worker shares the terminal with its run.
    is_shown = os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None and is_progress_shown()
    if not is_shown:
        yield phase
        return
    status = _status.of_this_process()
    status.begin(phase)
    try:
        yield phase
    except BaseException:
        status.end(phase)
        raise
    status.end(phase, is_complete=True)


@contextmanager
def phases_shown_by(display: Callable[[Phase | None], None]) -> Iterator[None]:
    """Calls `display`, in another thread, with the current operation a few times per second, and with None at its end.

    For a writer that owns the last rows of the terminal, which then have no bar.
    """
    status = _status.of_this_process()
    status.take(display)
    try:
        yield
    finally:
        status.take(None)


def free_terminal() -> None:
    """Erases the last rows of the terminal, after a process or a worker has exited without doing so."""
    if is_terminal(2):
        BottomRows(2).close()


class BottomRows:
    """Rows at the bottom of a terminal that stay in place while all other output scrolls above them.

    The terminal's scrolling region ends above these rows, so the output of user code, of libraries, of other processes
    and of a debugger neither overwrites them nor is overwritten. A process that is killed does not restore the region;
    the command `reset` restores the terminal.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = (0, 0)
        self._height = 0

    def show(self, lines: Sequence[str]) -> None:
        """Draws the lines, which must not be wider than the terminal; adapts to a terminal that was resized."""
        try:
            columns, rows = os.get_terminal_size(self._descriptor)
        except OSError:
            return  # the terminal was closed
        height = len(lines)
        if rows < height + _MIN_ROWS_ABOVE:
            if self._height:
                self.close()
            return
        text = ""
        if (columns, rows) != self._size or height != self._height:
            # The cursor is above the old rows, even if the terminal has moved them.
            text += f"{_SAVE_CURSOR}{_SCROLL_ALL}{_RESTORE_CURSOR}{_ERASE_BELOW}" if self._height else ""
            text += "\x1bD" * height + f"\x1b[{height}A"  # scrolls if the cursor is too low
            self._size, self._height = (columns, rows), height
        # The region is set each time, because a program that ran while the user had suspended the run may have changed
        # it.
        text += f"{_SAVE_CURSOR}\x1b[1;{rows - height}r"
        text += "".join(f"\x1b[{rows - height + 1 + number};1H\x1b[2K{line}" for number, line in enumerate(lines))
        self._write(f"{text}\x1b[0m{_RESTORE_CURSOR}")

    def close(self) -> None:
        """Erases the rows and everything below the cursor; the whole terminal scrolls again."""
        self._write(f"{_SAVE_CURSOR}{_SCROLL_ALL}{_RESTORE_CURSOR}{_ERASE_BELOW}")
        self._size, self._height = (0, 0), 0

    def _write(self, text: str) -> None:
        # One call, unbuffered: the output of other threads and processes comes before or after it.
        try:
            os.write(self._descriptor, text.encode("utf-8", "replace"))
        except OSError:
            self._height = 0  # log.outlive_console reports a closed terminal


def is_terminal(descriptor: int) -> bool:
    """Returns True for a terminal that can move its cursor."""
    return os.name != "nt" and os.isatty(descriptor) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def stderr_terminal() -> int | None:
    """Returns the descriptor of `sys.stderr` if it is a terminal that shows Unicode; None in a notebook."""
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # rich replaces it while it draws the live line
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # replaced, or closed
        return None
    is_unicode = (stream.encoding or "").lower().replace("-", "") == "utf8"
    return descriptor if is_unicode and not in_notebook() and is_terminal(descriptor) else None


def bar_text(share: float, columns: int) -> str:
    """Returns a bar of this width.

    >>> bar_text(0.5, 8)
    '━━━━────'
    """
    full = round(share * columns)
    return "━" * full + "─" * (columns - full)


def sparkline(values: Sequence[float], max_columns: int | None = None) -> str:
    """Returns values as a row of bars, the highest one full; a value that is not finite is a gap.

    If there are more values than `max_columns`, a bar is the mean of several finite values. Empty for fewer than two
    bars.

    >>> sparkline([3.0, 2.0, 1.0])
    '█▄▁'
    """
    if max_columns is not None and len(values) > max_columns:
        edges = [len(values) * number // max_columns for number in range(max_columns + 1)]
        values = [_finite_mean(values[start:stop]) for start, stop in pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((value - low) * scale)] if math.isfinite(value) else " " for value in values)


def _finite_mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def clock_text(seconds: float) -> str:
    """Returns a time as h:mm:ss or m:ss.

    >>> clock_text(3725)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _amount(done: float, total: float | None, unit: str) -> str:
    if unit == "bytes":
        of = "" if total is None else f"/{total / 1e6:,.0f}"
        return f"{done / 1e6:,.0f}{of} MB"
    of = "" if total is None else f"/{total:,.0f}"
    return f"{done:,.0f}{of}{unit and ' '}{unit}"


class _Status:
    """The current operations of this process, and their display."""

    def __init__(self) -> None:
        self._process = os.getpid()
        # Reentrant, because a signal handler may begin or end an operation while its thread holds the lock.
        self._lock = threading.RLock()
        self._phases: list[Phase] = []
        self._rows: BottomRows | None = None
        self._display: Callable[[Phase | None], None] | None = None
        self._logged: dict[str, float] = {}

    def of_this_process(self) -> _Status:
        """Clears the operations of the process from which this one was forked."""
        if self._process != os.getpid():
            self.__init__()  # type: ignore[misc]
        return self

    def begin(self, phase: Phase) -> None:
        """Adds an operation, and starts a thread that shows it."""
        with self._lock:
            self._phases.append(phase)
        threading.Thread(target=self._watch, args=(phase,), name="trainwright-progress", daemon=True).start()

    def end(self, phase: Phase, *, is_complete: bool = False) -> None:
        """Removes an operation; logs its duration if it was long."""
        phase.has_ended.set()
        with self._lock:
            self._phases.remove(phase)
            self._draw()
            is_logged = self._logged.get(phase.what) == phase.start
            if stderr_terminal() is not None and phase.seconds >= LOGGED_AFTER_SECONDS:
                is_logged = self._may_log(phase)
        if is_complete and is_logged:
            amounts = f" ({_amount(phase.done, None, phase.unit)})" if phase.done else ""
            logger.info("%s: done in %.1f s%s.", phase.what, phase.seconds, amounts)

    def take(self, display: Callable[[Phase | None], None] | None) -> None:
        """Assigns the last rows to a writer, or reclaims them."""
        with self._lock:
            self.close_rows()
            self._display = display

    def close_rows(self) -> None:
        """Erases the bar."""
        with self._lock:
            if self._rows is not None:
                self._rows.close()
                self._rows = None

    def _watch(self, phase: Phase) -> None:
        if stderr_terminal() is not None:
            wait = SHOWN_AFTER_SECONDS
            while not phase.has_ended.wait(wait):
                wait = DRAWN_EVERY_SECONDS
                with self._lock:
                    if phase in self._phases[-1:]:
                        self._draw()
            return
        wait = LOGGED_AFTER_SECONDS
        while not phase.has_ended.wait(wait):
            wait = LOGGED_EVERY_SECONDS
            with self._lock:
                is_logged = self._may_log(phase)
            if is_logged:
                amounts = phase.amounts()
                logger.info("%s: %s after %.0f s", phase.what, amounts or "in progress", phase.seconds)

    def _may_log(self, phase: Phase) -> bool:
        """Returns True unless the same kind of operation was logged within LOGGED_EVERY_SECONDS."""
        latest = self._logged.get(phase.what)
        if latest is not None and latest != phase.start and phase.start - latest < LOGGED_EVERY_SECONDS:
            return False
        self._logged[phase.what] = phase.start
        return True

    def _draw(self) -> None:
        """Shows the newest operation that is long enough."""
        phase = next((each for each in reversed(self._phases) if each.seconds >= SHOWN_AFTER_SECONDS), None)
        if self._display is not None:
            self._display(phase)
            return
        descriptor = stderr_terminal()
        if phase is None or descriptor is None:
            self.close_rows()
            return
        if self._rows is None:
            self._rows = BottomRows(descriptor)
        self._rows.show([phase.line(os.get_terminal_size(descriptor).columns)])


_status = _Status()
