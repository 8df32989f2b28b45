"""Fetches batches in worker processes, in the order of the requests.

If a worker dies (a crash, or out of memory), the error names the samples that it was reading. The fetcher defines the
requests: fetch.py for data with an index, streams.py for streams, process.py for rows that a function processes.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawArray
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from trainwright.errors import WorkerLostError
from trainwright.events.storage import forget_storages

_WORKER_GRACE_SECONDS = 30


@dataclass(frozen=True)
class LoaderOptions:
    """Settings for fetching batches, which do not affect their content."""

    num_workers: int = 0
    arguments: Mapping[str, Any] | None = None
    """Further arguments of torch's DataLoader, used with workers."""


class WorkerFetcher(Protocol):
    """Fetches in a worker."""

    def __getitems__(self, request: Any) -> Any:
        """Returns the result for a request."""
        ...

    def describe(self, request: Any) -> str:
        """Names the samples of a request."""
        ...


def prepare_worker(_: int) -> None:
    """Lets workers survive a signal to the process group until the step is finished and saved."""
    forget_storages()
    gc.enable()  # the run collects garbage between its steps, which a worker does not have
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # otherwise, each worker would use every core
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Delayed and not ignored, because a worker that hangs in user code must still end.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_WORKER_GRACE_SECONDS))


def serve_in_workers(
    fetcher: WorkerFetcher,
    requests: Iterator[Any],
    options: LoaderOptions,
    *,
    label: str,
    advice: str = "Check those samples, or lower data.num_workers or data.loader.prefetch_factor.",
    prepare: Callable[[int], None] = prepare_worker,
) -> Generator[tuple[Any, Any], None, None]:
    """Yields each request with its result; requests are sent ahead of the results.

    `prepare` is called first in each worker, with its number; `advice` ends the error about a worker that died.
    """
    waiting: deque[Any] = deque()

    def recorded() -> Iterator[Any]:
        for request in requests:
            waiting.append(request)
            yield request

    current = RawArray("q", [-1] * options.num_workers)
    loader: DataLoader[Any] = DataLoader(
        _NumberedRequests(fetcher, current),
        batch_sampler=enumerate(recorded()),  # type: ignore[arg-type]  # any iterable of requests
        collate_fn=_identity,  # the fetcher has already collated
        num_workers=options.num_workers,
        worker_init_fn=prepare,
        # The loader draws a seed when it starts; a separate generator keeps the run's unchanged.
        generator=torch.Generator(),
        **dict(options.arguments or {}),
    )
    with _without_child_signals():
        results: Any = iter(loader)
    num_results = 0
    try:
        for fetched in results:
            if isinstance(fetched, Exception):
                raise fetched
            yield waiting.popleft(), fetched
            num_results += 1
    except (RuntimeError, OSError, EOFError) as error:
        explained = _explain(error, results=results, current=list(current), num_results=num_results)
        if explained is None:
            raise
        worker, cause = explained
        # Removes the requests with a result; the worker's current request remains.
        number = -1 if worker is None else current[worker] - num_results
        reading = f", while reading {fetcher.describe(waiting[number])}" if 0 <= number < len(waiting) else ""
        raise WorkerLostError(f"{label}: {cause}{reading}. {advice}") from error
    finally:
        # torch does this when the iterator is deleted, but a traceback keeps it alive until the interpreter's exit,
        # which then waits for the workers.
        results._shutdown_workers()


class _NumberedRequests(Dataset[Any]):
    """A fetcher in a worker, which records the number of the current request in shared memory."""

    def __init__(self, fetcher: WorkerFetcher, current: Any) -> None:
        self._fetcher = fetcher
        self._current = current

    def __getitems__(self, numbered: tuple[int, Any]) -> Any:
        number, request = numbered
        worker = get_worker_info()
        assert worker is not None
        self._current[worker.id] = number
        try:
            return self._fetcher.__getitems__(request)
        except Exception as error:
            return _prepare_error(error, worker.id)
        finally:
            self._current[worker.id] = -1


@contextmanager
def without_worker_info() -> Iterator[None]:
    """Makes torch's `get_worker_info` return None, as outside a worker.

    A stream that distributes its samples over torch's workers itself would omit those of other workers. torch keeps
    the value in a private variable and has no function to set it.
    """
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _identity(fetched: Any) -> Any:
    return fetched


def _prepare_error(error: Exception, worker: int) -> Exception:
    """Returns an error that is raised again in the run's process; raises one that cannot be pickled, for torch.

    torch converts the traceback of an error to a long text, of which one line is sufficient for a user.
    """
    # An error of this package is caused by an error in user code, and the cause is not pickled.
    cause = error.__cause__
    origin = error if cause is None or cause.__traceback__ is None else cause
    *_, (frame, line) = traceback.walk_tb(origin.__traceback__)
    error.add_note(f"in worker {worker}, at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}")
    try:
        copied = ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        raise error from None
    if type(copied) is not type(error) or str(copied) != str(error):
        raise error
    return error


@contextmanager
def _without_child_signals() -> Iterator[None]:
    """Prevents torch from raising in a signal handler, in the middle of a step, when a worker dies.

    torch also checks its workers whenever it waits for them; there the error can name what they were reading.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    if before is None or str(getattr(before, "__module__", "")).startswith("torch."):
        before = signal.SIG_DFL  # torch installs its handler once per process, perhaps for an earlier loader
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _explain(error: Exception, *, results: Any, current: list[int], num_results: int) -> tuple[int | None, str] | None:
    """Returns the worker that died or hangs, and what happened to it; None for any other error."""
    if str(error).startswith("DataLoader timed out"):
        slowest = current.index(num_results) if num_results in current else None
        return slowest, f"no batch arrived within data.loader.timeout ({error})"
    # A worker that exits while it sends a result causes a connection error.
    is_connection = isinstance(error, (ConnectionError, EOFError))
    if not is_connection and not str(error).startswith("DataLoader worker"):
        return None
    for each in results._workers:
        each.join(1.0 if is_connection else 0.0)
    dead = [number for number, each in enumerate(results._workers) if not each.is_alive()]
    if not dead:
        return None
    code = results._workers[dead[0]].exitcode
    cause = f"ended with exit code {code}"
    if code is not None and code < 0:
        cause = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            cause += ", which is what the kernel does when memory runs out"
    return dead[0], f"worker {dead[0]} {cause}"
