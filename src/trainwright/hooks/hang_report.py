"""What a rank can tell of itself when the run is stuck: the stacks of its threads, its place, its collectives.

Called from the watcher's thread; the thread that trains may be blocked anywhere, so nothing here waits for the
device, for another rank, or for a lock of the training's.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import sys
import threading
import traceback
from datetime import datetime
from pathlib import Path
from types import FrameType

import torch.distributed

import trainwright.parallel
from trainwright.hooks.hang_verdict import Standing
from trainwright.loop.phases import PHASES, Phases
from trainwright.parallel.notes import collective_log

_COLLECTIVE_CODE = (
    str(Path(torch.distributed.__file__).parent) + os.sep,
    str(Path(trainwright.parallel.__file__).parent) + os.sep,
)
_DEBUGGERS = frozenset({"pdb", "bdb", "pydevd", "_pydevd_bundle"})


def is_in_collective(thread: int) -> bool:
    """Is the code that a thread runs right now that of torch's collectives, or of ours?"""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVE_CODE)


def is_debugged(thread: int) -> bool:
    """Is somebody looking at this thread with a debugger? Then it may stand still for as long as it likes."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def write_rank_report(folder: Path, rank: int, standing: Standing, phases: Phases, *, thread: int, places: str) -> None:
    """Writes rank-R.txt, and what torch recorded of the collectives to rank-R-collectives.json."""
    folder.mkdir(parents=True, exist_ok=True)
    usual = "not known yet" if standing.usual is None else f"{standing.usual:.3g} s"
    lines = [
        f"Rank {rank}, process {os.getpid()} on {platform.node()}, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
        f"In {standing.phase} of step {standing.step} for {standing.seconds:.1f} s; usual: {usual}; "
        f"limit: {standing.limit:.3g} s.",
        f"Inside a collective: {'yes' if standing.is_waiting else 'no'}; begun so far: {standing.num_collectives}.",
        places,
        "Seconds in each phase since the start: "
        + ", ".join(f"{phase} {phases.seconds_in(phase):.1f}" for phase in PHASES if phases.num_finished(phase)),
        *(f"Child process {child.name}: {child.pid}" for child in multiprocessing.active_children()),
        "",
        _stacks(thread),
    ]
    (folder / f"rank-{rank}.txt").write_text("\n".join(lines), encoding="utf-8")
    # After the stacks, which must not be lost if this blocks.
    collectives = collective_log() if torch.distributed.is_initialized() else None
    if collectives is not None:
        (folder / f"rank-{rank}-collectives.json").write_text(collectives, encoding="utf-8")


def _stacks(first: int) -> str:
    """The stacks of all threads but this one, that of the training first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    order = sorted(frames, key=lambda thread: thread != first)
    return "\n".join(
        f"{names.get(thread, 'a thread not of Python')}{' (training)' if thread == first else ''}, innermost last:\n"
        + "".join(traceback.format_stack(frames[thread]))
        for thread in order
    )


def identify_process(pid: int) -> str:
    """Returns what tells a process apart from every other one, on any machine; empty where the system cannot say."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        # The numbers of processes in another container mean other processes.
        container = Path("/proc/self/ns/pid").readlink()
        started = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{pid} {started} {container} {machine}"


def end_process(identity: str) -> bool:
    """Kills a process that `identify_process` named, if it runs on this machine and is still the same one."""
    if not identity or identify_process(pid := int(identity.split(maxsplit=1)[0])) != identity:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


def end_children() -> None:
    """Kills the processes that this one has started: a loader's worker that is stuck would stay behind."""
    for child in multiprocessing.active_children():
        child.kill()
