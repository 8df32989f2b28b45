"""Records what ranks say to each other while something runs: which collective, along which axis, how many bytes.

It sees torch's own operations, whoever calls them (FSDP, DTensor, pipelining, the loop), on real or imaginary ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor

from trainwright.backends.private_torch import TorchDispatchMode, tree_leaves
from trainwright.parallel.mesh import AXES, Mesh
from trainwright.parallel.notes import group_named

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"

# By the names of torch's operations, in c10d and in its functional form.
_KINDS: Mapping[str, str] = {
    "all_gather": ALL_GATHER,
    "allgather": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "all_reduce": ALL_REDUCE,
    "allreduce": ALL_REDUCE,
    "broadcast": "broadcast",
    "all_to_all": "all-to-all",
    "alltoall": "all-to-all",
    "shard_dim_alltoall": "all-to-all",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
}
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


@dataclass(frozen=True)
class Collective:
    """One kind of collective along one axis, as often as it was called."""

    kind: str
    axis: str
    """The mesh axis, or several: `data`, `data × tensor`."""
    num_ranks: int
    """How many ranks take part."""
    count: int
    num_bytes: int
    """Of the whole tensors, all calls together: what a gather ends with, what a reduction begins with."""

    @property
    def sent_bytes(self) -> float:
        """What each rank sends at least, by the best known algorithms: a ring's."""
        return self.num_bytes * share_sent(self.kind, self.num_ranks)


def share_sent(kind: str, num_ranks: int) -> float:
    """Returns which multiple of the whole tensor each rank sends in a collective."""
    others = (num_ranks - 1) / num_ranks
    if kind == ALL_REDUCE:
        return 2 * others  # a reduce-scatter, then an all-gather
    if kind == "receive":
        return 0.0
    return 1.0 if kind in ("send", "broadcast", "reduce", "gather", "scatter") else others


class CollectiveRecorder(TorchDispatchMode):
    """Within it every collective of this process is noted; `found` sums them up, the largest first."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes = axes_by_ranks(mesh)
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._bytes: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations follow, on local tensors
        kwargs = kwargs or {}
        if func.namespace in _NAMESPACES:
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    @property
    def found(self) -> list[Collective]:
        """What was said so far."""
        return sort(
            Collective(kind, axis, num_ranks, count, self._bytes[kind, axis, num_ranks])
            for (kind, axis, num_ranks), count in self._counts.items()
        )

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = func.name().partition("::")[2].partition(".")[0].strip("_")
        kind = next((_KINDS[start] for start in sorted(_KINDS, key=len, reverse=True) if name.startswith(start)), None)
        group = _group_in([*args, *kwargs.values()])
        if kind is None or group is None:
            return  # waiting, or a barrier
        ranks = frozenset(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return
        axis = self._axes.get(ranks, f"{len(ranks)} ranks")
        sizes = [_num_bytes(each) for each in (*args, *kwargs.values())]
        is_input_only = func.namespace != "c10d" and kind == ALL_GATHER
        self._counts[kind, axis, len(ranks)] += 1
        self._bytes[kind, axis, len(ranks)] += max(sizes) * (len(ranks) if is_input_only else 1)


def axes_by_ranks(mesh: Mesh) -> dict[frozenset[int], str]:
    """Returns, for each axis and several together, the ranks along it that this rank belongs to → its name."""
    strides, stride = {}, 1
    for axis in reversed(AXES):
        strides[axis], stride = stride, stride * mesh.sizes[axis]
    long = [axis for axis in AXES if mesh.sizes[axis] > 1]
    found: dict[frozenset[int], str] = {}
    for number in range(1, len(long) + 1):
        for axes in combinations(long, number):
            members = [mesh.place - sum(mesh.rank(axis) * strides[axis] for axis in axes)]
            for axis in axes:
                members = [each + step * strides[axis] for each in members for step in range(mesh.sizes[axis])]
            found[frozenset(members)] = " × ".join(axes)
    return found


def extrapolate(
    once: Iterable[Collective], more: Iterable[Collective], *, num_more: int, num_micro_batches: int
) -> list[Collective]:
    """Returns the collectives of a step of many micro-batches from those of a step of one and of `num_more`."""
    first = {(each.kind, each.axis, each.num_ranks): each for each in once}
    further = {(each.kind, each.axis, each.num_ranks): each for each in more}
    found = []
    for key in first.keys() | further.keys():
        nothing = Collective(*key, 0, 0)
        one, several = first.get(key, nothing), further.get(key, nothing)
        share = (num_micro_batches - 1) / (num_more - 1)
        count = one.count + round(share * (several.count - one.count))
        found.append(Collective(*key, count, one.num_bytes + round(share * (several.num_bytes - one.num_bytes))))
    return sort(each for each in found if each.count > 0)


def sort(collectives: Iterable[Collective]) -> list[Collective]:
    """Returns them with the most bytes first."""
    return sorted(collectives, key=lambda each: (-each.sent_bytes, -each.num_bytes, each.kind, each.axis))


def _group_in(arguments: Iterable[Any]) -> ProcessGroup | None:
    """Finds the process group among a collective's arguments: itself, boxed, or its name as the last text."""
    name = None
    for each in arguments:
        if isinstance(each, ProcessGroup):
            return each
        if isinstance(each, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(each)
            except RuntimeError:
                continue  # the reduction's operation is boxed too
        if isinstance(each, str):
            name = each
    return None if name is None else group_named(name)


def _num_bytes(argument: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(argument) if isinstance(each, torch.Tensor))
