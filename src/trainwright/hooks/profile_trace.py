"""Shares out the time of a profiler's trace: what the device did at each moment, and what the host did while it idled.

The trace is Chrome's format as torch writes it, with the names of profile_ranges.py in it. On a CPU the host's own
ranges are the answer. A GPU is asked instead: each moment goes to the range that launched the kernel which then ran.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainwright.errors import TrainwrightError
from trainwright.hooks.profile_ranges import LEFT_OUT, PREFIX

ROWS = ("data", "host", "forward", "backward", "optimizer", "replay", "communication", "idle")
"""What a moment is shared out to.

data: the device, or on a CPU everything, waits for a batch; host: it waits for hooks, logs and the loop, or does what
they ask of it; replay: a recorded update as a whole; communication: only data of other ranks moves; idle: a GPU has
nothing to do although the host is within the update.
"""

_COMPUTE = ("forward", "backward", "optimizer", "replay")
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_MICROSECOND = 1e-6


@dataclass(frozen=True)
class Shares:
    """The seconds of each row, which add up to the whole; rows without any are missing."""

    seconds: Mapping[str, float]
    has_device: bool
    """Did a device of its own work, beside the host?"""

    @property
    def total(self) -> float:
        """The seconds of all rows: those of the profiled steps."""
        return sum(self.seconds.values())


class _Span(NamedTuple):
    start: float
    end: float
    row: str


def read_trace(path: Path) -> Shares:
    """Reads what torch's `export_chrome_trace` wrote, gzipped."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return share_out(json.load(file)["traceEvents"])


def share_out(events: Iterable[Mapping[str, Any]]) -> Shares:
    """Gives every moment between the first range's beginning and the last one's end to one row."""
    whole = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(
        _Span(float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]).removeprefix(PREFIX))
        for event in whole
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(PREFIX)
    )
    if not ranges:
        raise TrainwrightError("The trace has none of the ranges that a profile of steps puts into it.")
    on_device = _device_spans(whole, ranges)
    seconds = dict.fromkeys(ROWS, 0.0)
    has_device = bool(on_device)
    last = max([ranges[-1].end, *(span.end for span in on_device)])
    # While the device works on what is left to it, the host waits at the end.
    ranges.append(_Span(ranges[-1].end, last, "idle" if has_device else "host"))
    for length, host, active in _moments(ranges, on_device):
        if host not in LEFT_OUT:
            seconds[_row_of(host, active) if has_device else host] += length * _MICROSECOND
    return Shares({row: seconds[row] for row in ROWS if seconds[row] > 0}, has_device)


def _device_spans(events: list[Mapping[str, Any]], ranges: list[_Span]) -> list[_Span]:
    """Returns what ran on a device, each with the row of the range that launched it."""
    launched_at = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    starts = [span.start for span in ranges]
    spans = []
    for event in events:
        if event.get("cat") not in _ON_DEVICE:
            continue
        start = float(event["ts"])
        # One whose launch is not in the trace is taken to belong to what the host does when it begins.
        launched = launched_at.get(event.get("args", {}).get("correlation"), start)
        if launched < starts[0]:
            continue  # of the step before
        row = ranges[bisect_right(starts, launched) - 1].row
        if str(event["name"]).startswith(("nccl", "rccl")):
            row = row if row in LEFT_OUT else "communication"
        spans.append(_Span(start, start + float(event["dur"]), row))
    return spans


def _moments(ranges: list[_Span], on_device: list[_Span]) -> Iterable[tuple[float, str, Counter[str]]]:
    """Yields, for each stretch in which nothing begins or ends, its length, the host's row and the device's rows."""
    marks: list[tuple[float, int, str, int]] = [(span.start, 0, span.row, 0) for span in ranges]
    marks += [(span.start, 1, span.row, 1) for span in on_device]
    marks += [(span.end, 1, span.row, -1) for span in on_device]
    marks.append((ranges[-1].end, 2, "", 0))
    marks.sort()
    active: Counter[str] = Counter()
    host, before = ranges[0].row, ranges[0].start
    for moment, kind, row, change in marks:
        if moment > before:
            yield moment - before, host, active
            before = moment
        if kind == 0:
            host = row
        else:
            active[row] += change


def _row_of(host: str, active: Counter[str]) -> str:
    """The row of a moment on a device: what it computes, else what it moves, else whom it waits for."""
    for row in (*_COMPUTE, "communication", "data", "host"):
        if active[row] > 0:
            return row
    return host if host in ("data", "host") else "idle"
