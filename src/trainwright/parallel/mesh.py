"""How the ranks of a run are laid out along mesh axes, which ranks share samples, and a DTensor's local shard."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part, which shares memory with the tensor; outside of autograd."""
    # Not `to_local()`: it is differentiable and, from torch 2.13 on, returns a view of a parameter's local tensor.
    part: torch.Tensor = tensor._local_tensor if is_split(tensor) else tensor  # type: ignore[attr-defined]
    return part


def is_split(tensor: torch.Tensor) -> bool:
    """Does this tensor lie on several ranks, as a DTensor?"""
    # Asked of the tensor and not of its class, whose module takes as long to import as half of torch.
    return hasattr(tensor, "device_mesh")


def own_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's part of a parameter's gradient, laid out as the parameter is; None where there is none.

    The gradient of a parameter that ranks along `tensor` have copies of may come as a part of a sum on each of them;
    it is summed here, and left so.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if is_split(gradient):
        placements = parameter.placements  # type: ignore[attr-defined]  # both are DTensors
        if gradient.placements != placements:  # type: ignore[attr-defined]
            gradient = parameter.grad = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return local(gradient)


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and buffers under all of their names, computed buffers too."""
    parameters = module.named_parameters(remove_duplicate=False)
    return chain(parameters, module.named_buffers(remove_duplicate=False))


AXES = ("pipeline", "replicate", "fsdp", "context", "tensor")
"""The axes of the mesh, the slowest link first."""

ALONE: Mapping[str, int] = MappingProxyType(dict.fromkeys(AXES, 1))


@dataclass(frozen=True)
class Mesh:
    """Where a rank stands on each axis, and torch's meshes for the collectives along them.

    `layers` has the axes pipeline, replicate, shard (fsdp × context) and tensor; `sequence` has all five, and is there
    only where context is larger than 1. Both are None in one process that was not launched. `stage` is the group of
    the ranks with the same layers, `loss_group` that of the ranks whose loss counts; None where that is all ranks.
    """

    sizes: Mapping[str, int] = field(default_factory=lambda: ALONE)
    global_rank: int = 0
    layers: DeviceMesh | None = None
    sequence: DeviceMesh | None = None
    stage: Any = None
    loss_group: Any = None

    def size(self, *axes: str) -> int:
        """Returns the number of ranks along an axis, or along several together."""
        product = 1
        for axis in axes:
            product *= self.sizes[axis]
        return product

    def rank(self, *axes: str) -> int:
        """Returns this rank's number along an axis, or along several together, the last the fastest."""
        rest, numbers = self.global_rank, {}
        for axis in reversed(AXES):
            rest, numbers[axis] = divmod(rest, self.sizes[axis])
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + numbers[axis]
        return number

    @property
    def num_data_ranks(self) -> int:
        """How many ranks have samples of their own; the others share theirs."""
        return self.size("replicate", "fsdp")

    @property
    def data_rank(self) -> int:
        """The number of this rank among those with samples of their own."""
        return self.rank("replicate", "fsdp")

    @property
    def draws(self) -> tuple[int, ...]:
        """Whose random numbers this rank draws: those of its samples, and in a pipeline those of its layers."""
        stage = self.rank("pipeline")
        return (self.data_rank, stage) if stage else (self.data_rank,)

    @property
    def is_loss_rank(self) -> bool:
        """Does this rank's loss count? Of the ranks that share samples one does: the last layers' first."""
        is_last = self.rank("pipeline") == self.size("pipeline") - 1
        return is_last and self.rank("context") == 0 and self.rank("tensor") == 0

    @property
    def first_of_stage(self) -> int:
        """The rank that the others with the same layers get values from."""
        return self.rank("pipeline") * self.size("replicate", "fsdp", "context", "tensor")

    @property
    def num_gradient_copies(self) -> int:
        """How often each sample's gradient is in the sum over ranks: ranks along context all propagate one loss."""
        return self.size("context")

    @property
    def is_split(self) -> bool:
        """Does any rank hold less than the whole model?"""
        return self.size("pipeline", "fsdp", "context", "tensor") > 1

    def along(self, axis: str) -> DeviceMesh | None:
        """Returns torch's mesh of pipeline, replicate, shard, tensor or context; None where it has one rank."""
        if axis == "context":
            return None if self.sequence is None else self.sequence["context"]
        size = self.size("fsdp", "context") if axis == "shard" else self.size(axis)
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
    shape = (sizes["pipeline"], sizes["replicate"], sizes["fsdp"] * sizes["context"], sizes["tensor"])
    layers = init_device_mesh(device_type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    sequence = None
    if sizes["context"] > 1:
        sequence = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)
    mesh = Mesh(MappingProxyType(sizes), dist.get_rank(), layers, sequence)
    everybody = [replace(mesh, global_rank=global_rank) for global_rank in range(dist.get_world_size())]
    stages = [
        [each.global_rank for each in everybody if each.rank("pipeline") == stage] for stage in range(sizes["pipeline"])
    ]
    # Every rank makes every group, its own or not, in the same order: torch counts them to name them.
    groups = [
        _group_of(members) for members in [*stages, [each.global_rank for each in everybody if each.is_loss_rank]]
    ]
    return replace(mesh, stage=groups[mesh.rank("pipeline")], loss_group=groups[-1])


def _group_of(members: list[int]) -> Any:
    """Returns the group of these ranks, None where they are all."""
    return None if len(members) == dist.get_world_size() else dist.new_group(members)


def _forget_former_meshes() -> None:
    """Lets torch forget the layouts that it worked out on meshes of process groups that are closed by now.

    To its cache meshes of the same shape are equal: a DTensor on the new one would get the old one from its next
    operation, and be gathered over groups that are gone or, where their names were given again, over the wrong ranks.
    """
    if "torch.distributed.tensor" in sys.modules:  # else there are none
        # Private, and what torch recommends: there is no public way to clear this cache.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
