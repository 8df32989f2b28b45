"""What this rank is doing: written by the loop, read by the watchdog's thread (hooks/watchdog.py).

No locks: entering a phase writes one tuple, which a reader sees completely or not at all.
"""

from __future__ import annotations

import statistics
from collections import deque
from time import monotonic

PHASES = ("start-up", "data", "step", "reduce", "update", "hooks", "vote", "evaluate", "write", "save", "leave")
"""The phases in the order of a step.

step: forward and backward; reduce: the sum of the gradients over ranks; update: what follows it (with one process
both are part of step); vote: the ranks agree whether to go on; evaluate is entered anew for every batch.
"""

WORK = ("data", "step", "update", "hooks")
"""The phases of a step in which a rank does its own work instead of waiting for others."""

NUM_REMEMBERED = 50


class Phases:
    """What this rank is doing, since when, and how long it usually takes.

    Only the thread that trains may call `enter`; any thread may read.
    """

    def __init__(self) -> None:
        self.current: tuple[str, int, float] = ("start-up", 0, monotonic())
        """The phase, the number of the update that it belongs to, and when it began (time.monotonic)."""
        self._finished = {phase: _Finished() for phase in PHASES}

    def enter(self, phase: str, step: int) -> None:
        """Ends the phase under way and begins another, or the same anew; `step` is the update under way."""
        now = monotonic()
        before, _, since = self.current
        self.current = (phase, step, now)
        finished = self._finished[before]
        finished.total += now - since
        finished.lengths.append(now - since)
        finished.count += 1

    def median_seconds(self, phase: str) -> float | None:
        """Returns how long the phase usually takes, of the last 50 that are finished; None if none is."""
        lengths = tuple(self._finished[phase].lengths)  # one call into C: the other thread cannot come in between
        return statistics.median(lengths) if lengths else None

    def num_finished(self, phase: str) -> int:
        """Returns how often the phase has ended."""
        return self._finished[phase].count

    def seconds_in(self, phase: str) -> float:
        """Returns the seconds that all finished ones of a phase took together."""
        return self._finished[phase].total

    def seconds_at_work(self) -> float:
        """Returns the seconds of all finished phases in which this rank waited for nobody."""
        finished = self._finished
        return sum([finished[phase].total for phase in WORK])


class _Finished:
    """What is kept of a phase's finished times."""

    __slots__ = ("count", "lengths", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.lengths: deque[float] = deque(maxlen=NUM_REMEMBERED)
