"""The CPU cores that this process may use. Does not import torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_cores() -> int:
    """Returns the number of CPU cores that this process may use, also in a container with a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        cores = min(cores, max(1, round(int(quota) / int(period))))  # without a quota it is "max"
    return cores
