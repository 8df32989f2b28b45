"""`trainwright shard`: the shards of one rank, and the collectives of a step, without devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor

from trainwright.analysis.fake_ranks import ImaginaryRun, imagine
from trainwright.backends.private_torch import TorchDispatchMode, tree_leaves
from trainwright.config import RunConfig
from trainwright.parallel.collectives import group_named
from trainwright.parallel.mesh import AXES, Mesh, local

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"

# By the first letters of the names of torch's operations, without underscores.
_KINDS: Mapping[str, str] = {
    "allgather": ALL_GATHER,
    "reducescatter": REDUCE_SCATTER,
    "allreduce": ALL_REDUCE,
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
    "sharddimalltoall": "all-to-all",
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
    """One kind of collective along one axis, with the number of calls."""

    kind: str
    axis: str
    """The mesh axis, or several: `fsdp`, `fsdp × tensor`."""
    num_ranks: int
    """The number of participating ranks."""
    count: int
    num_bytes: int
    """Of the full tensors of all calls: the outputs of gathers, the inputs of reductions."""

    @property
    def sent_bytes(self) -> float:
        """The minimum number of bytes that each rank sends, with a ring algorithm."""
        return self.num_bytes * share_sent(self.kind, self.num_ranks)


def share_sent(kind: str, num_ranks: int) -> float:
    """Returns the bytes that each rank sends in a collective, as a multiple of the full tensor."""
    others = (num_ranks - 1) / num_ranks
    if kind == ALL_REDUCE:
        return 2 * others  # a reduce-scatter, then an all-gather
    if kind == "receive":
        return 0.0
    return 1.0 if kind in ("send", "broadcast", "reduce", "gather", "scatter") else others


class CollectiveRecorder(TorchDispatchMode):
    """Records the collectives of this process in its context; `found` has their sums, the largest first."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes = axes_by_ranks(mesh)
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._bytes: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors follow
        kwargs = kwargs or {}
        if func.namespace in _NAMESPACES:
            self._record(func, args, kwargs)
        return func(*args, **kwargs)

    @property
    def found(self) -> list[Collective]:
        """The collectives so far."""
        return sort(
            Collective(kind, axis, num_ranks, count, self._bytes[kind, axis, num_ranks])
            for (kind, axis, num_ranks), count in self._counts.items()
        )

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = func.name().partition("::")[2].replace("_", "")
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
        group = _group_in([*args, *kwargs.values()])
        if kind is None or group is None:
            return  # a wait or a barrier
        ranks = frozenset(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return
        axis = self._axes.get(ranks, f"{len(ranks)} ranks")
        sizes = [_num_bytes(each) for each in (*args, *kwargs.values())]
        is_input_only = func.namespace != "c10d" and kind == ALL_GATHER
        self._counts[kind, axis, len(ranks)] += 1
        self._bytes[kind, axis, len(ranks)] += max(sizes) * (len(ranks) if is_input_only else 1)


def axes_by_ranks(mesh: Mesh) -> dict[frozenset[int], str]:
    """Returns the names of all combinations of axes, by the ranks in the group of this rank."""
    strides, stride = {}, 1
    for axis in reversed(AXES):
        strides[axis], stride = stride, stride * mesh.sizes[axis]
    long = [axis for axis in AXES if mesh.sizes[axis] > 1]
    found: dict[frozenset[int], str] = {}
    for number in range(1, len(long) + 1):
        for axes in combinations(long, number):
            members = [mesh.global_rank - sum(mesh.rank(axis) * strides[axis] for axis in axes)]
            for axis in axes:
                members = [each + step * strides[axis] for each in members for step in range(mesh.sizes[axis])]
            found[frozenset(members)] = " × ".join(axes)
    return found


def extrapolate(
    once: Iterable[Collective], more: Iterable[Collective], *, num_more: int, num_micro_batches: int
) -> list[Collective]:
    """Returns the collectives of a step of many micro-batches from those of steps of one and of `num_more`."""
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
    """Returns collectives with the most bytes first."""
    return sorted(collectives, key=lambda each: (-each.sent_bytes, -each.num_bytes, each.kind, each.axis))


def _group_in(arguments: Iterable[Any]) -> ProcessGroup | None:
    """Returns the process group in the arguments of a collective: itself, boxed, or its name as the last string."""
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


COPIED = "-"
"""The axis of a dim that is not sharded."""


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter, or several of one layout whose names differ only in numbers, which `*` replaces."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """The mesh axes that shard each dim: `fsdp`, `fsdp × tensor`, or `-` for none."""
    local_shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """Of one of them on this rank."""
    is_trained: bool
    count: int = 1


def layouts_of(model: torch.nn.Module, mesh: Mesh) -> list[ParameterLayout]:
    """Returns the layout of every parameter of this rank, in the order of the model; tied ones once."""
    return [_layout_of(name, parameter, mesh) for name, parameter in model.named_parameters()]


def grouped(layouts: Iterable[ParameterLayout]) -> list[ParameterLayout]:
    """Returns layouts with those of equal layers as one."""
    groups: dict[Any, list[ParameterLayout]] = {}
    for each in layouts:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", f".{each.name}.")[1:-1]
        key = (pattern, each.shape, each.axes, each.local_shape, each.dtype, each.is_trained)
        groups.setdefault(key, []).append(each)
    return [
        some[0] if len(some) == 1 else replace(some[0], name=pattern, count=sum(each.count for each in some))
        for (pattern, *_), some in groups.items()
    ]


def _layout_of(name: str, parameter: torch.Tensor, mesh: Mesh) -> ParameterLayout:
    splits: list[list[str]] = [[] for _ in parameter.shape]
    if isinstance(parameter, DTensor):
        for axis, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
            dim = getattr(placement, "dim", None)
            if dim is not None and parameter.device_mesh[axis].size() > 1:
                splits[dim].append(_axis_names(axis, mesh))
    own = local(parameter)
    return ParameterLayout(
        name,
        tuple(parameter.shape),
        tuple(" × ".join(axes) or COPIED for axes in splits),
        tuple(own.shape),
        str(parameter.dtype).removeprefix("torch."),
        own.numel() * own.element_size(),
        parameter.requires_grad,
    )


def _axis_names(axis: str, mesh: Mesh) -> str:
    """Returns the names of a mesh axis; that of FSDP combines fsdp and context."""
    if axis != "shard":
        return axis
    return " × ".join(each for each in ("fsdp", "context") if mesh.size(each) > 1)


@dataclass(frozen=True)
class Sharding:
    """The parameters of one rank of a run, and its communication in one step."""

    world_size: int
    rank: int
    axes: dict[str, int]
    """The axes with several ranks."""
    num_parameters: int
    """Of the whole model, all ranks together."""
    num_bytes: int
    """Of the whole model's parameters and saved buffers."""
    layouts: list[ParameterLayout]
    uncovered: list[str]
    """Parameters that no sharding rule covers; empty if there are no rules."""
    unmatched: list[str]
    """Sharding rules that match nothing."""
    micro_batch_size: int
    gradient_accumulation_steps: int
    batch_shapes: dict[str, list[int]]
    """Of one micro-batch, by name."""
    collectives: list[Collective]
    """Of one step, the most bytes first."""

    @property
    def rank_bytes(self) -> int:
        """The bytes of the parameters on this rank."""
        return sum(each.num_bytes * each.count for each in self.layouts)

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain values, for JSON."""
        collectives = [asdict(each) | {"sent_bytes": round(each.sent_bytes)} for each in self.collectives]
        return asdict(self) | {"rank_bytes": self.rank_bytes, "collectives": collectives}


def plan_shards(config: RunConfig, *, world_size: int, rank: int = 0, sequence_length: int | None = None) -> Sharding:
    """Builds a run on fake ranks, runs a step, and returns the parameters and collectives of one rank."""
    with imagine(config, world_size=world_size, rank=rank, sequence_length=sequence_length) as run:
        plan = run.whole.plan
        return Sharding(
            **run.facts(),
            num_bytes=run.whole.saved_bytes,
            layouts=layouts_of(run.trainer.model, run.mesh),
            uncovered=[] if plan is None else list(plan.uncovered),
            unmatched=[] if plan is None else list(plan.unmatched),
            collectives=record_step(run),
        )


def record_step(run: ImaginaryRun) -> list[Collective]:
    """Returns the collectives of one step, extrapolated from a few micro-batches."""
    steps = []
    for num_micro_batches in sorted({1, run.num_micro_batches}):
        recorder = CollectiveRecorder(run.mesh)
        with recorder:
            run.step(num_micro_batches)
        steps.append(recorder.found)
    if len(steps) == 1:
        return steps[0]
    return extrapolate(*steps, num_more=run.num_micro_batches, num_micro_batches=run.plan.gradient_accumulation_steps)
