"""The display of a run in a notebook: one output, updated in place, with the progress, the curves and the last values.

console.py decides between this, a live line and plain lines. `run_html` is also how a trainer is shown at the end of a
cell. curves.py draws the curves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from importlib import import_module
from typing import Any

from trainwright.safe_text import safe
from trainwright.writers.curves import Points, curve_svg, decimate

MIN_SECONDS = 0.5
"""Seconds between two updates of the display; each update is sent to the browser and stored in the notebook."""

SPEEDS = ("tokens_per_second", "samples_per_second")
HIDDEN = frozenset({"step", "seconds_per_step", *SPEEDS})
"""Values of a log line that are not shown among the metrics."""

_MAX_POINTS = 1000
_MAX_CURVES = 6
_FRAME = "border:1px solid rgba(128,128,128,0.35);border-radius:6px;padding:10px 14px;margin:4px 0;max-width:600px"


class NotebookDisplay:
    """An output of the current cell that `show` replaces."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = float("-inf")
        self._pending: tuple[str, str] | None = None

    def show(self, html: str, text: str) -> None:
        """Shows a page, at most every MIN_SECONDS; a later call or `close` shows a skipped one."""
        self._pending = (html, text)
        if time.monotonic() - self._shown >= MIN_SECONDS:
            self._update()

    def close(self) -> None:
        """Shows the last page."""
        self._update()

    def _update(self) -> None:
        if self._pending is None:
            return
        display = import_module("IPython.display").display  # not a dependency, but available in every notebook
        html, text = self._pending
        # The text is for viewers without HTML, such as a diff or the conversion to a script.
        bundle = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
        self._pending, self._shown = None, time.monotonic()


class CurveHistory:
    """The points of each curve of a run, in bounded memory: a long curve keeps its extremes."""

    def __init__(self, curves: Mapping[str, Points]) -> None:
        self.curves = {name: decimate(points, _MAX_POINTS) for name, points in curves.items()}

    def add(self, step: float, values: Mapping[str, Any]) -> None:
        """Adds the numbers among these values."""
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                points = self.curves.setdefault(name, [])
                points.append((step, value))
                if len(points) > 4 * _MAX_POINTS:
                    self.curves[name] = decimate(points, _MAX_POINTS)


def run_html(
    name: str,
    *,
    step: int,
    max_steps: int | None,
    curves: Mapping[str, Points],
    latest: Mapping[str, Any],
    details: str = "",
    texts: Mapping[str, str] | None = None,
) -> str:
    """Returns the page of a run: its progress, the curves of its losses, and its last values in a table.

    `details` is a short text next to the progress. Names and texts are escaped.
    """
    of = f" of {max_steps:,}" if max_steps else ""
    share = min(1.0, step / max_steps) if max_steps else 0.0
    head = (
        f'<div style="display:flex;justify-content:space-between;gap:16px"><b>{_text(name)}</b>'
        f'<span style="opacity:0.75">step {step:,}{of}{" · " if details else ""}{_text(details)}</span></div>'
    )
    bar = (
        '<div style="background:rgba(128,128,128,0.25);border-radius:3px;height:6px;margin:8px 0">'
        f'<div style="background:#3b82f6;border-radius:3px;height:6px;width:{share:.1%}"></div></div>'
    )
    losses = {each: points for each, points in curves.items() if each.rpartition("/")[2] == "loss" and points}
    svg = curve_svg(dict(list(losses.items())[:_MAX_CURVES]), max_step=max_steps)
    parts = [head, bar if max_steps else "", svg, _table(latest), *map(_shown_text, (texts or {}).items())]
    return f'<div style="{_FRAME}">{"".join(parts)}</div>'


def number_text(value: Any) -> str:
    """Returns a value of a log line as text, a number with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(values: Mapping[str, Any]) -> str:
    """Returns the values in cells that wrap, each with its name above it."""
    cells = "".join(
        f'<div style="min-width:84px"><div style="opacity:0.65;font-size:11px">{_text(name)}</div>'
        f'<div style="font-variant-numeric:tabular-nums">{_text(number_text(value)[:60])}</div></div>'
        for name, value in values.items()
        if name not in HIDDEN
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:6px 18px;margin-top:6px;font-size:13px">{cells}</div>' * bool(
        cells
    )


def _shown_text(item: tuple[str, str]) -> str:
    name, text = item
    return (
        f'<div style="opacity:0.65;font-size:11px;margin-top:6px">{_text(name)}</div>'
        f'<pre style="white-space:pre-wrap;margin:0;font-size:12px">{_text(text[:1000])}</pre>'
    )


def _text(value: str) -> str:
    return escape(safe(value))
