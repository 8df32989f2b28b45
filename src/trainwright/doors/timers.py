"""Named stopwatches of a user's forward_step: each stretch becomes an event, `time/NAME`, in seconds."""

from __future__ import annotations

import time

from trainwright.errors import TrainwrightError
from trainwright.events import get_event_storage
from trainwright.user_code import caller


class Timer:
    """One stopwatch. It measures the host: what a device still has to do when `stop` is called is not waited for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Begins a stretch."""
        if self._started is not None:
            raise TrainwrightError(f"timers({self._name!r}) runs already. Stop it first.", where=caller())
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Ends the stretch and puts its seconds among the step's events."""
        if self._started is None:
            raise TrainwrightError(f"timers({self._name!r}) does not run. Start it first.", where=caller())
        seconds, self._started = time.perf_counter() - self._started, None
        self._seconds += seconds
        get_event_storage().put_scalar(f"time/{self._name}", seconds)

    def reset(self) -> None:
        """Forgets all stretches, also one that has begun."""
        self._started, self._seconds = None, 0.0

    def elapsed(self, reset: bool = True) -> float:
        """Returns the seconds of all stretches since the last reset."""
        seconds = self._seconds
        if reset:
            self._seconds = 0.0
        return seconds


class Timers:
    """The stopwatches by name: `timers("data loader").start()`."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """Returns the stopwatch of that name, a new one at first."""
        return self._timers.setdefault(name, Timer(name))
