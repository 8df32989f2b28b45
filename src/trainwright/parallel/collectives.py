"""What the ranks of a run say to each other, outside of gradients.

With one process every verb is the identity and costs nothing, so callers never ask how many there are.
All but flags are collective: every rank must call the same ones in the same order.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainwright.parallel.mesh import ALONE, Mesh
from trainwright.parallel.notes import default_store

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
        """Is this the rank that writes files and speaks to the terminal?"""
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
        return [each for each, speaks in self.gather((value, self.mesh.speaks)) if speaks]

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
        return self.sum_counts(*(counts if self.mesh.speaks else (0,) * len(counts)))

    def highest_votes(self, *votes: int) -> tuple[int, ...]:
        """Returns the highest of each vote that any rank cast at the call before; this call's votes are under way.

        Called once per step with this rank's wishes. The answer is a step old, so no step waits for it, and it is
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
