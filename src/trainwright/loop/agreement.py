"""Lets the ranks of an evaluation fail or exit together, instead of waiting for each other in a collective."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from trainwright.errors import TrainwrightError
from trainwright.loop.stop_signal import StopSignal
from trainwright.parallel.collectives import Ranks

T = TypeVar("T")

AGREEMENT_SECONDS = 10.0
"""How long a rank that failed in a forward of a sharded model waits for all others to report a failure too."""
_POLL_SECONDS = 0.05


class EvaluationAbandoned(Exception):  # noqa: N818 # not an error: the resumed run evaluates again
    """The run was interrupted during an evaluation."""


class FailedElsewhere(Exception):  # noqa: N818 # another rank has the error
    """Another rank has failed; the next collective call raises its error."""


class Agreement:
    """Decisions that all ranks make together in one pass: whether to continue, and whether any rank has failed."""

    def __init__(self, ranks: Ranks, stop_signal: StopSignal | None) -> None:
        """`stop_signal` is passed if an interruption may abandon the pass."""
        self._ranks = ranks
        self._stop_signal = stop_signal
        self._is_split = ranks.mesh.is_split
        self._flag = f"failed-forward/{ranks.broadcast(secrets.token_hex(8))}" if self._is_split else ""

    def to_continue(self, failure: Exception | None, *, has_ended: bool = False) -> None:
        """Raises a failure of any rank, or EvaluationAbandoned after a request to stop.

        Ranks that share a model must all run every forward.
        """
        signal = None if has_ended else self._stop_signal
        leaves = int(signal is not None and signal.must_leave_now())
        num_failed = int(failure is not None)
        if self._is_split:
            leaves, num_failed = self._ranks.sum_counts(leaves, num_failed)
        if failure is not None:
            raise failure
        if num_failed:
            raise FailedElsewhere
        if leaves:
            raise EvaluationAbandoned

    def have_all_failed(self) -> bool:
        """Announces that this rank failed in a forward; returns True if all ranks did, in which case collectives still
        work.

        Otherwise, the other ranks wait in a collective of that forward until this rank exits.
        """
        ranks = self._ranks
        is_over, all_flags = f"{self._flag}/over", [f"{self._flag}/{rank}" for rank in range(ranks.size)]
        until = time.monotonic() + AGREEMENT_SECONDS
        try:
            ranks.raise_flag(f"{self._flag}/{ranks.rank}")
            while not ranks.is_raised(is_over):
                if ranks.is_raised(*all_flags):
                    return True
                if time.monotonic() > until:
                    ranks.raise_flag(is_over)
                time.sleep(_POLL_SECONDS)
        except RuntimeError:  # network errors of torch: the process with the store has ended
            return False
        return False


def together(ranks: Ranks, call: Callable[[], T]) -> T:
    """Calls a function that may fail on some rank; if it does, all ranks raise instead of waiting for each other."""
    failure: Exception | None = None
    try:
        result = call()
    except Exception as error:
        failure = error
    raise_failure(failure, ranks.gather(describe_failure(failure)))
    return result


def describe_failure(failure: Exception | None) -> str | None:
    """Returns a failure of this rank for the others; None without one."""
    return None if failure is None or isinstance(failure, FailedElsewhere) else repr(failure)


def raise_failure(own: Exception | None, failures: list[str | None]) -> None:
    """Raises on every rank if any failed: the error itself on that rank, its text on the others.

    Interrupted ranks stop at different batches; the others stop here.
    """
    abandoned = repr(EvaluationAbandoned())
    if own is not None and not isinstance(own, EvaluationAbandoned | FailedElsewhere):
        raise own
    for rank, failure in enumerate(failures):
        if failure not in (None, abandoned):
            raise TrainwrightError(f"The evaluation failed on rank {rank}: {failure}")
    if abandoned in failures:
        raise EvaluationAbandoned
