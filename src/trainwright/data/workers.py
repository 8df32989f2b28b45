"""Lets a fetcher serve requests, in this process or in workers, in the order in which they are made.

    for batch, request, fetched in deliver(fetcher, requests, options, to_device): ...

A worker that dies (a crash, or the kernel out of memory) ends the run with the samples that it was reading.
What a request is, and what is fetched for it, is the fetcher's: fetch.py for data with an index, stream_loader.py
for streams, processing/process.py for rows that go through a function.
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

from trainwright.data.fetch import Fetched
from trainwright.errors import DataError
from trainwright.events.storage import forget_storages

_WORKER_GRACE_SECONDS = 30


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are fetched; none of it changes what is in them."""

    num_workers: int = 0
    arguments: Mapping[str, Any] | None = None
    """Further arguments of torch's DataLoader, used when there are workers."""


class WorkerFetcher(Protocol):
    """What serves requests in a worker."""

    def __getitems__(self, request: Any) -> Any:
        """Serves in a worker."""
        ...

    def describe(self, request: Any) -> str:
        """Says which samples a request asks for."""
        ...


class Fetcher(WorkerFetcher, Protocol):
    """What serves requests in a worker or in the run's own process."""

    def fetch(self, request: Any) -> Fetched:
        """Serves in the run's own process, whose generators must be left as they were."""
        ...


ToDevice = Callable[[Iterator[Any]], Iterator[Any]]
"""Maps an iterator of host batches to one of device batches; it may run ahead of what is asked for."""


def deliver(
    fetcher: Fetcher, requests: Iterator[Any], options: LoaderOptions, to_device: ToDevice, *, label: str
) -> Generator[tuple[Any, Any, Fetched], None, None]:
    """Yields each batch on the device, with its request and all that was fetched for it."""
    # What belongs to a batch waits here, for the device needs none of it.
    arrived: deque[tuple[Any, Fetched]] = deque()

    def host_batches() -> Iterator[Any]:
        for request, fetched in _serve(fetcher, requests, options, label=label):
            arrived.append((request, fetched))
            yield fetched.batch

    for batch in to_device(host_batches()):
        yield batch, *arrived.popleft()


def prepare_worker(_: int) -> None:
    """Lets workers outlive a signal to the whole process group until the step is finished and saved."""
    forget_storages()
    gc.enable()  # the run collects between its steps, and a worker has none
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or each worker would take every core
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Not ignored for ever: a worker that hangs in a user's code must still be possible to end.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_WORKER_GRACE_SECONDS))


def _serve(
    fetcher: Fetcher, requests: Iterator[Any], options: LoaderOptions, *, label: str
) -> Generator[tuple[Any, Fetched], None, None]:
    """Yields each request with what was fetched for it."""
    if options.num_workers > 0:
        yield from serve_in_workers(fetcher, requests, options, label=label)
        return
    for request in requests:
        yield request, fetcher.fetch(request)


def serve_in_workers(
    fetcher: WorkerFetcher,
    requests: Iterator[Any],
    options: LoaderOptions,
    *,
    label: str,
    advice: str = "Look at those samples, or lower data.num_workers or data.loader.prefetch_factor.",
    prepare: Callable[[int], None] = prepare_worker,
) -> Generator[tuple[Any, Any], None, None]:
    """Yields each request with what was fetched for it; requests are made ahead of their answers.

    `prepare` is called first in each worker, with its number; `advice` ends the error about one that died.
    """
    waiting: deque[Any] = deque()

    def noted() -> Iterator[Any]:
        for request in requests:
            waiting.append(request)
            yield request

    in_hand = RawArray("q", [-1] * options.num_workers)
    loader: DataLoader[Any] = DataLoader(
        _Numbered(fetcher, in_hand),
        batch_sampler=enumerate(noted()),  # type: ignore[arg-type]  # any iterable of requests
        collate_fn=_as_it_is,  # the fetcher has collated already
        num_workers=options.num_workers,
        worker_init_fn=prepare,
        # The loader draws a seed at its start; from a generator of its own, for the run's is not to be disturbed.
        generator=torch.Generator(),
        **dict(options.arguments or {}),
    )
    with _without_child_signals():
        answers: Any = iter(loader)
    num_answered = 0
    try:
        for fetched in answers:
            if isinstance(fetched, Exception):
                raise fetched
            yield waiting.popleft(), fetched
            num_answered += 1
    except (RuntimeError, OSError, EOFError) as error:
        explained = _explain(error, answers=answers, in_hand=list(in_hand), num_answered=num_answered)
        if explained is None:
            raise
        worker, cause = explained
        # Requests that were answered are no longer waiting; the one in hand is.
        place = -1 if worker is None else in_hand[worker] - num_answered
        reading = f", while reading {fetcher.describe(waiting[place])}" if 0 <= place < len(waiting) else ""
        raise DataError(f"{label}: {cause}{reading}. {advice}") from error
    finally:
        # torch would do it when the iterator dies, but a traceback keeps that alive until the interpreter's exit,
        # which then waits for workers that still hope to serve.
        answers._shutdown_workers()


class _Numbered(Dataset[Any]):
    """A fetcher in a worker, which notes the number of the request in hand where the run can read it."""

    def __init__(self, fetcher: WorkerFetcher, in_hand: Any) -> None:
        self._fetcher = fetcher
        self._in_hand = in_hand

    def __getitems__(self, numbered: tuple[int, Any]) -> Any:
        number, request = numbered
        worker = get_worker_info()
        assert worker is not None
        self._in_hand[worker.id] = number
        try:
            return self._fetcher.__getitems__(request)
        except Exception as error:
            return _for_travel(error, worker.id)
        finally:
            self._in_hand[worker.id] = -1


@contextmanager
def without_worker_info() -> Iterator[None]:
    """Makes torch's `get_worker_info` return None, as outside of a worker.

    A stream that deals its samples to workers by itself would leave out those of other workers. torch keeps what it
    returns in a private variable, and has no function to set it.
    """
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _as_it_is(fetched: Any) -> Any:
    return fetched


def _for_travel(error: Exception, worker: int) -> Exception:
    """Returns an error to be raised in the run's process; one that cannot go there is raised here, for torch to tell.

    torch makes a long text of every error's traceback; what a user needs of it is one line.
    """
    # An error in our words has its cause in the user's code, and the cause itself does not travel.
    cause = error.__cause__
    told = error if cause is None or cause.__traceback__ is None else cause
    *_, innermost = traceback.walk_tb(told.__traceback__)
    frame, line = innermost
    error.add_note(f"in worker {worker}, at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}")
    try:
        travelled = ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        raise error from None
    if type(travelled) is not type(error) or str(travelled) != str(error):
        raise error
    return error


@contextmanager
def _without_child_signals() -> Iterator[None]:
    """Keeps torch from raising out of a signal handler, in the midst of a step, when a worker dies.

    It asks after its workers whenever it waits for them, and there we can say what they were reading.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    if before is None or str(getattr(before, "__module__", "")).startswith("torch."):
        before = signal.SIG_DFL  # torch sets its handler once in a process, perhaps for an earlier loader
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _explain(error: Exception, *, answers: Any, in_hand: list[int], num_answered: int) -> tuple[int | None, str] | None:
    """Returns the worker that died or hangs, and what happened to it; None for any other error."""
    if str(error).startswith("DataLoader timed out"):
        slowest = in_hand.index(num_answered) if num_answered in in_hand else None
        return slowest, f"no batch came within data.loader.timeout ({error})"
    # A worker that leaves in the midst of an answer is met as a broken connection.
    is_connection = isinstance(error, (ConnectionError, EOFError))
    if not is_connection and not str(error).startswith("DataLoader worker"):
        return None
    for each in answers._workers:
        each.join(1.0 if is_connection else 0.0)
    dead = [number for number, each in enumerate(answers._workers) if not each.is_alive()]
    if not dead:
        return None
    code = answers._workers[dead[0]].exitcode
    cause = f"ended with exit code {code}"
    if code is not None and code < 0:
        cause = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            cause += ", which is what the kernel does when memory runs out"
    return dead[0], f"worker {dead[0]} {cause}"
