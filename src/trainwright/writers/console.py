"""Shows the run: a panel (panel.py) or one live line in a terminal, one display in a notebook, otherwise plain lines.

Silent if the package's log level is above INFO (`-q`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainwright.backends import memory_in_use
from trainwright.errors import HostReadError
from trainwright.events import EventStorage
from trainwright.log import in_notebook, is_progress_shown
from trainwright.progress import BottomRows, Phase, clock_text, phases_shown_by, sparkline, stderr_terminal
from trainwright.safe_text import safe
from trainwright.writers.curves import Points
from trainwright.writers.json_lines import read_history
from trainwright.writers.notebook import HIDDEN, SPEEDS, CurveHistory, NotebookDisplay, number_text, run_html
from trainwright.writers.panel import MIN_COLUMNS, MIN_ROWS, Panel
from trainwright.writers.writer import RunInfo, Writer

_PANEL_SECONDS, _LINE_SECONDS = 0.5, 0.1
"""The minimum time between two drawings; the panel takes about four milliseconds, the line half a millisecond."""

_CLOCK_SECONDS, _QUIET_SECONDS = 1.0, 1.0
"""How often the clock is drawn if there is no line, and after how long; together at most two seconds."""


class ConsoleWriter(Writer):
    """Prints progress: step, loss, speed and time left. Evaluations stay on the screen, progress is overwritten.

    On a terminal of at least 100 × 20 characters a panel also shows the curve of the loss, unless `panel` is False.
    """

    stores = ("texts",)

    def __init__(self, stream: IO[str] | None = None, *, panel: bool = True) -> None:
        self._console = Console(file=stream, stderr=True, highlight=False, soft_wrap=True)
        self._allows_panel = panel and stream is None
        self._panel: Panel | None = None
        self._rows: BottomRows | None = None
        self._live: Live | None = None
        self._phases = ExitStack()
        self._phase: Phase | None = None
        self._timer: threading.Timer | None = None
        self._has_taken_rows = False
        self._storage: EventStorage | None = None
        self._line_time = 0.0
        self._clock_row: BottomRows | None = None
        self._has_closed = threading.Event()
        # Phases are drawn by their own threads. Reentrant, as a signal handler may print.
        self._lock = threading.RLock()
        self._first: tuple[int, float] | None = None
        self._start = 0.0
        self._drawn = float("-inf")
        self._text = ""
        self._losses: deque[float] = deque(maxlen=8)
        self._display = NotebookDisplay() if stream is None and in_notebook() else None
        self._history = CurveHistory({})
        self._latest: dict[str, Any] = {}
        self._name = ""

    def begin(self, run: RunInfo) -> None:
        """Reads the curves of the earlier steps of a resumed run."""
        self._name, self._start = run.name, time.monotonic()
        curves: Mapping[str, Points] = {}
        is_panel = self._display is None and self._terminal() is not None
        if run.is_resumed and (is_panel or self._display is not None):
            curves = read_history(run.folder)
        if self._display is not None:
            self._history = CurveHistory(curves)
        elif is_panel:
            saved_step = run.step if run.is_resumed else None
            self._panel = Panel(
                run.name, keep_best=run.config.checkpoint.keep_best, curves=curves, saved_step=saved_step
            )

    def write(self, storage: EventStorage) -> None:
        """Shows the line."""
        if not is_progress_shown():
            return
        line = storage.line
        if "loss" in line:
            self._losses.append(line["loss"])
        evaluated = storage.evaluated
        if self._display is not None:
            self._show_in_notebook(self._display, storage)
            return
        training = {name: value for name, value in line.items() if name not in evaluated}
        left = self._seconds_left(line["step"], storage.max_steps)
        with self._lock:
            if self._console.is_terminal:
                self._storage, self._line_time = storage, time.monotonic()
                self._close_clock()
            if self._panel is not None:
                self._panel.add(
                    line,
                    evaluated,
                    max_steps=storage.max_steps,
                    seconds_left=left,
                    saved_step=storage.saved_step,
                )
            if training.keys() != {"step"}:
                self._text = self._progress(storage, training, left)
                self._show_progress()
            if evaluated:
                self._console.print(Text(f"step {line['step']}  {_pairs(evaluated)}", style="bold"))
            for name, text in storage.texts.items():
                self._console.print(Text(safe(f"step {line['step']}  {name}: {text}")))
        if not self._has_taken_rows and (self._rows is not None or self._live is not None):
            self._has_taken_rows = True
            self._phases.enter_context(phases_shown_by(self._show_phase))
            threading.Thread(target=self._show_clock, name="trainwright-clock", daemon=True).start()

    def close(self) -> None:
        """Leaves the last progress line on the screen."""
        self._phases.close()
        self._has_closed.set()
        with self._lock:
            self._phase = None
            self._close_clock()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._rows is not None:
                self._rows.close()
                self._rows = None
                best = "" if self._panel is None else self._panel.summary()
                self._console.print(Text("  ".join(filter(None, [self._text, best]))))
            self._close_live()
        if self._display is not None:
            self._display.close()

    def _show_in_notebook(self, display: NotebookDisplay, storage: EventStorage) -> None:
        values = {name: value for name, value in storage.line.items() if name != "step"}
        step = storage.line["step"]
        self._history.add(step, values)
        self._latest |= {name: value for name, value in values.items() if name not in HIDDEN}
        left = self._seconds_left(step, storage.max_steps)
        details = [_speed(values), f"eta {clock_text(left)}" if left else ""]
        html = run_html(
            self._name,
            step=step,
            max_steps=storage.max_steps,
            curves=self._history.curves,
            latest=self._latest,
            details=" · ".join(filter(None, details)),
            texts=storage.texts,
        )
        display.show(html, f"{self._name}: step {step}  {_pairs(self._latest)}")

    def _terminal(self) -> int | None:
        """Returns the descriptor of the terminal if it can have a panel."""
        return stderr_terminal() if self._allows_panel and self._console.is_terminal else None

    def _has_room_for_panel(self) -> bool:
        """Returns True if the terminal, which may be resized at any time, is large enough for the panel."""
        descriptor = self._terminal()
        if self._panel is None or descriptor is None:
            return False
        try:
            columns, rows = os.get_terminal_size(descriptor)
        except OSError:  # it was closed
            return False
        return columns >= MIN_COLUMNS and rows >= MIN_ROWS

    def _show_phase(self, phase: Phase | None) -> None:
        """Shows work such as saving, in its thread."""
        with self._lock:
            if phase is None and self._phase is None:
                return
            self._phase = phase
            self._close_clock()
            self._show_progress(is_due=True)

    def _show_clock(self) -> None:
        """Shows, in a separate thread, that a run whose next line takes long is in progress."""
        while not self._has_closed.wait(_CLOCK_SECONDS):
            with self._lock:
                status = self._quiet_status()
                if status is None or self._has_closed.is_set():
                    continue
                if self._rows is not None:
                    self._show_progress(is_due=True)
                    continue
                # The live line is not drawn again: the cursor may be in a prompt of a debugger.
                descriptor = stderr_terminal()
                if descriptor is not None:
                    self._clock_row = self._clock_row or BottomRows(descriptor)
                    self._clock_row.show([status[: self._console.width - 1]])

    def _quiet_status(self) -> str | None:
        """Returns the current step and the time since the last line if that is long, and no other work is shown."""
        seconds = time.monotonic() - self._line_time
        if self._storage is None or self._phase is not None or seconds < _QUIET_SECONDS:
            return None
        try:
            step = self._storage.step
        except HostReadError:  # a graph is being captured
            return None
        return f"Training  step {step:,} in progress  {clock_text(seconds)} since the last line"

    def _close_clock(self) -> None:
        if self._clock_row is not None:
            self._clock_row.close()
            self._clock_row = None

    def _show_progress(self, *, is_due: bool = False) -> None:
        """Draws the newest values if the last drawing is some time ago, or `is_due`."""
        if not self._console.is_terminal:
            self._console.print(Text(self._text))
            return
        now, has_panel = time.monotonic(), self._has_room_for_panel()
        is_due = is_due or now - self._drawn > (_PANEL_SECONDS if has_panel else _LINE_SECONDS)
        if has_panel:
            self._close_live()
            if is_due:
                self._draw_panel()
            elif self._timer is None:  # the next line may come much later
                self._timer = threading.Timer(self._drawn + _PANEL_SECONDS - now, self._draw_late)
                self._timer.daemon = True
                self._timer.start()
        else:
            if self._rows is not None:
                self._rows.close()
                self._rows = None
            self._draw_line(is_due=is_due)
        if is_due:
            self._drawn = now

    def _draw_late(self) -> None:
        """Draws values that arrived too soon after a drawing, in the timer's thread."""
        with self._lock:
            self._timer = None
            if self._rows is not None:
                self._show_progress(is_due=True)

    def _draw_panel(self) -> None:
        descriptor = self._terminal()
        if self._panel is None or descriptor is None:
            return
        if self._rows is None:
            self._rows = BottomRows(descriptor)
        columns = os.get_terminal_size(descriptor).columns
        lines = self._panel.lines(
            columns,
            memory=memory_in_use(),
            seconds=time.monotonic() - self._start,
            status=self._quiet_status() if self._phase is None else self._phase.line(columns - 2),
            has_colors=self._console.color_system is not None,
        )
        self._rows.show(lines)

    def _draw_line(self, *, is_due: bool) -> None:
        if self._live is None:
            # The output of `trainwright train > file` belongs in the file.
            is_redirected = sys.stdout.isatty()
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=is_redirected)
            self._live.start()
        phase = self._phase
        # In front, because the end of a line that is too long is truncated.
        text = self._text if phase is None else f"{phase.line(self._console.width // 2)}  {self._text}"
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=is_due)

    def _close_live(self) -> None:
        if self._live is not None:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # an incomplete line of user code, which rich would drop
            self._live.stop()
            self._live = None

    def _progress(self, storage: EventStorage, training: dict[str, Any], left: float | None) -> str:
        step = training["step"]
        of = f"/{storage.max_steps}" if storage.max_steps else ""
        shown = {name: training[name] for name in training if name not in HIDDEN}
        loss = {"loss": shown.pop("loss")} if "loss" in shown else {}
        bars = sparkline(self._losses) if self._console.is_terminal else ""
        fields = [f"step {step}{of}", _pairs(loss), bars, _pairs(shown)]
        fields.append(_speed(training))
        if left is not None:
            fields.append(f"eta {clock_text(left)}")
        if self._console.is_terminal:
            fields.append(f"{memory_in_use() / 2**30:.1f} GiB")
        return "  ".join(field for field in fields if field)

    def _seconds_left(self, step: int, max_steps: int | None) -> float | None:
        """Uses the wall clock since the first line, which includes evaluating and saving."""
        if self._first is None:
            self._first = (step, time.monotonic())
        first_step, start = self._first
        if max_steps is None or step == first_step:
            return None
        return (time.monotonic() - start) / (step - first_step) * (max_steps - step)


def _speed(values: Mapping[str, Any]) -> str:
    name = next((name for name in SPEEDS if name in values), None)
    return "" if name is None else f"{values[name]:,.0f} {name.removesuffix('_per_second')}/s"


def _pairs(values: dict[str, Any]) -> str:
    return safe("  ".join(f"{name} {number_text(value)}" for name, value in values.items()))
