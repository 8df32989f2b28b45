"""Writes checkpoints in a background thread: one at a time, with retries; the loop is notified of failures.

```
save:    wait for the previous save → copy the state (snapshot.py) → pass it to the thread → return
thread:  wait for the copy → write → commit (store.py) → links and deletions by policy (retention.py) → report
failed:  warn → delete by policy → wait → write again, three times in all → give up this save
```
The loop calls `check` and `take_committed` at each step; both read the thread's results and never wait. If several
ranks write (together.py), each has a saver: rank 0's retries, deletes and counts failures, and the others follow it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.checkpoint.remote_store import AnyStore
from trainwright.checkpoint.retention import Retention, delete_all, metrics_by_step, prune
from trainwright.checkpoint.snapshot import HostBuffers, HostSnapshot, encode_parts
from trainwright.checkpoint.store import is_disk_full
from trainwright.checkpoint.together import Together
from trainwright.errors import CheckpointError

logger = logging.getLogger(__name__)

ATTEMPTS = 3
REPORTED_WAIT_SECONDS = 1.0


def default_backoff(attempt: int) -> float:
    """Returns the seconds to wait after a failed attempt: 1 after the first, 4 after the second."""
    return 4.0 ** (attempt - 1)


@dataclass
class _Job:
    """One pending save; `is_taken` when the thread has started it."""

    step: int
    snapshot: HostSnapshot
    metrics: dict[str, float]
    is_taken: bool = False


class BackgroundSaver:
    """Writes checkpoints in a background thread, one at a time, with retries.

    Without `asynchronous` it writes before `save` returns, without a copy of the state, with the same retries.
    """

    def __init__(
        self,
        store: AnyStore,
        *,
        retention: Retention,
        asynchronous: bool = True,
        max_failures: int = 3,
        backoff: Callable[[int], float] = default_backoff,
        together: Together | None = None,
    ) -> None:
        """`together` connects the ranks that write each checkpoint; None: this process writes alone."""
        self._store = store
        self._together = together
        if together is not None:
            together.is_closing = False
        self._retention = retention
        self._asynchronous = asynchronous
        self._max_failures = max_failures
        self._backoff = backoff
        self._buffers = HostBuffers()
        # The lock guards the attributes below and is never held while writing.
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
        """Starts a save after the previous one has ended; the state may change as soon as this returns.

        `parts` may already be encoded, in which case this rank writes them unchanged. Raises for a state that cannot be
        saved; failed writes are raised by `check` and `wait`.
        """
        if self._is_closed:
            raise CheckpointError(f"The saver is closed; step {step} was not saved. Create another one.")
        start = time.monotonic()
        self.wait()
        if (waited := time.monotonic() - start) > REPORTED_WAIT_SECONDS:
            logger.info(
                "Step %d waited %.1f s for the previous save. Save less often, or to a faster disk.", step, waited
            )
        self.check()
        if not self._asynchronous:
            self._write(step, parts if isinstance(parts, HostSnapshot) else encode_parts(parts), dict(metrics))
            return
        snapshot = self._buffers.copy_to_host(parts, overlaps=True)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="save checkpoints", daemon=True)
            self._thread.start()
        # A single assignment, so Ctrl-C arrives before or after it; `wait` wakes the thread again.
        with self._lock:
            self._job = _Job(step, snapshot, dict(metrics))
            self._changed.notify_all()

    def take_committed(self) -> list[int]:
        """Returns the steps that were committed since the last call, after their deletions; never waits."""
        if not self._committed:
            return []
        with self._lock:
            steps, self._committed = self._committed, []
        return steps

    def check(self) -> None:
        """Raises the error that ended saving: too many failures in a row, or an unexpected error. Never waits."""
        if self._end is not None:
            raise self._end

    def wait(self, *, must_succeed: bool = False) -> None:
        """Waits until no save is pending. With `must_succeed`, raises if the last save failed."""
        with self._lock:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._job is None)
        if must_succeed:
            self.check()
            if self._last_failure is not None:
                raise self._last_failure

    def close(self) -> None:
        """Waits for a pending save and ends the thread; does not raise its failure."""
        if self._together is not None:
            self._together.is_closing = True
        try:
            self.wait()
        finally:
            # Also after Ctrl-C: the thread ends after its save and, as a daemon, does not delay the exit.
            with self._lock:
                self._is_closed = True
                self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._take_job()) is not None:
            try:
                job.snapshot.wait()
                self._write(job.step, job.snapshot, job.metrics)
            except BaseException as error:
                problem = f"Saving step {job.step} raised an unexpected error: {error!r}"
                self._end_with(f"{problem}. The newest checkpoint is {self._newest()}.", error)
            finally:
                with self._lock:
                    self._job = None
                    self._changed.notify_all()

    def _take_job(self) -> _Job | None:
        """Waits for a save, or for `close` (None). Only one of two threads receives a save."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_closed or (self._job is not None and not self._job.is_taken))
            job = self._job
            if job is None or job.is_taken:
                return None
            job.is_taken = True
            return job

    def _write(self, step: int, snapshot: HostSnapshot, metrics: dict[str, float]) -> None:
        """Writes, alone or with the other ranks; records success or failure, and raises unexpected errors."""
        self._last_failure = None
        together = self._together
        if together is None:
            self._write_with_retries(step, snapshot, metrics)
            return
        with together.saving():
            if not together.is_leader:
                # After a failure, rank 0 decides for all ranks whether saving continues.
                try:
                    together.write_on_request(self._store, snapshot)
                except (CheckpointError, OSError) as error:
                    self._last_failure = error
                    logger.warning("Step %d is not saved, as far as this rank knows: %s", step, error)
                return
            try:
                self._write_with_retries(step, snapshot, metrics)
            except BaseException as error:
                together.announce_failure(f"Saving step {step} raised an unexpected error on rank 0: {error!r}")
                raise
            if self._last_failure is None:
                together.announce_commit()
            else:
                together.announce_failure(str(self._last_failure))

    def _write_with_retries(self, step: int, snapshot: HostSnapshot, metrics: dict[str, float]) -> None:
        together = self._together
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._store.write_snapshot(step, snapshot, metrics=metrics, others=together)
            except (CheckpointError, OSError) as error:
                # After the end of the run, lost ranks are not waited for again.
                if attempt == ATTEMPTS or (together is not None and together.is_closing):
                    self._give_up(step, error)
                    return
                seconds = self._backoff(attempt)
                logger.warning(
                    "Saving step %d failed, retrying in %g s (attempt %d of %d): %s",
                    step,
                    seconds,
                    attempt,
                    ATTEMPTS,
                    error,
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
            problem = f"{self._failures} saves in a row failed, which is checkpoint.max_failures"
            self._end_with(f"{problem}; the newest checkpoint is {newest}. The last failure: {error}", error)

    def _end_with(self, message: str, cause: BaseException) -> None:
        self._end = CheckpointError(message)
        self._end.__cause__ = cause

    def _apply_policy(self) -> None:
        """Moves the link `best` and deletes checkpoints that the policy does not keep; a failure does not affect the
        save."""
        try:
            known = metrics_by_step(self._store)
            self._store.mark_best(self._retention.best(known))
            delete_all(self._store, self._retention.to_delete(known))
        except (CheckpointError, OSError) as error:
            logger.warning("Old checkpoints are kept until the next save: %s", error)

    def _free(self, step: int, error: Exception) -> None:
        """Deletes checkpoints that the policy does not keep; on a full disk, also leftovers and the checkpoint that
        this save would replace."""
        num_coming = 0
        try:
            if is_disk_full(error):
                self._store.clean()
                num_coming = int(step not in self._store.steps())
            deleted = prune(self._store, self._retention, num_coming=num_coming)
        except (CheckpointError, OSError) as problem:
            logger.warning("No space was freed: %s", problem)
            return
        if deleted:
            logger.warning("Deleted to free space, by checkpoint.keep_last: step %s.", ", ".join(map(str, deleted)))

    def _newest(self) -> str:
        try:
            steps = self._store.steps()
        except (CheckpointError, OSError):
            return "not known, because the folder cannot be read"
        return f"step {steps[-1]}" if steps else "none"
