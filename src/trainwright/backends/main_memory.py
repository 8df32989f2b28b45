"""The machine's main memory: what this process holds of it, its peak, and what is left.

Read from /proc and the control group, which is where a container's limit is; elsewhere most of it is unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
