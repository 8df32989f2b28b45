"""Curves as Braille characters with ANSI colors, for a terminal. curves.py draws them for pages. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainwright.writers.curves import Axis, Points, count_text, decimate

COLORS = (36, 33, 32, 35, 31, 34)
"""The ANSI colors of curves, in the order of curves.COLORS."""

_DIM = 2
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a character, by row and column."""
_LABEL_COLUMNS = 9


def styled(text: str, code: int | None, *, has_colors: bool) -> str:
    """Returns text with an ANSI style, such as 1 (bold), 2 (dim) or 36 (cyan)."""
    return f"\x1b[{code}m{text}\x1b[0m" if has_colors and text and code is not None else text


def chart_lines(
    curves: Mapping[str, Points], *, columns: int, rows: int, max_step: float | None = None, has_colors: bool = True
) -> list[str]:
    """Returns lines with the curves, their values on the left and an axis of steps; blank lines without points.

    Values that are not finite are gaps. The scale is logarithmic if the values are positive and span a factor of 100.
    """
    finite = [point for points in curves.values() for point in points if math.isfinite(point[1])]
    if not finite:
        return [" " * columns] * rows
    width, height = columns - _LABEL_COLUMNS - 1, rows - 1
    values = [value for _, value in finite]
    x_axis = Axis(min(step for step, _ in finite), max(max_step or 0, *(step for step, _ in finite)), 0, 2 * width - 1)
    y_axis = Axis(min(values), max(values), 4 * height - 1, 0, may_be_logarithmic=True)
    cells = [[0] * width for _ in range(height)]
    owners = [[0] * width for _ in range(height)]
    for number, points in enumerate(curves.values()):
        for x, y in _dots(decimate(points, 4 * width), x_axis, y_axis):
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
            owners[y // 4][x // 2] = number
    labels = {0: y_axis.high, height - 1: y_axis.low}
    if height >= 5:
        labels[height // 2] = y_axis.value(4 * (height // 2) + 1.5)
    lines = []
    for row in range(height):
        label = f"{labels[row]:.4g}" if row in labels else ""
        gutter = styled(f"{label:>{_LABEL_COLUMNS - 1}} │", _DIM, has_colors=has_colors)
        lines.append(gutter + _colored(cells[row], owners[row], has_colors=has_colors))
    first, last = count_text(math.floor(x_axis.low)), count_text(math.ceil(x_axis.high))
    kind = " log scale " if y_axis.is_logarithmic else ""
    steps = f"{first}{kind:─^{max(0, width - len(first) - len(last))}}{last}"
    lines.append(styled(f"{'└':>{_LABEL_COLUMNS + 1}}{steps}", _DIM, has_colors=has_colors))
    return lines


def _dots(points: Points, x_axis: Axis, y_axis: Axis) -> set[tuple[int, int]]:
    """Returns the dots of a line through the points."""
    dots: set[tuple[int, int]] = set()
    before: tuple[int, int] | None = None
    for step, value in points:
        if not math.isfinite(value):
            before = None
            continue
        x, y = round(x_axis.pixel(step)), round(y_axis.pixel(value))
        if before is None:
            dots.add((x, y))
        else:
            length = max(abs(x - before[0]), abs(y - before[1]), 1)
            for number in range(1, length + 1):
                share = number / length
                dots.add((round(before[0] + (x - before[0]) * share), round(before[1] + (y - before[1]) * share)))
        before = (x, y)
    return dots


def _colored(cells: list[int], owners: list[int], *, has_colors: bool) -> str:
    """Returns one row of characters; neighbors of one color share an escape sequence."""
    parts: list[str] = []
    text, color = "", 0
    for bits, owner in zip(cells, owners, strict=True):
        if bits and owner != color:
            parts.append(styled(text, COLORS[color % len(COLORS)], has_colors=has_colors))
            text, color = "", owner
        text += chr(_BRAILLE + bits) if bits else " "
    return "".join([*parts, styled(text, COLORS[color % len(COLORS)], has_colors=has_colors)])
