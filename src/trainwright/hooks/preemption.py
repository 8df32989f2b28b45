"""Handles SIGINT, SIGTERM, SIGUSR1 and SIGHUP: the current step is completed and saved, then the run ends.

The signal handler only records the signal; the loop acts on it at the end of the step, on all ranks together. A thread
receives it too, even if the main thread is blocked (in a collective that never ends, in a compiler), and ends the
process after the deadline.
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
from trainwright.progress import free_terminal

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

# torchrun and cluster managers forward a signal that the whole process group has already received.
ECHO_SECONDS = 2.0


class SignalListener:
    """Calls `on_signal` in the main thread at the first signal, and ends the process after the deadline.

    `on_signal` runs between two instructions of the main thread, so it only records the signal, or raises if no work
    can be lost. A second signal, well after the first, has its previous effect.
    """

    def __init__(
        self, on_signal: Callable[[str], None], *, deadline_seconds: float, message: str | None = None
    ) -> None:
        self._on_signal = on_signal
        self._message = message
        self._deadline_seconds = deadline_seconds
        self._previous: dict[int, Any] = {}
        self._received_at: float | None = None
        self._has_closed = threading.Event()
        self._wakeup: socket.socket | None = None
        self._previous_wakeup = -1

    def listen(self) -> None:
        """Installs the handlers; does nothing outside the main thread, where Python does not allow it."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run outlives its terminal
            self._previous[number] = signal.signal(number, self._handle)
        receiver, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        # Written by the C handler immediately, whereas Python's handler runs only when the main thread is back in
        # Python.
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        weak = weakref.ref(self)  # a registered function cannot be removed

        def disable_wakeup() -> None:
            """In a forked child: ending a data worker must not end the run."""
            listener = weak()
            if listener is not None and listener._wakeup is not None:
                signal.set_wakeup_fd(-1)

        os.register_at_fork(after_in_child=disable_wakeup)
        threading.Thread(target=self._watch_deadline, args=(receiver,), name="trainwright-signals", daemon=True).start()

    def only_note(self) -> None:
        """Stops calling `on_signal`; the deadline remains."""
        self._on_signal = lambda signal_name: None

    def close(self) -> None:
        """Restores the previous handlers."""
        self._has_closed.set()
        if self._wakeup is None:
            return
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        self._wakeup.close()  # ends the thread
        self._wakeup = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received_at is None:
            self._received_at = now
            self._on_signal(signal.Signals(number).name)
        elif now - self._received_at > ECHO_SECONDS:
            self._raise_again(number)

    def _raise_again(self, number: int) -> None:
        """Gives a second signal to the previous handler; an earlier listener would only record it."""
        self.close()
        previous = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(previous, SignalListener):
            previous._raise_again(number)
        else:
            signal.raise_signal(number)

    def _watch_deadline(self, receiver: socket.socket) -> None:
        with receiver:
            while received := receiver.recv(64):
                if self._message is not None and any(number in SIGNALS for number in received):
                    logger.info("Received %s: %s", signal.Signals(received[0]).name, self._message)
                    self._message = None
                # No deadline for Ctrl-C, because a user can press it again.
                urgent = [number for number in received if number in SIGNALS and number != signal.SIGINT]
                if urgent and not self._has_closed.wait(self._deadline_seconds):
                    name = signal.Signals(urgent[0]).name
                    logger.error(
                        "Received %s %.0f s ago, and no step has ended since: exiting without saving. The same command "
                        "resumes from the newest checkpoint, or starts over if there is none.",
                        name,
                        self._deadline_seconds,
                    )
                    flush_log()
                    free_terminal()
                    os._exit(exit_code_of(name))


class ObeyPreemption(Hook):
    """Turns the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP into `trainer.interrupt`."""

    def __init__(self, section: PreemptionSection | None = None) -> None:
        self._deadline_seconds = (section or PreemptionSection()).deadline_seconds
        self._listener: SignalListener | None = None

    def before_train(self) -> None:
        """Installs the signal handlers."""
        message = "completing the current step, then saving a checkpoint. A second signal ends the run immediately."
        self._listener = SignalListener(
            self.trainer.interrupt, deadline_seconds=self._deadline_seconds, message=message
        )
        self._listener.listen()

    def close(self) -> None:
        """Restores the previous handlers."""
        if self._listener is not None:
            self._listener.close()
