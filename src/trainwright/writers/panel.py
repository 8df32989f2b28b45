"""The panel of a run in a wide terminal: progress, the curve of the loss, current values, evaluations, last checkpoint.

console.py decides whether it is shown, and passes the values. It never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len, set_cell_size

from trainwright.config import KeepBest
from trainwright.progress import bar_text, clock_text
from trainwright.safe_text import safe
from trainwright.writers.curves import Points, better_mode
from trainwright.writers.notebook import HIDDEN, SPEEDS, CurveHistory, number_text
from trainwright.writers.terminal_chart import chart_lines, styled

MIN_COLUMNS, MIN_ROWS = 100, 20
"""The size of the smallest terminal with a panel."""

_HEIGHT = 12
_VALUE_COLUMNS = 46
_BOLD, _DIM, _CYAN, _GREEN, _YELLOW = 1, 2, 36, 32, 33


class Panel:
    """The values of a run, and the lines that show them."""

    def __init__(
        self, name: str, *, keep_best: KeepBest | None, curves: Mapping[str, Points], saved_step: int | None
    ) -> None:
        self._name = safe(name)
        self._keep_best = keep_best
        losses = {each: points for each, points in curves.items() if _is_loss(each)}
        self._history = CurveHistory(losses)
        self._latest: dict[str, Any] = {}
        self._evaluated: dict[str, tuple[int, Any]] = {}
        self._best: dict[str, tuple[int, float]] = {}
        for each, points in curves.items():
            for step, value in points if better_mode(each, keep_best) and "/" in each else ():
                self._compare(each, int(step), value)
        self._saved_step = saved_step
        self._step = 0
        self._max_steps: int | None = None
        self._seconds_left: float | None = None

    def add(
        self,
        line: Mapping[str, Any],
        evaluated: Mapping[str, Any],
        *,
        max_steps: int | None,
        seconds_left: float | None,
        saved_step: int | None,
    ) -> None:
        """Adds a line of the log."""
        self._step, self._max_steps, self._seconds_left = line["step"], max_steps, seconds_left
        if saved_step is not None:
            self._saved_step = saved_step
        self._history.add(self._step, {name: value for name, value in line.items() if _is_loss(name)})
        self._latest |= {name: value for name, value in line.items() if name not in evaluated and name != "step"}
        for name, value in evaluated.items():
            self._evaluated[name] = (self._step, value)
            if isinstance(value, int | float):
                self._compare(name, self._step, value)

    def summary(self) -> str:
        """Returns the best values of the evaluations as text; empty if there are none."""
        parts = [f"best {name} {number_text(value)} at {step:,}" for name, (step, value) in self._best.items()]
        return "  ".join(parts[:3])

    def lines(self, columns: int, *, memory: float, seconds: float, status: str | None, has_colors: bool) -> list[str]:
        """Returns the lines of the panel.

        `memory` is in bytes, `seconds` the time since the start of this process's training, and `status` the last row.
        """
        rule = "─" * max(0, columns - cell_len(self._name) - 6)
        head = f"── {self._name} {rule}"[: columns - 1]
        chart_columns, rows = columns - _VALUE_COLUMNS - 3, _HEIGHT - 3
        chart = chart_lines(
            self._shown_curves(),
            columns=chart_columns,
            rows=rows,
            max_step=self._max_steps,
            has_colors=has_colors,
        )
        values = self._value_lines(memory, rows)
        body = []
        for number in range(rows):
            text, code = values[number] if number < len(values) else ("", None)
            right = styled(set_cell_size(text, _VALUE_COLUMNS), code, has_colors=has_colors)
            body.append(f"{chart[number]}  {right}")
        return [
            styled(head, _DIM, has_colors=has_colors),
            self._progress_line(columns, seconds, has_colors=has_colors),
            *body,
            styled(status or "", _YELLOW, has_colors=has_colors),
        ]

    def _progress_line(self, columns: int, seconds: float, *, has_colors: bool) -> str:
        of = f"/{self._max_steps:,}" if self._max_steps else ""
        left = f"step {self._step:,}{of}"
        share = min(1.0, self._step / self._max_steps) if self._max_steps else None
        times = [clock_text(seconds)]
        if self._seconds_left is not None:
            times.append(f"eta {clock_text(self._seconds_left)}")
        right = "  ".join([f"{share:4.0%}" if share is not None else "", *times])
        bar = "" if share is None else bar_text(share, max(10, columns - len(left) - len(right) - 6))
        line = f"{styled(left, _BOLD, has_colors=has_colors)}  {styled(bar, _GREEN, has_colors=has_colors)}  "
        return line + styled(right, _BOLD, has_colors=has_colors)

    def _shown_curves(self) -> dict[str, Points]:
        """Returns the curve of the training loss, or of the first training loss, and those of the evaluations'
        losses."""
        curves = {name: points for name, points in self._history.curves.items() if points}
        first = "loss" if "loss" in curves else next(iter(curves), None)
        evaluated = [name for name in curves if name in self._evaluated and name != first]
        return {} if first is None else {name: curves[name] for name in (first, *evaluated[:2])}

    def _value_lines(self, memory: float, rows: int) -> list[tuple[str, int | None]]:
        """Returns at most `rows` lines of values with their styles."""
        values = {name: value for name, value in self._latest.items() if name not in HIDDEN and name != "mfu"}
        lines: list[tuple[str, int | None]] = []
        if "loss" in values:
            lines.append((f"loss {number_text(values.pop('loss'))}", _CYAN))
        speeds = [
            f"{self._latest[name]:,.0f} {name.removesuffix('_per_second')}/s" for name in SPEEDS if name in self._latest
        ]
        if "mfu" in self._latest:
            speeds.append(f"mfu {self._latest['mfu']:.1%}")
        ends: list[tuple[str, int | None]] = [(_cut("  ".join([*speeds[:2], f"{memory / 2**30:.1f} GiB"])), None)]
        room = rows - len(lines) - 1 - (self._saved_step is not None)
        evaluations = [self._evaluation_line(name) for name in self._evaluation_names()[: max(2, room - 3)]]
        flowing = _flow([safe(f"{name} {number_text(value)}") for name, value in values.items()])
        room -= len(evaluations)
        if len(flowing) > room:
            flowing = [*flowing[: room - 1], "…"]
        lines += [(text, None) for text in flowing]
        lines += ends + [(text, _YELLOW) for text in evaluations]
        if self._saved_step is not None:
            lines.append((f"checkpoint at step {self._saved_step:,}", _DIM))
        return lines

    def _evaluation_names(self) -> list[str]:
        """Returns the metric that selects the best checkpoint first, then those with a best value."""
        selecting = self._keep_best.metric if self._keep_best is not None else None
        return sorted(self._evaluated, key=lambda name: (name != selecting, name not in self._best))

    def _evaluation_line(self, name: str) -> str:
        step, value = self._evaluated[name]
        text = f"{name} {number_text(value)}"
        if name in self._best and self._best[name][0] != step:
            best_step, best = self._best[name]
            return _cut(safe(f"{text} (best {number_text(best)} at {best_step:,})"))
        return _cut(safe(f"{text} at {step:,}{' (best)' if name in self._best else ''}"))

    def _compare(self, name: str, step: int, value: float) -> None:
        mode, best = better_mode(name, self._keep_best), self._best.get(name)
        if mode is None or not math.isfinite(value):
            return
        if best is None or (value < best[1] if mode == "min" else value > best[1]):
            self._best[name] = (step, value)


def _is_loss(name: str) -> bool:
    return name.rpartition("/")[2] == "loss"


def _flow(texts: list[str]) -> list[str]:
    """Returns lines of the panel's column of values, each with as many texts as fit."""
    lines: list[str] = []
    for text in texts:
        joined = f"{lines[-1]}   {text}" if lines else text
        if lines and cell_len(joined) <= _VALUE_COLUMNS:
            lines[-1] = joined
        else:
            lines.append(_cut(text))
    return lines


def _cut(text: str) -> str:
    return text if cell_len(text) <= _VALUE_COLUMNS else set_cell_size(text, _VALUE_COLUMNS - 1) + "…"
