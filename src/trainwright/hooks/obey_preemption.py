"""Obeys Ctrl-C and SIGTERM: the step under way is finished and saved, then the run leaves.

The handler only notes the wish; the loop acts on it at the step's end, on all ranks together.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from trainwright.loop.hook import Hook

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ObeyPreemption(Hook):
    """Turns the first SIGINT or SIGTERM into `trainer.interrupt`; the second acts as if nobody listened."""

    def __init__(self) -> None:
        self.received: int | None = None
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
        self.close()  # a second signal is for the impatient: it ends the run at once
        self.received = number
        self.trainer.interrupt(signal.Signals(number).name)
