"""How the ranks of a run find each other before anything is collective, in a store that may hold notes of dead ones.

    every rank   appends (rank, a name of its own, used once) to the list of those who are here
    rank 0       invites each name by the name of the meeting; who has died does not answer, who was restarted
                 comes again by another name; when all have answered, it opens the meeting
    every rank   waits for its invitation, answers, waits until the meeting is open

So a group that is restarted, wholly or in part, never takes up what an earlier one left.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from trainwright.errors import ConfigError, TrainwrightError
from trainwright.parallel.first_error import noted_failure, own_name, who_is
from trainwright.parallel.notes import text_of

ARRIVE_SECONDS = 300.0
"""How long ranks may come after each other: imports from a slow disk take minutes on many machines."""

_HERE, _INVITATION, _ANSWERS, _OPEN = "here", "invitation", "answers", "open"
_POLL_SECONDS = (0.02, 0.5)  # the first and the longest pause; thousands of ranks ask one store


def meet(store: Store, rank: int, size: int, *, arrive_seconds: float = ARRIVE_SECONDS) -> str:
    """Waits until all ranks are here, and returns the name of the meeting, which no other meeting in the store has.

    A rank that does not come, or that fails meanwhile, is an error that names it, on every rank.
    """
    notes: Any = PrefixStore("trainwright/meeting", store)  # torch's stubs lack `append`
    if not _launcher_numbers_ranks():
        _refuse_twins(store, rank)
    own = uuid.uuid4().hex
    notes.append(_HERE, f"{rank} {own}\n")
    if rank == 0:
        return _host(notes, store, own, size, arrive_seconds)
    meeting = ""

    def is_open() -> bool:
        nonlocal meeting
        if not meeting and notes.check([f"{_INVITATION}/{own}"]):
            meeting = text_of(notes.get(f"{_INVITATION}/{own}"))
            notes.add(f"{_ANSWERS}/{meeting}", 1)
        return bool(meeting) and notes.check([f"{_OPEN}/{meeting}"])

    # Rank 0 gives up first, and knows who is missing.
    if not _wait(is_open, store, rank, arrive_seconds + 10):
        raise TrainwrightError(f"Rank {rank} waited for rank 0 for {arrive_seconds + 10:.0f} s. Is it started?")
    return meeting


def _host(notes: Store, store: Store, own: str, size: int, arrive_seconds: float) -> str:
    """Invites until all have answered."""
    meeting = uuid.uuid4().hex
    invited: set[str] = set()
    missing: list[int] = []

    def has_all() -> bool:
        names = dict(line.split() for line in text_of(notes.get(_HERE)).splitlines())  # the last name of a rank counts
        missing[:] = [rank for rank in range(size) if str(rank) not in names]
        for name in set(names.values()) - invited - {own}:
            notes.set(f"{_INVITATION}/{name}", meeting)
            invited.add(name)
        return not missing and notes.add(f"{_ANSWERS}/{meeting}", 0) >= size - 1

    if not _wait(has_all, store, 0, arrive_seconds):
        shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        who = f"of rank {shown} there is no sign" if missing else "one of them has died"
        raise TrainwrightError(
            f"Not all {size} ranks have come within {arrive_seconds:.0f} s: {who}. Start them all, with the same "
            "MASTER_ADDR, MASTER_PORT and WORLD_SIZE; what a rank that failed has said is in its own output."
        )
    notes.set(f"{_OPEN}/{meeting}", "1")
    return meeting


def _wait(is_done: Callable[[], bool], store: Store, rank: int, seconds: float) -> bool:
    """Asks until it is done or the time is over; a failure that another rank notes meanwhile is raised here too."""
    until, pause = time.monotonic() + seconds, _POLL_SECONDS[0]
    while time.monotonic() < until:
        try:
            if is_done():
                return True
            failure = None if _launcher_numbers_ranks() else noted_failure(store)
        except RuntimeError as error:  # the connection was closed
            raise TrainwrightError(
                f"Rank {rank} has lost the store of the run while the ranks were gathering: rank 0 or the launcher is "
                "gone. Its own output says why."
            ) from error
        if failure is not None and failure.rank != rank:
            raise TrainwrightError(f"Rank {failure.rank} failed at start-up: {failure.text}")
        time.sleep(pause)
        pause = min(pause * 1.5, _POLL_SECONDS[1])
    return False


def _refuse_twins(store: Store, rank: int) -> None:
    """Two processes with one number: two runs share a port."""
    own = own_name()
    first = who_is(store, rank, name=own)
    if first != own:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"Two processes say that they are rank {rank} of the run at {address}: {first}, and this one, {own}. "
            "Two runs use the same MASTER_PORT: give one of them another."
        )


def _launcher_numbers_ranks() -> bool:
    """Does torch's launcher number the ranks and end them all when one fails? Its store outlives them, too."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
