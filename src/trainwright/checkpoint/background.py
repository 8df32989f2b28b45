"""Writes checkpoints beside training: one at a time, retried, and its failures told to the loop.

```
save:    wait for the save before → copy the state (staging.py) → hand it to the thread → return
thread:  write → commit (store.py) → links and deletions by policy (retention.py) → report
failed:  warn → free by policy → wait → write again, three times in all → give this save up
```
The loop asks `check` and `take_committed` at each step; both read what the thread left and never wait. Where several
ranks write (together.py), each has a saver: the first one's retries, deletes and counts, the others' follow it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainwright.checkpoint.retention import Retention, Store, delete_all, metrics_by_step, prune
from trainwright.checkpoint.snapshot import HostBuffers, HostSnapshot, encode_parts
from trainwright.checkpoint.store import CheckpointStore, OtherWriters, is_disk_full
from trainwright.checkpoint.together import SharedStore, Together
from trainwright.errors import CheckpointError

logger = logging.getLogger(__name__)

ATTEMPTS = 3
SECONDS_WORTH_A_WORD = 1.0


class WritableStore(Store, SharedStore, Protocol):
    """What saving asks of a store, local or remote."""

    def write_snapshot(
        self, step: int, snapshot: HostSnapshot, /, *, metrics: Mapping[str, float], others: OtherWriters | None = None
    ) -> object:
        """Writes and commits a checkpoint, or raises and leaves the earlier ones as they were."""

    def clean(self) -> None:
        """Removes what dead or failed writers left."""


def default_backoff(attempt: int) -> float:
    """Returns the seconds to wait after a failed attempt: 1 after the first, 4 after the second."""
    return 4.0 ** (attempt - 1)


@dataclass
class _Job:
    """One save under way; `is_taken` once the thread is at it."""

    step: int
    snapshot: HostSnapshot
    metrics: dict[str, float]
    is_taken: bool = False


class BackgroundSaver:
    """Writes checkpoints beside training: one at a time, retried, and its failures told to the loop.

    With `asynchronous` off it writes before `save` returns, without a copy of the state, with the same retries.
    """

    def __init__(
        self,
        store: WritableStore,
        *,
        retention: Retention,
        asynchronous: bool = True,
        max_failures: int = 3,
        backoff: Callable[[int], float] = default_backoff,
        together: Together | None = None,
    ) -> None:
        """`together` are the ranks that write each checkpoint with this one; None: it writes alone."""
        self._store = store
        self._together = together
        if together is not None:
            together.is_leaving = False
        self._retention = retention
        self._asynchronous = asynchronous
        self._max_failures = max_failures
        self._backoff = backoff
        self._buffers = HostBuffers()
        # The lock guards what follows, and is held for moments only: never while anything is written.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None
        self._is_closed = False
        self._committed: list[int] = []
        self._failures = 0
        self._last_failure: Exception | None = None
        self._end: CheckpointError | None = None

    def save(self, step: int, parts: Mapping[str, Any] | HostSnapshot, *, metrics: Mapping[str, float]) -> None:
        """Begins a save, after the one before has ended; the state may change as soon as this returns.

        `parts` may be encoded already, and then are what this rank writes. A state that cannot be saved is rejected
        here. A write that fails is `check`'s and `wait`'s to tell.
        """
        if self._is_closed:
            raise CheckpointError(f"The saver is closed; step {step} was not saved. Make another one.")
        start = time.monotonic()
        self.wait()
        if (waited := time.monotonic() - start) > SECONDS_WORTH_A_WORD:
            logger.info("Step %d waited %.1f s for the save before; save less often, or faster.", step, waited)
        self.check()
        if not self._asynchronous:
            self._write(step, parts if isinstance(parts, HostSnapshot) else encode_parts(parts), dict(metrics))
            return
        snapshot = self._buffers.copy_to_host(parts)
        self._start_thread()
        # One assignment hands it over: Ctrl-C comes before it or after it, and `wait` wakes the thread again.
        with self._lock:
            self._job = _Job(step, snapshot, dict(metrics))
            self._changed.notify_all()

    def take_committed(self) -> list[int]:
        """Returns the steps that were committed since it was last asked, their deletions done; never waits."""
        if not self._committed:
            return []
        with self._lock:
            steps, self._committed = self._committed, []
        return steps

    def check(self) -> None:
        """Raises what ended saving for good: too many failures in a row, or an unexpected error. Never waits."""
        if self._end is not None:
            raise self._end

    def wait(self, *, must_succeed: bool = False) -> None:
        """Waits until nothing is under way. With `must_succeed` a last save that failed is raised."""
        with self._lock:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._job is None)
        if must_succeed:
            self.check()
            if self._last_failure is not None:
                raise self._last_failure

    def close(self) -> None:
        """Waits for what is under way and ends the thread; raises nothing of it."""
        if self._together is not None:
            self._together.is_leaving = True
        try:
            self.wait()
        finally:
            # Also after Ctrl-C: the thread ends with what it is at, and as a daemon it holds no exit up.
            with self._lock:
                self._is_closed = True
                self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _start_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="save checkpoints", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._take_job()) is not None:
            try:
                self._write(job.step, job.snapshot, job.metrics)
            except BaseException as error:
                problem = f"Saving step {job.step} ended unexpectedly: {error!r}"
                end = CheckpointError(f"{problem}. The newest checkpoint is {self._newest()}.")
                end.__cause__ = error
                self._end = end
            finally:
                with self._lock:
                    self._job = None
                    self._changed.notify_all()

    def _take_job(self) -> _Job | None:
        """Waits for a save, or for the end (None). By two threads a save is taken once."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_closed or (self._job is not None and not self._job.is_taken))
            job = self._job
            if job is None or job.is_taken:
                return None
            job.is_taken = True
            return job

    def _write(self, step: int, snapshot: HostSnapshot, metrics: dict[str, float]) -> None:
        """Writes, alone or with the other ranks; a success or a failure is noted, an unexpected error raised."""
        self._last_failure = None
        if self._together is None:
            self._write_with_retries(step, snapshot, metrics, None)
            return
        with self._together.saving():
            if self._together.leads:
                self._lead(step, snapshot, metrics, self._together)
            else:
                self._follow(step, snapshot, self._together)

    def _lead(self, step: int, snapshot: HostSnapshot, metrics: dict[str, float], together: Together) -> None:
        try:
            self._write_with_retries(step, snapshot, metrics, together)
        except BaseException as error:
            together.tell_given_up(f"Saving step {step} ended unexpectedly on the first rank: {error!r}")
            raise
        if self._last_failure is None:
            together.tell_committed()
        else:
            together.tell_given_up(str(self._last_failure))

    def _follow(self, step: int, snapshot: HostSnapshot, together: Together) -> None:
        """Writes this rank's share. Whether saving goes on after a failure the first rank says, to all."""
        try:
            together.follow(self._store, snapshot)
        except (CheckpointError, OSError) as error:
            self._last_failure = error
            logger.warning("Step %d is not saved, as far as this rank knows: %s", step, error)

    def _write_with_retries(
        self, step: int, snapshot: HostSnapshot, metrics: dict[str, float], together: Together | None
    ) -> None:
        others = {} if together is None else {"others": together}
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._store.write_snapshot(step, snapshot, metrics=metrics, **others)
            except (CheckpointError, OSError) as error:
                # Nobody waits for ranks that are gone, again and again, when the run has ended.
                if attempt == ATTEMPTS or (together is not None and together.is_leaving):
                    self._give_up(step, error)
                    return
                seconds = self._backoff(attempt)
                logger.warning(
                    "Saving step %d failed, again in %g s (%d of %d): %s", step, seconds, attempt, ATTEMPTS, error
                )
                self._free(step, error)
                time.sleep(seconds)
            else:
                break
        self._failures = 0
        self._apply_policy()
        with self._lock:
            self._committed.append(step)

    def _give_up(self, step: int, error: Exception) -> None:
        self._failures += 1
        self._last_failure = error
        newest = self._newest()
        logger.warning(
            "Step %d is not saved (failure %d of %d in a row before the run ends); the newest checkpoint is %s: %s",
            *(step, self._failures, self._max_failures, newest, error),
        )
        if self._failures >= self._max_failures:
            end = CheckpointError(
                f"{self._failures} saves in a row failed, which is checkpoint.max_failures; the newest checkpoint is "
                f"{newest}. The last failure: {error}"
            )
            end.__cause__ = error
            self._end = end

    def _apply_policy(self) -> None:
        """Moves the link `best` and deletes what the policy does not keep. The save stands whatever happens here."""
        try:
            known = metrics_by_step(self._store)
            # Links are a local folder's.
            if isinstance(self._store, CheckpointStore):
                self._store.mark_best(self._retention.best(known))
            delete_all(self._store, self._retention.to_delete(known))
        except (CheckpointError, OSError) as error:
            logger.warning("Old checkpoints stay until the next save: %s", error)

    def _free(self, step: int, error: Exception) -> None:
        """Deletes what the policy does not keep; from a full disk also leftovers and what this save would push out."""
        num_coming = 0
        try:
            if is_disk_full(error):
                self._store.clean()
                num_coming = int(step not in self._store.steps())
            deleted = prune(self._store, self._retention, num_coming=num_coming)
        except (CheckpointError, OSError) as problem:
            logger.warning("No room was made: %s", problem)
            return
        if deleted:
            logger.warning("Deleted to make room, by checkpoint.keep_last: step %s.", ", ".join(map(str, deleted)))

    def _newest(self) -> str:
        try:
            steps = self._store.steps()
        except (CheckpointError, OSError):
            return "not known: the folder cannot be read"
        return f"step {steps[-1]}" if steps else "none"
