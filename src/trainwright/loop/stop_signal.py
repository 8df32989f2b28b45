"""Makes the ranks exit the loop together: any rank may request it, and all follow the strongest request.

Requests may arrive at any time, from a hook, another thread or a signal handler. The ranks compare them once per step,
with a message whose answer arrives one step later, so no step waits for it.
"""

from __future__ import annotations

import os
import time
from enum import IntEnum

from trainwright.parallel.collectives import Ranks

SECONDS_BETWEEN_CHECKS = 0.5


class StopRequest(IntEnum):
    """The request of a rank, in increasing strength."""

    NONE = 0
    STOP = 1
    """End after this step as if it were the last one: evaluate, write and save it."""
    INTERRUPT = 2
    """Save after this step and exit; the same command resumes the run."""
    FAIL = 3
    """Exit with an error, because saving has failed permanently."""


class StopSignal:
    """This rank's requests, and the decision of all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # One slot per request, because a signal handler may run between any two instructions and must not lose a
        # request.
        self.reasons: dict[StopRequest, str] = {}
        """The requests of this rank, each with the first reason."""
        self._shared_reason: str | None = None
        self.decided = StopRequest.NONE
        self._flag = ""
        self._has_raised_flag = False
        self._checked_at = 0.0

    def request(self, request: StopRequest, reason: str) -> None:
        """Requests to leave. The strongest request counts; of equally strong ones, the first.

        May be called in a signal handler and in any thread.
        """
        self.reasons.setdefault(request, reason)

    def reset(self) -> None:
        """Clears all requests and decisions."""
        self.reasons.clear()
        self._shared_reason, self.decided, self._has_raised_flag = None, StopRequest.NONE, False

    def decide(self, request: StopRequest) -> None:
        """Decides for all ranks; every rank calls it with the same request."""
        self.decided = StopRequest(max(self.decided, request))

    @property
    def _strongest(self) -> StopRequest:
        return max(self.reasons, default=StopRequest.NONE)

    @property
    def reason(self) -> str | None:
        """The reason of this rank's request, or after `share_reason` that of any rank."""
        return self._shared_reason or self.reasons.get(self._strongest)

    def vote(self, num_committed: int, save_requested: bool) -> tuple[int, bool]:
        """Sends this rank's request and its state of checkpoints; decides by the votes of the previous call.

        Returns the highest number of a committed save, and whether any rank has requested a checkpoint.
        """
        decided, committed, requested = self._ranks.highest_votes(self._strongest, num_committed, int(save_requested))
        self.decide(StopRequest(decided))
        return committed, bool(requested)

    def must_leave_now(self) -> bool:
        """Returns True if any rank was interrupted. For checks within long operations; no rank waits for another.

        A rank without a request asks by a message, at most twice per second.
        """
        if self._strongest >= StopRequest.INTERRUPT:
            if not self._has_raised_flag:
                self._has_raised_flag = True
                self._ranks.raise_flag(self._flag)
            return True
        now = time.monotonic()
        if self._ranks.size == 1 or now - self._checked_at < SECONDS_BETWEEN_CHECKS:
            return False
        self._checked_at = now
        return self._ranks.is_raised(self._flag)

    def begin(self) -> None:
        """Begins a run: the ranks agree on the name of the flag of `must_leave_now` and compare their requests."""
        # A unique name, because the store outlives this run if a process trains several times.
        self._flag = f"leave/{self._ranks.broadcast(os.urandom(8).hex())}"
        self.compare_now()

    def compare_now(self) -> None:
        """Decides at once; collective."""
        self.decide(StopRequest(max(self._ranks.gather(self._strongest))))

    def share_reason(self) -> None:
        """Sends the reason, which only the requesting rank has, to every rank; collective."""
        self._ranks.settle_votes()
        self._shared_reason = max(self._ranks.gather((int(self._strongest), self.reason or "")))[1] or None
