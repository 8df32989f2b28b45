"""Communication between the ranks of a run outside of gradients: collectives, and notes in the rendezvous store.

Notes need no collective, so a rank can read what a stuck or failed one left behind.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainwright.parallel.mesh import ALONE, Mesh

T = TypeVar("T")


class Ranks:
    """This process's place among the processes of the run, and the verbs between them."""

    def __init__(self, rank: int = 0, size: int = 1, *, control: Any = None, mesh: Mesh | None = None) -> None:
        self.rank = rank
        self.size = size
        self.mesh = mesh or Mesh({**ALONE, "replicate": size}, rank)
        self.is_alone = False
        """Has this rank given the others up? See `go_alone`."""
        self._control = control
        self._votes: tuple[torch.Tensor, Any] | None = None

    @property
    def is_first(self) -> bool:
        """Is this the rank that writes files and logs to the terminal?"""
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
        """Returns the first rank's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def copy_from_first_(self, tensor: torch.Tensor) -> None:
        """Gives every rank the first rank's values of a tensor in main memory, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0, group=self._control)

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self._control)

    def sum_counts(self, *counts: int) -> tuple[int, ...]:
        """Returns each count summed over all ranks; a message between hosts, no device is waited for."""
        if self.size == 1:
            return counts
        tensor = torch.tensor(counts)
        dist.all_reduce(tensor, group=self._control)
        return tuple(tensor.tolist())

    def sum_sample_counts(self, *counts: int) -> tuple[int, ...]:
        """Returns counts of samples summed over all ranks, those of ranks that share samples once."""
        return self.sum_counts(*(counts if self.mesh.is_loss_rank else (0,) * len(counts)))

    def highest_votes(self, *votes: int) -> tuple[int, ...]:
        """Returns the highest of each vote that any rank cast at the call before; this call's votes are under way.

        Called once per step with this rank's requests. The answer is a step old, so no step waits for it, and it is
        the same on every rank, so all act on it at the same step. One process gets its own votes back.
        """
        if self.size == 1:
            return votes
        answer = (0,) * len(votes)
        if self._votes is not None:
            ballot, work = self._votes
            work.wait()
            answer = tuple(ballot.tolist())  # a CPU tensor: no device is waited for
        ballot = torch.tensor(votes)
        self._votes = (ballot, dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self._control, async_op=True))
        return answer

    def raise_flag(self, name: str) -> None:
        """Lets every rank see a flag, by a note in the store of the process group: not collective, nobody waits."""
        if self.size > 1:
            default_store().set(f"trainwright/{name}", "1")

    def is_raised(self, *names: str) -> bool:
        """Has any rank raised this flag, or each of several? Not collective; costs a message to the store."""
        keys = [f"trainwright/{name}" for name in names]
        return self.size > 1 and bool(default_store().check(keys))

    def go_alone(self) -> None:
        """Waits for nobody from now on: the others are where this rank cannot join them, and will fail when it is gone.

        Every verb is the identity then, so that what is still to be closed can be closed.
        """
        self.is_alone = True
        self.size = 1
        self._votes = None

    def part(self) -> None:
        """Says good-bye: waits until every rank is here, and forgets the control group.

        A rank that leaves first would take the others' connections with it, and a group that is still referred to
        when the interpreter ends may abort the process, for its threads are joined only when it is forgotten.
        """
        self.settle_votes()
        self.barrier()
        self._control = None

    def settle_votes(self) -> None:
        """Waits for the votes that are under way, so that the control group is free for other verbs."""
        if self._votes is not None:
            self._votes[1].wait()
            self._votes = None


ANSWER_SECONDS = 5.0
"""How long the store may take for one request."""
_POLL_SECONDS = 0.1


class NotesUnreachable(Exception):  # noqa: N818 # a finding, not an error of ours
    """The store did not answer: whoever keeps it is stopped, dead or cut off."""


class Notes:
    """Short texts by name, which every rank of the run can write and read at any time.

    `topic` keeps the notes of one purpose apart; all ranks must use the same. `store` stands in for the process
    group's own.
    """

    def __init__(self, topic: str, *, store: Any = None, answer_seconds: float = ANSWER_SECONDS) -> None:
        found: Any = default_store() if store is None else store
        # A connection of its own: the training thread may wait for a key on the first one, holding its lock.
        self._store: Any = distributed_c10d.PrefixStore(f"trainwright/{topic}", found.clone())
        self._answer_seconds = answer_seconds
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        # A read from a stopped peer's socket has no timeout, so a thread of its own asks, and the caller gives up.
        threading.Thread(target=self._serve, name="trainwright-notes", daemon=True).start()

    def write(self, name: str, text: str) -> None:
        """Leaves a note, over an earlier one of that name; it is there when this returns."""

        def write() -> None:
            self._store.set(name, text)
            self._store.check([name])  # setting is not answered; what is asked after it on the same line is

        self._ask(write)

    def write_first(self, name: str, text: str) -> str:
        """Leaves a note unless another rank has left one of that name; returns the one that stands."""
        return text_of(self._ask(lambda: self._store.compare_set(name, "", text)))

    def read(self, name: str) -> str | None:
        """Returns a note, or None if nobody has left it; does not wait for it."""
        answer: str | None = self._ask(lambda: text_of(self._store.get(name)) if self._store.check([name]) else None)
        return answer

    def wait_for(self, *names: str, seconds: float) -> dict[str, str]:
        """Returns those of the notes that are there when all are, the time is over, or the store is gone."""
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

    def _ask(self, act: Callable[[], Any]) -> Any:
        request = _Request(act)
        self._requests.put(request)
        if not request.done.wait(self._answer_seconds):
            request.is_wanted = False
            raise NotesUnreachable(f"no answer within {self._answer_seconds:g} s")
        if request.error is not None:
            raise NotesUnreachable(str(request.error)) from request.error
        return request.answer

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            if request.is_wanted:
                request.run()


class _Request:
    """One call to the store, and what came of it."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self.is_wanted = True
        self.done = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.answer = self._act()
        except Exception as error:  # a closed connection is a RuntimeError, a timeout a DistStoreError, …
            self.error = error
        self.done.set()


def default_store() -> Any:
    """Returns the store of the open process group, whoever opened it; torch has no public access to it."""
    return distributed_c10d._get_default_store()


def group_named(name: str) -> Any:
    """Returns the process group that torch's functional collectives call by this name; no public function does."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, attr-defined]


def first_rank_keeps_notes() -> bool:
    """Is the store in the first rank's process? Under torchrun it is in the launcher's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def num_collectives_begun() -> int | None:
    """Returns how many collectives of all ranks this rank has begun; None where torch does not count them.

    All ranks begin the same ones in the same order, so one with a lower number is behind.
    """
    try:
        groups: list[Any] = list(distributed_c10d._world.pg_map)
        world = dist.get_world_size()
        return sum(int(group._get_sequence_number_for_group()) for group in groups if group.size() == world)
    except Exception:  # private, and not every backend counts: a report without it is still a report
        return None


def collective_log() -> str | None:
    """Returns torch's flight recorder as JSON text, the newest collective last; None where it recorded nothing."""
    # NCCL records on its own; what other backends record is kept apart from that.
    internals: Any = torch._C._distributed_c10d
    recorders: list[Any] = [
        getattr(internals, "_dump_nccl_trace_json", None),
        getattr(internals, "_dump_fr_trace_json", None),
    ]
    for dump in recorders:
        try:
            dumped = json.loads(text_of(dump()))
        except Exception:  # private, absent without that backend, and recording may be off
            continue
        if dumped.get("entries"):
            return json.dumps(dumped, indent=1)
    return None


def text_of(answer: str | bytes) -> str:
    """Returns an answer of the store as text."""
    return answer.decode("utf-8") if isinstance(answer, bytes) else answer
