"""Obeys Ctrl-C and SIGTERM: the step under way is finished and saved, then the run leaves.

The handler only notes the wish; the loop acts on it at the step's end, on all ranks together.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

from trainwright.loop.hook import Hook

SIGNALS = (signal.SIGINT, signal.SIGTERM)

# torchrun and cluster managers pass a signal on that the whole process group has had already: the same wish, twice.
ECHO_SECONDS = 2.0


class ObeyPreemption(Hook):
    """Turns the first SIGINT or SIGTERM into `trainer.interrupt`; one well after it acts as if nobody listened."""

    def __init__(self) -> None:
        self._heard_at: float | None = None
        self._previous: dict[int, Any] = {}

    def before_train(self) -> None:
        """Listens, where Python allows it: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Gives the signals back to whom they belonged."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._heard_at is None:
            self._heard_at = now
            self.trainer.interrupt(signal.Signals(number).name)
        elif now - self._heard_at > ECHO_SECONDS:
            # A second signal is for the impatient: it ends the run at once.
            self.close()
            signal.raise_signal(number)
