"""Reads metrics.json while it grows: each name is a curve of (step, value), of which a page receives a few hundred
points.

A `MetricsFile` keeps the position up to which it has read. Damaged lines are skipped, a half-written one is read when
it is complete, and a file that was replaced or truncated (resume, --fresh) is read from its start. `Curve` computes the
data of a plot: extremes per pixel, and a moving mean.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainwright.watch.listing import open_regular
from trainwright.writers.curves import kept_indices

BLOCK = 2**16
"""The bytes that are parsed at once: a millisecond or two, in which no request is answered."""
MAX_NAMES = 1000
"""Further names of a run are ignored."""
_MAX_TEXTS = 100  # the newest per name
_MAX_TEXT = 20_000  # characters
_TAIL = 64  # bytes before the position, which are compared to detect another file with the same inode
_NUMBERS = {int, float, type(None)}
_SAMPLE_BYTES = 4096  # at each place of a sample, or two lines
_MAX_STEP = 2**53  # larger integers are not exact as floats


@dataclass(frozen=True)
class Curve:
    """The values of one name, by ascending step. NaN is a value that was not finite."""

    steps: np.ndarray
    values: np.ndarray

    def between(self, low: float | None, high: float | None) -> Curve:
        """Returns the part in a range of steps, with one more point on each side, to which its line continues."""
        first = 0 if low is None else max(int(np.searchsorted(self.steps, low, "left")) - 1, 0)
        last = len(self.steps) if high is None else int(np.searchsorted(self.steps, high, "right")) + 1
        return Curve(self.steps[first:last], self.values[first:last])

    def decimate(self, max_points: int) -> Curve:
        """Returns about this many points at most, which draw the same curve."""
        kept = kept_indices(self.values, max_points)
        return Curve(self.steps[kept], self.values[kept])

    def smooth(self, share: float) -> Curve:
        """Returns the mean over a window that is centered on each point and has this share of all points."""
        radius = int(len(self.values) * share / 2)
        is_finite = np.isfinite(self.values)
        if not radius or not is_finite.any():
            return self
        # Relative to the mean, because a sum of large values would lose the precision of small differences.
        center = float(self.values[is_finite].mean())
        totals = np.concatenate([[0.0], np.cumsum(np.where(is_finite, self.values - center, 0.0))])
        counts = np.concatenate([[0], np.cumsum(is_finite)])
        index = np.arange(len(self.values))
        # Symmetric also at the ends, because a window that is truncated on one side would bend the curve there.
        half = np.minimum(np.minimum(index, len(index) - 1 - index), radius)
        number = counts[index + half + 1] - counts[index - half]
        with np.errstate(invalid="ignore", divide="ignore"):
            return Curve(self.steps, (totals[index + half + 1] - totals[index - half]) / number + center)

    def last(self) -> tuple[float, float] | None:
        """Returns the last step and its value; None without any."""
        return (float(self.steps[-1]), float(self.values[-1])) if len(self.steps) else None

    def best(self, mode: str) -> tuple[float, float] | None:
        """Returns the step and value of the smallest (`min`) or largest (`max`) finite value; the first of several."""
        finite = np.where(np.isfinite(self.values), self.values, np.inf if mode == "min" else -np.inf)
        if not np.isfinite(finite).any():
            return None
        index = int(finite.argmin() if mode == "min" else finite.argmax())
        return float(self.steps[index]), float(self.values[index])


class _Table:
    """The lines that have the same names: a growing matrix of [step and values, lines]."""

    def __init__(self, num_columns: int) -> None:
        self._cells = np.empty((num_columns, 16))
        self.num_lines = 0

    def extend(self, rows: Sequence[Sequence[float | None]]) -> None:
        try:
            added = np.array(rows, dtype=float)  # None is NaN
        except OverflowError:  # an integer that is too large for a float
            added = np.array([[_as_float(value) for value in row] for row in rows])
        needed = self.num_lines + len(added)
        if needed > self._cells.shape[1]:
            grown = np.empty((len(self._cells), max(needed, 5 * self._cells.shape[1] // 4)))
            grown[:, : self.num_lines] = self._cells[:, : self.num_lines]
            self._cells = grown
        self._cells[:, self.num_lines : needed] = added.T
        self.num_lines = needed

    def column(self, number: int) -> np.ndarray:
        return self._cells[number, : self.num_lines]


class MetricsFile:
    """The curves and texts of one metrics.json. Methods may be called from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_sample = False
        """True if it has only a few lines of the whole file."""
        self._lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._position, self._inode, self._tail = 0, -1, b""
        self._tables: dict[tuple[str, ...], _Table] = {}
        self._parts: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {}
        self._texts: dict[str, deque[tuple[int, str]]] = {}
        self._merged: dict[str, Curve] = {}
        self.names: dict[str, None] = {}
        """The names of numbers, in the order in which they appeared."""
        self.version = 0
        """Changes with the content."""

    @property
    def num_values(self) -> int:
        """The number of values in memory."""
        with self._lock:
            return sum(table.num_lines * (1 + len(names)) for names, table in self._tables.items())

    def unread_bytes(self) -> int:
        """Returns the number of bytes that `update` would read; the whole file if it was replaced."""
        try:
            status = self.path.stat()
        except OSError:
            return 0
        is_continued = status.st_ino == self._inode and status.st_size >= self._position
        return status.st_size - (self._position if is_continued else 0)

    def update(self, *, max_bytes: int | None = None) -> bool:
        """Reads appended lines, at most about `max_bytes`; returns True if there is more."""
        with self._lock:
            try:
                with open_regular(self.path) as file:
                    return self._read(file, max_bytes)
            except OSError:  # no run has written it yet, or its folder was deleted
                if self._tables or self._texts:
                    version = self.version
                    self._reset()
                    self.version = version + 1
                return False

    def _read(self, file: BinaryIO, max_bytes: int | None) -> bool:
        status = os.fstat(file.fileno())
        if not self._is_continued(file, status.st_ino, status.st_size):
            version = self.version
            self._reset()
            self.version, self._inode = version + 1, status.st_ino
        self.is_sample = False
        remaining, size = max_bytes, BLOCK
        while self._position < status.st_size:
            file.seek(self._position)
            block = file.read(size)
            end = block.rfind(b"\n") + 1
            if not end:
                if len(block) < size:
                    return False  # the last line is being written
                size *= 2  # a line that is longer than a block
                continue
            self._add(block[: end - 1].split(b"\n"))
            self._position += end
            self._tail = block[max(end - _TAIL, 0) : end]
            if remaining is not None:
                remaining -= end
                if remaining <= 0:
                    return self._position < status.st_size
        return False

    def _is_continued(self, file: BinaryIO, inode: int, size: int) -> bool:
        if inode != self._inode or size < self._position:
            return False
        file.seek(self._position - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def sample(self, num_lines: int = 300) -> None:
        """Reads a few lines that are spread over the file, to be shown while all of a long file is read."""
        with self._lock:
            self._reset()
            lines = []
            try:
                with open_regular(self.path) as file:
                    length = max(_SAMPLE_BYTES, 2 * len(file.readline(BLOCK)) + _TAIL)
                    size = file.seek(0, 2)
                    for number in range(num_lines):
                        file.seek(max(number * size // num_lines, 0))
                        parts = file.read(length).split(b"\n")
                        whole = parts[0 if number == 0 else 1 : -1]
                        lines += whole[:1]
                    file.seek(max(size - length, 0))
                    lines += file.read().split(b"\n")[1:-1][-1:]
            except OSError:
                return
            self._add(lines)
            self.is_sample = True

    def _add(self, lines: Sequence[bytes]) -> None:
        by_names: dict[tuple[str, ...], list[list[Any]]] = {}
        for line in _parse(lines):
            step = line.pop("step", None)
            if type(step) not in (int, float) or not abs(step) < _MAX_STEP:
                continue
            values = line
            if not set(map(type, line.values())) <= _NUMBERS:
                values = {name: value for name, value in line.items() if type(value) in _NUMBERS}
                self._add_texts(int(step), line)
            names = tuple(values)
            if names not in by_names and not self._knows(names):
                continue
            by_names.setdefault(names, []).append([step, *values.values()])
        for names, rows in by_names.items():
            for part in self._parts[names]:
                if part != names:
                    columns = [0, *(1 + names.index(name) for name in part)]
                    own = [[row[column] for column in columns] for row in rows]
                else:
                    own = rows
                self._tables.setdefault(part, _Table(1 + len(part))).extend(own)
        self._merged = {}
        self.version += 1

    def _knows(self, names: tuple[str, ...]) -> bool:
        """Decides in which tables lines with these names are; False if there are too many names or tables.

        A line that also has an evaluation is split, so that a training metric is in one table and needs no merge.
        """
        if names not in self._parts:
            if len(self.names.keys() | set(names)) > MAX_NAMES or len(self._parts) >= MAX_NAMES:
                return False
            within = [known for known in self._tables if len(known) > 1 and set(known) < set(names)]
            most = max(within, key=len, default=())
            self._parts[names] = tuple(filter(None, (most, tuple(name for name in names if name not in most))))
            self.names |= dict.fromkeys(names)
        return True

    def _add_texts(self, step: int, line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            if type(value) in _NUMBERS or (name not in self._texts and len(self._texts) >= MAX_NAMES):
                continue
            text = value if isinstance(value, str) else json.dumps(value)
            self._texts.setdefault(name, deque(maxlen=_MAX_TEXTS)).append((step, text[:_MAX_TEXT]))

    def curve(self, name: str) -> Curve:
        """Returns the curve of a name; empty if there is none. If several lines have the same step, the last one
        counts."""
        with self._lock:
            if name not in self._merged:
                found = [
                    (table.column(0), table.column(1 + names.index(name)))
                    for names, table in self._tables.items()
                    if name in names
                ] or [(np.zeros(0), np.zeros(0))]
                steps, values = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
                if (steps[1:] <= steps[:-1]).any():
                    order = np.argsort(steps, kind="stable")
                    order = order[np.append(np.diff(steps[order]) > 0, True)]
                    steps, values = steps[order], values[order]
                self._merged[name] = Curve(steps, values)
            return self._merged[name]

    def texts(self) -> dict[str, list[tuple[int, str]]]:
        """Returns the newest values that are not numbers, by name, with their steps."""
        with self._lock:
            return {name: list(values) for name, values in self._texts.items()}


def _as_float(value: float | None) -> float:
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.inf


def _parse(lines: Sequence[bytes]) -> Iterable[dict[str, Any]]:
    """Yields the objects among the lines."""
    try:
        # One call for all lines takes half the time.
        found = json.loads(b"[" + b",".join(line for line in lines if line.strip()) + b"]")
        if len(found) == sum(bool(line.strip()) for line in lines) and all(type(each) is dict for each in found):
            yield from found
            return
    except (ValueError, RecursionError):
        """Damaged lines: one by one."""
    for line in lines:
        try:
            each = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(each, dict):
            yield each


def curve_json(
    curve: Curve, points: int, *, smoothing: float = 0.0, low: float | None = None, high: float | None = None
) -> str:
    """Returns a curve as JSON: `x`, `y`, and with smoothing `sx`, `sy`. Six digits; null if not finite."""
    drawn = curve.between(low, high).decimate(points)
    text = f'{{"x":{_array(drawn.steps, 12)},"y":{_array(drawn.values, 6)}'
    if smoothing > 0:
        smooth = curve.smooth(min(smoothing, 1.0)).between(low, high).decimate(max(points // 2, 100))
        text += f',"sx":{_array(smooth.steps, 12)},"sy":{_array(smooth.values, 6)}'
    return text + "}"


def _array(values: np.ndarray, digits: int) -> str:
    pattern = f"%.{digits}g"
    finite = np.isfinite(values)
    texts = [pattern % value for value in values.tolist()]
    if not finite.all():
        texts = [text if is_finite else "null" for text, is_finite in zip(texts, finite.tolist(), strict=True)]
    return f"[{','.join(texts)}]"
