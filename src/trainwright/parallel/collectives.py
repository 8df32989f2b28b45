"""Communication between the ranks of a run outside of gradients: collectives, and notes in the rendezvous store.

Notes need no collective, so a rank can read what a stuck or failed rank has written.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainwright.errors import CheckpointError
from trainwright.parallel.mesh import ALONE, Mesh

T = TypeVar("T")


class Ranks:
    """This process's rank in the run, and the communication between ranks."""

    def __init__(self, rank: int = 0, size: int = 1, *, control: Any = None, mesh: Mesh | None = None) -> None:
        self.rank = rank
        self.size = size
        self.mesh = mesh or Mesh({**ALONE, "replicate": size}, rank)
        self.is_alone = False
        """True after `go_alone`."""
        self._control = control
        self._votes: tuple[torch.Tensor, Any] | None = None

    @property
    def is_first(self) -> bool:
        """True for the rank that writes files and logs to the terminal."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def gather_samples(self, value: T) -> list[T]:
        """Returns the values of the ranks whose loss counts, in the order of their samples, on every rank."""
        if not self.mesh.is_split:
            return self.gather(value)
        return [each for each, is_loss_rank in self.gather((value, self.mesh.is_loss_rank)) if is_loss_rank]

    def broadcast(self, value: T) -> T:
        """Returns rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raises an exception of one rank on every rank; the code inside must not communicate.

        Otherwise, the other ranks would wait for the failed one in their next collective.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        reports = self.gather(None if failure is None else (isinstance(failure, CheckpointError), str(failure)))
        if failure is not None:
            raise failure
        for rank, report in enumerate(reports):
            if report is not None:
                raise (CheckpointError if report[0] else RuntimeError)(f"Rank {rank}: {report[1]}")

    def copy_from_first_(self, tensor: torch.Tensor) -> None:
        """Copies rank 0's values into a tensor in host memory on every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0, group=self._control)

    def barrier(self) -> None:
        """Waits until every rank has called it."""
        if self.size > 1:
            dist.barrier(group=self._control)

    def sum_counts(self, *counts: int) -> tuple[int, ...]:
        """Returns each count summed over all ranks; communicates between hosts and does not synchronize the device."""
        if self.size == 1:
            return counts
        tensor = torch.tensor(counts)
        dist.all_reduce(tensor, group=self._control)
        return tuple(tensor.tolist())

    def sum_sample_counts(self, *counts: int) -> tuple[int, ...]:
        """Returns counts of samples summed over all ranks; ranks that share samples count once."""
        return self.sum_counts(*(counts if self.mesh.is_loss_rank else (0,) * len(counts)))

    def sum_over_samples(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values on the device summed over all ranks; ranks that share samples count once. Collective."""
        if self.size == 1:
            return values
        total = values.clone() if self.mesh.is_loss_rank else torch.zeros_like(values)
        dist.all_reduce(total, group=self.mesh.all_ranks)
        return total

    def highest_votes(self, *votes: int) -> tuple[int, ...]:
        """Returns the maximum over ranks of each vote of the previous call, and starts to reduce this call's votes.

        Called once per step with this rank's requests. The result is one step old, so no step waits for it. It is the
        same on every rank, so all act on it at the same step. A single process gets its own votes.
        """
        if self.size == 1:
            return votes
        answer = (0,) * len(votes)
        if self._votes is not None:
            ballot, work = self._votes
            work.wait()
            answer = tuple(ballot.tolist())  # a CPU tensor: no device synchronization
        ballot = torch.tensor(votes)
        self._votes = (ballot, dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self._control, async_op=True))
        return answer

    def raise_flag(self, name: str) -> None:
        """Sets a flag for all ranks in the store of the process group; not collective, does not wait."""
        if self.size > 1:
            default_store().set(f"trainwright/{name}", "1")

    def is_raised(self, *names: str) -> bool:
        """Returns True if all of these flags are set by any rank; not collective, one request to the store."""
        keys = [f"trainwright/{name}" for name in names]
        return self.size > 1 and bool(default_store().check(keys))

    def go_alone(self) -> None:
        """Stops communication, because the other ranks are in a collective that this rank cannot join; they fail when
        it exits.

        Every method is the identity from then on, so that the run can be closed.
        """
        self.is_alone = True
        self.size = 1
        self._votes = None

    def part(self) -> None:
        """Waits for every rank and releases the control group.

        A rank that exits early would close the others' connections. A group that is still referenced when the
        interpreter exits may abort the process, because its threads are joined only when it is released.
        """
        self.settle_votes()
        self.barrier()
        self._control = None

    def settle_votes(self) -> None:
        """Waits for pending votes, so that the control group is free for other collectives."""
        if self._votes is not None:
            self._votes[1].wait()
            self._votes = None


ANSWER_SECONDS = 5.0
"""Timeout of one request to the store."""
_POLL_SECONDS = 0.1


class NotesUnreachable(Exception):  # noqa: N818 # expected, not an error
    """The store did not answer: its process is stopped or dead, or the network is down."""


class Notes:
    """Short texts by name, which every rank of the run can write and read at any time.

    `topic` separates the notes of different uses; all ranks must use the same. `store` replaces the store of the
    process group.
    """

    def __init__(self, topic: str, *, store: Any = None, answer_seconds: float = ANSWER_SECONDS) -> None:
        found: Any = default_store() if store is None else store
        # A separate connection, because the training thread may wait for a key on the first one and hold its lock.
        self._store: Any = distributed_c10d.PrefixStore(f"trainwright/{topic}", found.clone())
        self._answer_seconds = answer_seconds
        self._requests: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        # Reading from the socket of a stopped process has no timeout, so a thread reads, and the caller times out.
        threading.Thread(target=self._serve, name="trainwright-notes", daemon=True).start()

    def write(self, name: str, text: str) -> None:
        """Writes a note, replacing an earlier one of that name; it is readable when this returns."""

        def write() -> None:
            self._store.set(name, text)
            self._store.check([name])  # `set` is not acknowledged, but a later request on the same connection is

        self._call(write)

    def write_first(self, name: str, text: str) -> str:
        """Writes a note unless one of that name exists; returns the existing one."""
        return text_of(self._call(lambda: self._store.compare_set(name, "", text)))

    def read(self, name: str) -> str | None:
        """Returns a note, or None if it does not exist; does not wait for it."""
        answer: str | None = self._call(lambda: text_of(self._store.get(name)) if self._store.check([name]) else None)
        return answer

    def wait_for(self, *names: str, seconds: float) -> dict[str, str]:
        """Returns the notes that exist when all exist, after `seconds`, or when the store is unreachable."""
        found: dict[str, str] = {}
        until = monotonic() + seconds
        while True:
            try:
                for name in names:
                    text = None if name in found else self.read(name)
                    if text is not None:
                        found[name] = text
            except NotesUnreachable:
                return found
            if len(found) == len(names) or monotonic() > until:
                return found
            sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Ends the thread."""
        self._requests.put(None)

    def _call(self, call: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._requests.put((future, call))
        try:
            return future.result(self._answer_seconds)
        except TimeoutError as error:
            future.cancel()
            raise NotesUnreachable(f"no answer within {self._answer_seconds:g} s") from error
        except Exception as error:  # a closed connection is a RuntimeError, a timeout a DistStoreError, …
            raise NotesUnreachable(str(error)) from error

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            future, call = request
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)


def default_store() -> Any:
    """Returns the store of the open process group; torch has no public access to it."""
    return distributed_c10d._get_default_store()


def group_named(name: str) -> Any:
    """Returns the process group that torch's functional collectives refer to by this name; not public in torch."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, attr-defined]


def first_rank_keeps_notes() -> bool:
    """Returns True if rank 0's process has the store; under torchrun, the launcher has it, and the store outlives the
    ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def num_collectives_begun() -> int | None:
    """Returns the number of collectives of all ranks that this rank has started; None if torch does not count them.

    All ranks start the same collectives in the same order, so a rank with a lower number is behind.
    """
    try:
        groups: list[Any] = list(distributed_c10d._world.pg_map)
        world = dist.get_world_size()
        return sum(int(group._get_sequence_number_for_group()) for group in groups if group.size() == world)
    except Exception:  # private and not supported by every backend; the report is useful without it
        return None


def collective_log() -> str | None:
    """Returns torch's flight recorder as JSON text, the newest collective last; None if it recorded nothing."""
    internals: Any = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # the latter for all backends but NCCL
        try:
            dumped = json.loads(text_of(getattr(internals, name)()))
        except Exception:  # private, absent without that backend, and recording may be off
            continue
        if dumped.get("entries"):
            return json.dumps(dumped, indent=1)
    return None


def text_of(answer: str | bytes) -> str:
    """Returns a value of the store as text."""
    return answer.decode("utf-8") if isinstance(answer, bytes) else answer
