"""The current phase of this rank: written by the loop, read by the watchdog's thread (hooks/watchdog.py) and the
profiler.

No locks: entering a phase assigns one tuple, which a reader sees completely or not at all.
"""

from __future__ import annotations

import statistics
from collections import deque
from time import monotonic

from torch.profiler import record_function

PHASES = ("start-up", "data", "step", "reduce", "update", "hooks", "vote", "evaluate", "write", "save", "leave")
"""The phases in the order of a step.

step: forward and backward; reduce: the sum of the gradients over ranks; update: what follows it (with one process
both are part of step); vote: the ranks agree whether to continue; evaluate is entered again for every batch.
"""

WORK = ("data", "step", "update", "hooks")
"""The phases of a step in which a rank does its own work instead of waiting for others."""

NUM_REMEMBERED = 50


class Heartbeat:
    """The current phase, its start, and how long each phase usually takes.

    Only the thread that trains may call `enter`; any thread may read.
    """

    def __init__(self) -> None:
        self.current: tuple[str, int, float] = ("start-up", 0, monotonic())
        """The phase, the number of the update it belongs to, and its start (time.monotonic)."""
        self.trace: PhaseTrace | None = None
        """Marks the phases in a torch profile while the profiler hook is active."""
        self._finished = {phase: _Finished() for phase in PHASES}

    def enter(self, phase: str, step: int | None = None) -> None:
        """Ends the current phase and begins another one, which without `step` belongs to the same update."""
        now = monotonic()
        before, last_step, since = self.current
        self.current = (phase, last_step if step is None else step, now)
        finished = self._finished[before]
        finished.total += now - since
        finished.lengths.append(now - since)
        finished.count += 1
        if self.trace is not None:
            self.trace.enter(phase)

    def start_trace(self) -> None:
        """Begins to mark phases in the torch profile that is being recorded."""
        self.trace = PhaseTrace(self.current[0])

    def end_trace(self) -> None:
        """Ends the last range."""
        if self.trace is not None:
            self.trace.close()
            self.trace = None

    def median_seconds(self, phase: str) -> float | None:
        """Returns the median duration of the last 50 finished phases of this name; None if there is none."""
        lengths = tuple(self._finished[phase].lengths)  # one call into C, which the other thread cannot interrupt
        return statistics.median(lengths) if lengths else None

    def num_finished(self, phase: str) -> int:
        """Returns how often the phase has ended."""
        return self._finished[phase].count

    def seconds_in(self, phase: str) -> float:
        """Returns the total duration of all finished phases of this name."""
        return self._finished[phase].total

    def seconds_at_work(self) -> float:
        """Returns the total duration of all finished phases in which this rank waited for no other rank."""
        finished = self._finished
        return sum([finished[phase].total for phase in WORK])


class PhaseTrace:
    """Ranges of a torch profile, one after the other: the phases, and the parts of an update inside `step`."""

    PREFIX = "trainwright: "

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._range: record_function | None = None
        self._begin(phase)

    def enter(self, phase: str) -> None:
        """Begins a phase."""
        self._phase = phase
        self._begin(phase)

    def enter_part(self, name: str) -> None:
        """Begins `forward`, `backward` or `optimizer`; an evaluation is not divided."""
        if self._phase != "evaluate":
            self._begin(name)

    def leave_part(self) -> None:
        """Returns to the phase around the part."""
        self._begin(self._phase)

    def close(self) -> None:
        """Ends the current range."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _begin(self, name: str) -> None:
        self.close()
        self._range = record_function(self.PREFIX + name)
        self._range.__enter__()  # type: ignore[no-untyped-call]


class _Finished:
    """The durations of one phase."""

    __slots__ = ("count", "lengths", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.lengths: deque[float] = deque(maxlen=NUM_REMEMBERED)
