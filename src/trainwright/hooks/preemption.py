"""Obeys Ctrl-C, SIGTERM and SIGUSR1: the step under way is finished and saved, then the run leaves.

A signal is only noted; the loop acts on it at the step's end, on all ranks together. A thread hears it too, whatever
the main thread is at (a collective that never ends, a compiler), and ends the process when the deadline has passed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from trainwright.config import PreemptionSection
from trainwright.errors import exit_code_of
from trainwright.log import flush_log
from trainwright.loop.hook import Hook

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# torchrun and cluster managers pass a signal on that the whole process group has had already: the same request, twice.
ECHO_SECONDS = 2.0


class Listener:
    """Listens to the signals that tell a process to leave: calls `act` in the main thread, and keeps the deadline.

    `act` runs between two instructions of the main thread, so it only notes, or raises where nothing can be lost.
    A second signal well after the first ends the process as if nobody listened.
    """

    def __init__(self, act: Callable[[str], None], *, deadline_seconds: float, word: str | None = None) -> None:
        self._act = act
        self._word = word
        self._deadline_seconds = deadline_seconds
        self._previous: dict[int, Any] = {}
        self._received_at: float | None = None
        self._has_left = threading.Event()
        self._ear: socket.socket | None = None
        self._previous_ear = -1

    def listen(self) -> None:
        """Begins, where Python allows it: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        hears, self._ear = socket.socketpair()
        self._ear.setblocking(False)
        # Written by the system's own handler, at once: Python's waits until the main thread is back in Python.
        self._previous_ear = signal.set_wakeup_fd(self._ear.fileno(), warn_on_full_buffer=False)
        _after_fork(self._deafen)
        threading.Thread(target=self._keep_deadline, args=(hears,), name="trainwright-signals", daemon=True).start()

    def only_note(self) -> None:
        """From now on a signal calls nothing; the deadline is still kept."""
        self._act = _do_nothing

    def close(self) -> None:
        """Gives the signals back to whom they belonged."""
        self._has_left.set()
        if self._ear is None:
            return
        signal.set_wakeup_fd(self._previous_ear)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        self._ear.close()  # which ends the thread
        self._ear = None

    def _deafen(self) -> None:
        """Called in a forked child, whose signals are its own: a loader's worker that is ended must not end the run."""
        if self._ear is not None:
            signal.set_wakeup_fd(-1)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received_at is None:
            self._received_at = now
            self._act(signal.Signals(number).name)
        elif now - self._received_at > ECHO_SECONDS:
            # A second signal is for the impatient: it ends the run at once.
            self._insist(number)

    def _insist(self, number: int) -> None:
        """Gives a signal to whom it belongs: a listener from before this one would only note it once more."""
        self.close()
        before = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(before, Listener):
            before._insist(number)
        else:
            signal.raise_signal(number)

    def _keep_deadline(self, hears: socket.socket) -> None:
        with hears:
            while received := hears.recv(64):
                if self._word is not None and any(number in SIGNALS for number in received):
                    logger.info("%s: %s", signal.Signals(received[0]).name, self._word)
                    self._word = None
                # Whoever presses Ctrl-C sits before the terminal and can press it again.
                urgent = [number for number in received if number in SIGNALS and number != signal.SIGINT]
                if urgent and not self._has_left.wait(self._deadline_seconds):
                    name = signal.Signals(urgent[0]).name
                    logger.error(
                        "%s came %.0f s ago and no step has ended since: leaving without saving. "
                        "The same command goes on from the newest checkpoint, or from the beginning if there is none.",
                        name,
                        self._deadline_seconds,
                    )
                    flush_log()
                    os._exit(exit_code_of(name))


def _do_nothing(signal_name: str) -> None:
    """What is under way ends by itself."""


def _after_fork(act: Callable[[], None]) -> None:
    """Calls a method in each child that is forked from now on, while its object lives; it cannot be taken back."""
    weak = weakref.WeakMethod(act)

    def call() -> None:
        method = weak()
        if method is not None:
            method()

    os.register_at_fork(after_in_child=call)


class ObeyPreemption(Hook):
    """Turns the first SIGINT, SIGTERM or SIGUSR1 into `trainer.interrupt`."""

    def __init__(self, section: PreemptionSection | None = None) -> None:
        self._deadline_seconds = (section or PreemptionSection()).deadline_seconds
        self._listener: Listener | None = None

    def before_train(self) -> None:
        """Listens."""
        word = "received. The step under way is finished and saved first; a second one ends the run at once."
        self._listener = Listener(self.trainer.interrupt, deadline_seconds=self._deadline_seconds, word=word)
        self._listener.listen()

    def close(self) -> None:
        """Stops listening."""
        if self._listener is not None:
            self._listener.close()
