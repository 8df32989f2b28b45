"""The host's memory: what this process uses, its peak, what is available, and when Python collects garbage.

Left alone, the garbage collector runs within a step, on one rank and then on another, and walks over everything torch
has created: up to half a second in which the device is idle. `Garbage` moves it between steps.
"""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_PROC = Path("/proc")
_CONTROL_GROUPS = (
    # version 2, then version 1: the limit, what is used, and which part of that are files that can be dropped
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory.stat")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.stat"),
    ),
)


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes of one device, as far as they are known; None: they are not."""

    in_use: int | None
    """What this process has in tensors now; of main memory, all that it has."""
    peak: int | None
    """The most that it had at once."""
    reserved: int | None = None
    """What its allocator holds, unused blocks included; None where there is no such thing."""
    total: int | None = None
    """What the device has, for all processes."""


def facts() -> MemoryFacts:
    """Returns what this process holds."""
    status = _read(_PROC / "self" / "status")
    total = _kilobytes("MemTotal", _read(_PROC / "meminfo"))
    return MemoryFacts(_kilobytes("VmRSS", status), _kilobytes("VmHWM", status), total=total)


def begin_peak() -> None:
    """Lets the peak count from here on; Linux allows it, and a sandbox may not."""
    try:
        (_PROC / "self" / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        """Then the peak is that of the whole process, which is no less."""


def room() -> int | None:
    """Returns how many bytes can still be taken: by the machine, and by the control group that a container is."""
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


MOST_STEPS = 20
"""So many steps at most go by without a collection: a cycle may hold a batch, or other memory of the device."""
FIRST_STEPS = 5
"""The first collection comes early. It looks at all that compilers have made, up to a second long, beside which the
compilation took a minute; at step 20 it would be a pause that nobody expects."""
FULL_EVERY = 50
"""Every so many collections look at all objects since the beginning; the others only at those of the last steps."""
OF_PYTHON = 1000
"""With fewer objects set aside nobody has done it: Python 3.12 begins with 375, and whoever imports torch has more."""
LONG_RUN = 100
"""A run of so many steps first looks at all that was left by what came before it, which takes a moment."""


class GarbageCollection:
    """Holds the collector while it is a run's context; `tidy` then collects where that is due.

        with Garbage(num_steps=1000) as garbage:
            for each step:
                ... the update ...
                garbage.tidy(is_due=the step is logged, evaluated or saved)

    What was there at the beginning, and what the first collection leaves (code that was compiled meanwhile), is set
    aside: later collections look only at what came after it. Whoever has switched the collector off, or has set
    objects aside, keeps charge of that. Afterwards nothing is set aside, and the collector runs as it did.
    """

    def __init__(self, *, num_steps: int = 0) -> None:
        self._is_long = num_steps >= LONG_RUN
        self._is_active = False
        self._sets_aside = False
        self._num_collections = 0
        self._steps_since = 0

    def __enter__(self) -> GarbageCollection:
        if gc.isenabled():
            self._is_active, self._sets_aside = True, gc.get_freeze_count() < OF_PYTHON
            self._num_collections = self._steps_since = 0
            gc.disable()
            if self._sets_aside:
                # What is garbage already would be kept to the run's end.
                gc.collect(2 if self._is_long else 1)
                gc.freeze()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._is_active:
            self._is_active = False
            if self._sets_aside:
                gc.unfreeze()
            gc.enable()

    def tidy(self, *, is_due: bool) -> None:
        """Ends a step: collects if that is due, and every so many steps in any case. Else it costs 0.1 µs."""
        self._steps_since += 1
        if is_due or self._steps_since >= (MOST_STEPS if self._num_collections else FIRST_STEPS):
            self.collect()

    def collect(self) -> None:
        """Frees what only cycles hold, in a few microseconds for each step since the last time."""
        self._steps_since = 0
        if not self._is_active:
            return
        self._num_collections += 1
        gc.collect(2 if self._num_collections % FULL_EVERY == 0 else 1)
        if self._sets_aside and self._num_collections == 1:
            gc.freeze()
