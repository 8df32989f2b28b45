"""Curves of a run's values over its steps: as inline SVG, as text for a terminal, or as a matplotlib plot.

The SVG has no script and no external resource. Its lines and letters have the color of the text around it
(`currentColor`), so it is readable on light and dark pages. A curve of any length is reduced to about one minimum and
one maximum per pixel before it is drawn. writers/notebook.py has the page of a run in a notebook.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.config import KeepBest
from trainwright.config.problems import suggest
from trainwright.errors import TrainwrightError
from trainwright.safe_text import safe

Points = Sequence[tuple[float, float]]
"""(step, value), in the order of the steps."""

COLORS = ("#3b82f6", "#f97316", "#22a06b", "#a855f7", "#e0457b", "#0ea5b7")
"""The colors of curves, with enough contrast on white and on black."""

_FALLING, _RISING = ("loss", "perplexity", "error"), ("accuracy", "f1", "auroc", "exact_match")
"""Ends of names of metrics whose best value is the smallest or the largest."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 24
_LETTER = 6.2
"""The mean width of a letter in pixels."""


def decimate(points: Points, max_points: int) -> list[tuple[float, float]]:
    """Returns at most about `max_points` points that draw the same curve: the extremes of each interval of points.

    Keeps the first and the last point, and of each interval the smallest and the largest value and one value that is
    not finite, at which the curve has a gap.

    >>> decimate([(step, step % 10) for step in range(1000)], 4)
    [(0, 0), (9, 9), (500, 0), (509, 9), (999, 9)]
    """
    if len(points) <= max_points:
        return list(points)
    values = np.array([value for _, value in points], float)
    return [points[index] for index in kept_indices(values, max_points).tolist()]


def kept_indices(values: np.ndarray, max_points: int) -> np.ndarray:
    """Returns the indices of the values that `decimate` keeps, ascending."""
    number = len(values)
    if number <= max_points:
        return np.arange(number)
    size = -(-number // max(1, max_points // 2))  # of an interval
    num_intervals = -(-number // size)
    is_finite = np.isfinite(values)
    gaps = np.flatnonzero(~is_finite)
    first_gaps = gaps[np.unique(gaps // size, return_index=True)[1]]
    padded, starts = np.empty(num_intervals * size), np.arange(num_intervals) * size
    rows, kept = padded.reshape(num_intervals, size), [first_gaps, np.array([0, number - 1])]
    for worst, find in ((np.inf, rows.argmin), (-np.inf, rows.argmax)):
        padded[:number], padded[number:] = values, worst
        padded[gaps] = worst
        extremes = starts + find(axis=1)
        extremes = extremes[extremes < number]
        kept.append(extremes[is_finite[extremes]])
    return np.unique(np.concatenate(kept))


def curve_svg(
    curves: Mapping[str, Points], *, width: int = 560, height: int = 200, max_step: float | None = None
) -> str:
    """Returns an SVG element with the curves, an axis of steps up to `max_step`, and a legend; empty without points.

    Values that are not finite are gaps. The scale is logarithmic if the values are positive and span a factor of 100.
    """
    finite = [point for points in curves.values() for point in points if math.isfinite(point[1])]
    if not finite:
        return ""
    last = max(max_step or 0, *(step for step, _ in finite))
    x_axis = Axis(min(step for step, _ in finite), last, _LEFT, width - _RIGHT)
    values = [value for _, value in finite]
    y_axis = Axis(min(values), max(values), height - _BOTTOM, _TOP, may_be_logarithmic=True)
    parts = [_grid(x_axis, y_axis, width, height)]
    for number, (name, points) in enumerate(curves.items()):
        parts.append(_curve(name, points, x_axis, y_axis, color=COLORS[number % len(COLORS)], max_points=2 * width))
    parts.append(_legend(list(curves), width))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" style="max-width:100%;height:auto;color:inherit" font-family="system-ui,sans-serif" '
        f'font-size="11" fill="currentColor">{"".join(parts)}</svg>'
    )


class Axis:
    """Maps values to pixels; widens a range without extent."""

    def __init__(self, low: float, high: float, start: int, stop: int, *, may_be_logarithmic: bool = False) -> None:
        self.is_logarithmic = may_be_logarithmic and low > 0 and high / low > 100
        if high <= low:
            margin = abs(low) * 0.05 or 1.0
            low, high = low - margin, high + margin
        self.low, self.high = low, high
        self._start, self._stop = start, stop

    def pixel(self, value: float) -> float:
        """Returns the position of a value, rounded to a tenth."""
        low, high = self.low, self.high
        if self.is_logarithmic:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return round(self._start + (value - low) / (high - low) * (self._stop - self._start), 1)

    def value(self, pixel: float) -> float:
        """Returns the value at a position."""
        share = (pixel - self._start) / (self._stop - self._start)
        if self.is_logarithmic:
            return float(self.low * (self.high / self.low) ** share)
        return self.low + (self.high - self.low) * share

    def ticks(self, number: int) -> list[float]:
        """Returns about this many round values in the range."""
        if self.is_logarithmic:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers][:: max(1, len(powers) // number)]
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / number))
        step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (step * factor) <= number)
        first, last = math.ceil(self.low / step), math.floor(self.high / step + 1e-9)
        return [round(index * step, 12) for index in range(first, last + 1)]


def _grid(x_axis: Axis, y_axis: Axis, width: int, height: int) -> str:
    parts = []
    for value in y_axis.ticks(4):
        y = y_axis.pixel(value)
        line = f'<line x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y}" y2="{y}" stroke="currentColor" opacity="0.15"/>'
        parts.append(f'{line}<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end" opacity="0.7">{value:.4g}</text>')
    for value in x_axis.ticks(6):
        if value != int(value):
            continue
        x = x_axis.pixel(value)
        parts.append(f'<text x="{x}" y="{height - 7}" text-anchor="middle" opacity="0.7">{count_text(value)}</text>')
    return "".join(parts)


def _curve(name: str, points: Points, x_axis: Axis, y_axis: Axis, *, color: str, max_points: int) -> str:
    """Returns a path with a gap at each value that is not finite; a single point is a dot."""
    stretches: list[list[str]] = [[]]
    for step, value in decimate(points, max_points):
        if math.isfinite(value):
            stretches[-1].append(f"{x_axis.pixel(step)},{y_axis.pixel(value)}")
        elif stretches[-1]:
            stretches.append([])
    path = "".join(f"M{'L'.join(stretch)}" for stretch in stretches if len(stretch) > 1)
    alone = [stretch[0].split(",") for stretch in stretches if len(stretch) == 1]
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"/>' for x, y in alone)
    line = f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.6" stroke-linejoin="round"/>' if path else ""
    return f"<g><title>{escape(safe(name))}</title>{line}{dots}</g>"


def _legend(names: Sequence[str], width: int) -> str:
    parts, right = [], float(width - _RIGHT)
    for number in reversed(range(len(names))):
        text = safe(names[number])
        text = text if len(text) <= 24 else f"{text[:23]}…"
        right -= len(text) * _LETTER
        color = COLORS[number % len(COLORS)]
        parts.append(
            f'<text x="{right:.0f}" y="13">{escape(text)}</text>'
            f'<rect x="{right - 14:.0f}" y="8" width="10" height="3" rx="1.5" fill="{color}"/>'
        )
        right -= 26
    return "".join(parts)


def count_text(value: float) -> str:
    """Returns a number of steps, such as 500, 20k or 1.5M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (value >= size and value % (size / 10) == 0):
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def better_mode(name: str, keep_best: KeepBest | None = None) -> str | None:
    """Returns whether the best value of a metric is its "min" or "max", by its name or the run's policy; None if
    unknown.

    >>> better_mode("valid/loss"), better_mode("valid/accuracy"), better_mode("grad_norm")
    ('min', 'max', None)
    """
    if keep_best is not None and name == keep_best.metric:
        return keep_best.mode
    return "min" if name.endswith(_FALLING) else "max" if name.endswith(_RISING) else None


def plot_curves(curves: Mapping[str, Points], names: Sequence[str], *, ax: Any = None) -> Any:
    """Draws some of the curves with matplotlib, in new axes or in `ax`, and returns the axes."""
    missing = next((name for name in names if name not in curves), None)
    if missing is not None:
        known = suggest(missing, curves) if curves else "Nothing was logged yet."
        raise TrainwrightError(f"plot: the run has no value {missing!r}. {known}")
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise TrainwrightError(
                "plot needs matplotlib, which is not installed. Run: pip install 'trainwright[plot]'"
            ) from error
        _, ax = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for name in names:
        steps, values = zip(*curves[name], strict=True)
        ax.plot(steps, values, label=name, linewidth=1.4, marker="o" if len(steps) == 1 else None)
    ax.set_xlabel("step")
    ax.grid(visible=True, alpha=0.3)
    ax.legend()
    return ax


def save_rate_plot(
    path: Path, rates: Sequence[float], curves: Mapping[str, Sequence[float]], *, marked: float | None
) -> None:
    """Writes an image of losses over learning rates on a log scale; `marked` is the suggested rate."""
    try:
        from matplotlib.figure import Figure  # without pyplot, which may open a window
    except ImportError as error:
        raise TrainwrightError(
            "the image needs matplotlib, which is not installed. Run: pip install 'trainwright[plot]'"
        ) from error
    figure = Figure(figsize=(7, 3.5), layout="constrained", dpi=120)
    axes = figure.subplots()
    for (name, losses), (color, width) in zip(curves.items(), (("#9ca3af", 1.0), (COLORS[0], 2.0)), strict=False):
        axes.plot(rates[: len(losses)], losses, label=name, color=color, linewidth=width)
    if marked is not None:
        axes.axvline(marked, color=COLORS[1], linestyle="--", label=f"suggested: {marked:g}")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    # The last losses are so large that the others would be a line along the axis.
    smoothed = list(curves.values())[-1]
    lowest, first = min(smoothed), smoothed[0]
    margin = max(first - lowest, 0.1 * abs(first), 1e-12)
    axes.set_ylim(lowest - 0.3 * margin, max(first, lowest) + 1.2 * margin)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
