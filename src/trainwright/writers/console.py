"""Shows the run: one live line in a terminal, one display in a notebook (notebook.py), otherwise plain lines.

Silent where the package's log level is above INFO (`-q`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainwright.backends import memory_in_use
from trainwright.events import EventStorage
from trainwright.log import in_notebook, is_progress_shown
from trainwright.safe_text import safe
from trainwright.writers.json_lines import read_history
from trainwright.writers.notebook import HIDDEN, SPEEDS, CurveHistory, NotebookDisplay, number_text, run_html
from trainwright.writers.writer import RunInfo, Writer

_BARS = "▁▂▃▄▅▆▇█"


class ConsoleWriter(Writer):
    """Prints progress: step, loss, speed and time left. Evaluations stay on the screen, progress is overwritten."""

    stores = ("texts",)

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._console = Console(file=stream, stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._first: tuple[int, float] | None = None
        self._drawn = float("-inf")
        self._losses: deque[float] = deque(maxlen=8)
        self._display = NotebookDisplay() if stream is None and in_notebook() else None
        self._history = CurveHistory({})
        self._latest: dict[str, Any] = {}
        self._name = ""

    def begin(self, run: RunInfo) -> None:
        """Reads the curves of the steps that a resumed run has made before."""
        self._name = run.name
        if self._display is not None and run.is_resumed:
            self._history = CurveHistory(read_history(run.folder))

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
        if training.keys() != {"step"}:
            self._show_progress(self._progress(storage, training))
        if evaluated:
            self._console.print(Text(f"step {line['step']}  {_pairs(evaluated)}", style="bold"))
        for name, text in storage.texts.items():
            self._console.print(Text(safe(f"step {line['step']}  {name}: {text}")))

    def close(self) -> None:
        """Leaves the last progress line on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._display is not None:
            self._display.close()

    def _show_in_notebook(self, display: NotebookDisplay, storage: EventStorage) -> None:
        values = {name: value for name, value in storage.line.items() if name != "step"}
        step = storage.line["step"]
        self._history.add(step, values)
        self._latest |= {name: value for name, value in values.items() if name not in HIDDEN}
        left = self._seconds_left(step, storage.max_steps)
        details = [_speed(values), f"eta {_duration(left)}" if left else ""]
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

    def _show_progress(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(Text(text))
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        # At most ten times per second: drawing takes half a millisecond, too long for short steps.
        is_due = time.monotonic() - self._drawn > 0.1
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=is_due)
        if is_due:
            self._drawn = time.monotonic()

    def _progress(self, storage: EventStorage, training: dict[str, Any]) -> str:
        step = training["step"]
        of = f"/{storage.max_steps}" if storage.max_steps else ""
        shown = {name: training[name] for name in training if name not in HIDDEN}
        loss = {"loss": shown.pop("loss")} if "loss" in shown else {}
        bars = sparkline(self._losses) if self._console.is_terminal else ""
        fields = [f"step {step}{of}", _pairs(loss), bars, _pairs(shown)]
        fields.append(_speed(training))
        left = self._seconds_left(step, storage.max_steps)
        if left is not None:
            fields.append(f"eta {_duration(left)}")
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


def sparkline(values: Sequence[float]) -> str:
    """Returns values as a row of bars, the highest one full; a value that is not finite is a gap.

    >>> sparkline([3.0, 2.0, 1.0])
    '█▄▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((value - low) * scale)] if math.isfinite(value) else " " for value in values)


def _speed(values: Mapping[str, Any]) -> str:
    name = next((name for name in SPEEDS if name in values), None)
    return "" if name is None else f"{values[name]:,.0f} {name.removesuffix('_per_second')}/s"


def _pairs(values: dict[str, Any]) -> str:
    return safe("  ".join(f"{name} {number_text(value)}" for name, value in values.items()))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
