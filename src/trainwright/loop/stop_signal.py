"""How the ranks leave the loop together: any rank may request it, and all follow the strongest request.

Requests may come at any time, from a hook, another thread or a signal handler. The ranks compare them once per step,
by a message whose answer is one step old, so that no step waits for it.
"""

from __future__ import annotations

import os
import time
from enum import IntEnum

from trainwright.parallel.collectives import Ranks

SECONDS_BETWEEN_QUESTIONS = 0.5


class Intent(IntEnum):
    """What a rank requests, the weaker first."""

    GO_ON = 0
    STOP = 1
    """End after this step as if it were the last: evaluated, written and saved."""
    INTERRUPT = 2
    """Save after this step and leave; the same command goes on as if nothing had happened."""
    FAIL = 3
    """Leave with an error: saving has failed for good."""


class Agreement:
    """This rank's request, and what all of them have decided."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # A slot for each: a signal's handler may come in between any two acts, and must lose no request.
        self._reasons: dict[Intent, str] = {}
        self._shared_reason: str | None = None
        self.decided = Intent.GO_ON
        self._flag = ""
        self._has_raised = False
        self._asked_at = 0.0

    def request(self, intent: Intent, reason: str) -> None:
        """Notes a request; the strongest counts, of equal ones the first. Safe in a signal handler and any thread."""
        self._reasons.setdefault(intent, reason)

    @property
    def _request(self) -> Intent:
        return max(self._reasons, default=Intent.GO_ON)

    @property
    def reason(self) -> str | None:
        """Why this rank, or after `share_reason` any rank, requests to leave."""
        return self._shared_reason or self._reasons.get(self._request)

    @property
    def is_plain(self) -> bool:
        """Has this rank nobody to ask and nothing to request?"""
        return self._ranks.size == 1 and not self._reasons

    def vote(self, num_committed: int, is_time: bool) -> tuple[int, bool]:
        """Casts this rank's request, and what it knows of checkpoints; decides by the votes of the call before.

        Returns the highest number of a committed save, and whether any rank's clock says that one is due.
        """
        decided, committed, time = self._ranks.highest_votes(self._request, num_committed, int(is_time))
        self.decided = Intent(max(self.decided, decided))
        return committed, bool(time)

    def is_stop_requested(self) -> bool:
        """Was any rank told to leave? Each asks for itself in the midst of a long act, and none waits for another.

        Asked every now and then only, for a rank that was not told itself asks by a message.
        """
        if self._request >= Intent.INTERRUPT:
            if not self._has_raised:
                self._has_raised = True
                self._ranks.raise_flag(self._flag)
            return True
        now = time.monotonic()
        if self._ranks.size == 1 or now - self._asked_at < SECONDS_BETWEEN_QUESTIONS:
            return False
        self._asked_at = now
        return self._ranks.is_raised(self._flag)

    def begin(self) -> None:
        """Begins a run: the ranks name the flag by which one tells the others, and hear each other's requests."""
        # A name of its own, for the store outlives this run where a process trains several.
        self._flag = f"leave/{self._ranks.broadcast(os.urandom(8).hex())}"
        self.settle()

    def settle(self) -> None:
        """Decides at once, where the ranks meet anyway."""
        self.decided = Intent(max(self.decided, *self._ranks.gather(self._request)))

    def share_reason(self) -> None:
        """Tells every rank why: the one that was asked knows."""
        self._ranks.settle_votes()
        self._shared_reason = max(self._ranks.gather((int(self._request), self.reason or "")))[1] or None
