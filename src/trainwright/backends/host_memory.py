"""Host memory: the usage and peak of this process, the available memory, and Python's garbage collection.

By default, the garbage collector runs within a step, at different times on each rank, and visits every object that
torch has created, which can leave the device idle for half a second. `GarbageCollection` moves it between steps.
"""

from __future__ import annotations

import gc
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_PROC = Path("/proc")
_CONTROL_GROUPS = (
    # version 2, then version 1: the limit, the usage, and the statistics with cached files that can be dropped
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory.stat")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.stat"),
    ),
)


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes of one device; None if unknown."""

    in_use: int | None
    """The tensors of this process; in main memory, all that it uses."""
    peak: int | None
    """The highest value of `in_use`."""
    reserved: int | None = None
    """What its allocator has reserved, including unused blocks; None without such an allocator."""
    total: int | None = None
    """The memory of the device, for all processes."""


def facts() -> MemoryFacts:
    """Returns the memory of this process."""
    status = _read(_PROC / "self" / "status")
    total = _kilobytes("MemTotal", _read(_PROC / "meminfo"))
    return MemoryFacts(_kilobytes("VmRSS", status), _kilobytes("VmHWM", status), total=total)


def begin_peak() -> None:
    """Resets the peak; Linux allows it, a sandbox may not."""
    with suppress(OSError):  # otherwise the peak is that of the whole process, which is not less
        (_PROC / "self" / "clear_refs").write_text("5", encoding="ascii")


def room() -> int | None:
    """Returns how many bytes are left on the machine, and in the control group of a container."""
    available = _kilobytes("MemAvailable", _read(_PROC / "meminfo"))
    rooms = [] if available is None else [available]
    for limit_file, usage_file, statistics_file in _CONTROL_GROUPS:
        limit, usage = _read(limit_file).strip(), _read(usage_file).strip()
        if limit.isdecimal() and usage.isdecimal():
            droppable = re.search(r"^inactive_file (\d+)$", _read(statistics_file), re.MULTILINE)
            rooms.append(max(int(limit) - int(usage) + (int(droppable[1]) if droppable else 0), 0))
    return min(rooms) if rooms else None


def _kilobytes(name: str, text: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return ""


MAX_STEPS = 20
"""The most steps without a collection: a cycle may hold a batch, or other memory of the device."""
FIRST_STEPS = 5
"""The first collection comes early. It visits all objects of compilers and may take a second, which is short compared
with the compilation; at step 20 it would be an unexpected pause."""
FULL_EVERY = 50
"""Every 50th collection visits all objects since the start; the others only those of the last steps."""
FROZEN_BY_PYTHON = 1000
"""With fewer frozen objects gc.freeze was not called: Python 3.12 starts with 375, and torch has many more."""
LONG_RUN = 100
"""A run of at least this many steps starts with a full collection, which takes a moment."""


class GarbageCollection:
    """Disables Python's collector during a run; `tidy` collects when that is due.

        with GarbageCollection(num_steps=1000) as garbage:
            for each step:
                ... the update ...
                garbage.tidy(is_due=the step is logged, evaluated or saved)

    Objects that exist at the start, and after the first collection (compiled code), are frozen: later collections skip
    them. A program that has disabled the collector, or has called gc.freeze, keeps its settings. At the end objects are
    unfrozen and the collector is enabled again.
    """

    def __init__(self, *, num_steps: int = 0) -> None:
        self._is_long = num_steps >= LONG_RUN
        self._is_active = False
        self._freezes = False
        self._num_collections = 0
        self.steps_since = 0
        """Steps since the last collection."""
        self.max_steps = FIRST_STEPS
        """After this many steps a collection is due in any case."""

    def __enter__(self) -> GarbageCollection:
        if gc.isenabled():
            self._is_active, self._freezes = True, gc.get_freeze_count() < FROZEN_BY_PYTHON
            self._num_collections, self.steps_since, self.max_steps = 0, 0, FIRST_STEPS
            gc.disable()
            if self._freezes:
                # Frozen garbage would be kept until the end of the run.
                gc.collect(2 if self._is_long else 1)
                gc.freeze()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._is_active:
            self._is_active = False
            if self._freezes:
                gc.unfreeze()
            gc.enable()

    def tidy(self, *, is_due: bool) -> None:
        """Ends a step: collects if that is due, and at least every 20 steps."""
        self.steps_since += 1
        if is_due or self.steps_since >= self.max_steps:
            self.collect()

    def collect(self) -> None:
        """Frees reference cycles, in a few microseconds for each step since the last collection."""
        self.steps_since, self.max_steps = 0, MAX_STEPS
        if not self._is_active:
            return
        self._num_collections += 1
        gc.collect(2 if self._num_collections % FULL_EVERY == 0 else 1)
        if self._freezes and self._num_collections == 1:
            gc.freeze()
