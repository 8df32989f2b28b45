"""Writes `system.json` in the run folder: the start of each process of a run, and its use of the machine.

One JSON object per line, with `step` and `time` (seconds since 1970). A line with `start` begins a process: the first
one, and each that resumed. Unlike metrics.json, it is a record of what happened, so a resumed run does not truncate it.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from trainwright.backends import host_memory
from trainwright.backends.backend import Backend
from trainwright.safe_text import json_text

logger = logging.getLogger(__name__)

SYSTEM_FILE = "system.json"

MIN_SECONDS, MAX_SECONDS = 0.5, 60.0
"""The time between two lines is a thousandth of the process's age, within these limits."""


class SystemLog:
    """Samples the machine at log lines, without waiting for the device. A full disk loses lines, but does not end the
    run."""

    def __init__(self, folder: Path, backend: Backend, *, step: int) -> None:
        """`step` is the last step before this process."""
        self._path = folder / SYSTEM_FILE
        self._backend = backend
        self._start: dict[str, Any] | None = {"time": round(time.time(), 3), "step": step, "start": True}
        self._started, self._processor_seconds = time.monotonic(), time.process_time()
        self._written = float("-inf")
        self._step, self._unwritten = step, False

    def sample(self, step: int) -> None:
        """Appends a line if enough time has passed."""
        self._step, now = step, time.monotonic()
        self._unwritten = True
        if now - self._written >= min(max(MIN_SECONDS, (now - self._started) / 1000), MAX_SECONDS):
            self._write(now)

    def close(self) -> None:
        """Appends a line for the last step."""
        if self._unwritten:
            self._write(time.monotonic())

    def _write(self, now: float) -> None:
        since = self._started if self._start is not None else self._written
        processor_seconds = time.process_time()
        line = {
            "time": round(time.time(), 3),
            "step": self._step,
            "cpu_cores": round((processor_seconds - self._processor_seconds) / max(now - since, 1e-3), 3),
            **_memory(self._backend),
        }
        lines = [each for each in (self._start, line) if each is not None]
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json_text(each) + "\n" for each in lines))
        except OSError as error:
            logger.debug("%s cannot be written (%s).", self._path, error.strerror)
        self._start, self._unwritten = None, False
        self._written, self._processor_seconds = now, processor_seconds


def _memory(backend: Backend) -> dict[str, float]:
    """Returns bytes of main memory and of the device, and the share of time in which the device was busy."""
    host, device = host_memory.facts(), backend.memory()
    found: dict[str, float | None] = {"memory": host.in_use, "memory_available": host_memory.room()}
    if device.reserved is not None:  # a device with its own memory
        found |= {
            "device_memory": device.in_use,
            "device_memory_peak": device.peak,
            "device_memory_reserved": device.reserved,
            "device_utilization": backend.utilization(),
        }
    return {name: value for name, value in found.items() if value is not None}
