"""How the ranks of a run are laid out along axes, and who shares what with whom.

    pipeline × replicate × data × context × tensor                 neighbours in the last axis are neighbours in rank

Ranks along `tensor` and `context` work on the same samples, those along `pipeline` too, each on layers of its own;
those along `replicate` and `data` have samples of their own. Parameters are split along `tensor` by rules and along
`data` × `context` (together: `shard`) by FSDP. Who opens the process group is processes.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pipeline", "replicate", "data", "context", "tensor")
"""The axes of the mesh, the slowest link first."""

ALONE: Mapping[str, int] = MappingProxyType(dict.fromkeys(AXES, 1))


@dataclass(frozen=True)
class Mesh:
    """Where a rank stands on each axis, and torch's meshes for the collectives along them.

    `layers` has the axes pipeline, replicate, shard (data × context) and tensor; `sequence` has all five, and is there
    only where context is larger than 1. Both are None in one process that was not launched. `stage` is the group of
    the ranks with the same layers, `speakers` that of the ranks whose loss counts; None where that is all ranks.
    """

    sizes: Mapping[str, int] = field(default_factory=lambda: ALONE)
    place: int = 0
    layers: DeviceMesh | None = None
    sequence: DeviceMesh | None = None
    stage: Any = None
    speakers: Any = None

    def size(self, *axes: str) -> int:
        """Returns the number of ranks along an axis, or along several together."""
        product = 1
        for axis in axes:
            product *= self.sizes[axis]
        return product

    def rank(self, *axes: str) -> int:
        """Returns this rank's number along an axis, or along several together, the last the fastest."""
        rest, numbers = self.place, {}
        for axis in reversed(AXES):
            rest, numbers[axis] = divmod(rest, self.sizes[axis])
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + numbers[axis]
        return number

    @property
    def num_data_ranks(self) -> int:
        """How many ranks have samples of their own; the others share theirs."""
        return self.size("replicate", "data")

    @property
    def data_rank(self) -> int:
        """The number of this rank among those with samples of their own."""
        return self.rank("replicate", "data")

    @property
    def draws(self) -> tuple[int, ...]:
        """Whose random numbers this rank draws: those of its samples, and in a pipeline those of its layers."""
        stage = self.rank("pipeline")
        return (self.data_rank, stage) if stage else (self.data_rank,)

    @property
    def speaks(self) -> bool:
        """Does this rank's loss count? Of the ranks that share samples one does: the last layers' first."""
        is_last = self.rank("pipeline") == self.size("pipeline") - 1
        return is_last and self.rank("context") == 0 and self.rank("tensor") == 0

    @property
    def first_of_stage(self) -> int:
        """The rank that the others with the same layers get values from."""
        return self.rank("pipeline") * self.size("replicate", "data", "context", "tensor")

    @property
    def num_gradient_copies(self) -> int:
        """How often each sample's gradient is in the sum over ranks: ranks along context all propagate one loss."""
        return self.size("context")

    @property
    def is_split(self) -> bool:
        """Does any rank hold less than the whole model?"""
        return self.size("pipeline", "data", "context", "tensor") > 1

    def along(self, axis: str) -> DeviceMesh | None:
        """Returns torch's mesh of pipeline, replicate, shard, tensor or context; None where it has one rank."""
        if axis == "context":
            return None if self.sequence is None else self.sequence["context"]
        size = self.size("data", "context") if axis == "shard" else self.size(axis)
        return None if self.layers is None or size == 1 else self.layers[axis]

    def group(self, axis: str) -> Any:
        """Returns the process group along an axis; None where it has one rank."""
        mesh = self.along(axis)
        return None if mesh is None else mesh.get_group()


def lay_out(axes: Mapping[str, int], *, device_type: str) -> Mesh:
    """Returns the mesh of the process group that is open; `axes` may leave out those of size 1."""
    sizes = {axis: axes.get(axis, 1) for axis in AXES}
    if not dist.is_initialized():
        return Mesh(MappingProxyType(sizes))
    _forget_former_meshes()
    shape = (sizes["pipeline"], sizes["replicate"], sizes["data"] * sizes["context"], sizes["tensor"])
    layers = init_device_mesh(device_type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    sequence = None
    if sizes["context"] > 1:
        sequence = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)
    mesh = Mesh(MappingProxyType(sizes), dist.get_rank(), layers, sequence)
    everybody = [replace(mesh, place=place) for place in range(dist.get_world_size())]
    stages = [
        [each.place for each in everybody if each.rank("pipeline") == stage] for stage in range(sizes["pipeline"])
    ]
    # Every rank makes every group, its own or not, in the same order: torch counts them to name them.
    groups = [_group_of(places) for places in [*stages, [each.place for each in everybody if each.speaks]]]
    return replace(mesh, stage=groups[mesh.rank("pipeline")], speakers=groups[-1])


def _group_of(places: list[int]) -> Any:
    """Returns the group of these ranks, None where they are all."""
    return None if len(places) == dist.get_world_size() else dist.new_group(places)


def _forget_former_meshes() -> None:
    """Lets torch forget the layouts that it worked out on meshes of process groups that are closed by now.

    To its cache meshes of the same shape are equal: a DTensor on the new one would get the old one from its next
    operation, and be gathered over groups that are gone or, where their names were given again, over the wrong ranks.
    """
    if "torch.distributed.tensor" in sys.modules:  # else there are none
        # Private, and what torch recommends: there is no public way to clear this cache.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
