"""The mesh axes of a run, which ranks share samples, and a DTensor's local shard."""

from __future__ import annotations

import math
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
    """Returns this rank's shard, which shares memory with the tensor; outside of autograd."""
    # Not `to_local()`: it is differentiable and, from torch 2.13 on, returns a view of a parameter's local tensor.
    shard: torch.Tensor = tensor._local_tensor if is_split(tensor) else tensor  # type: ignore[attr-defined]
    return shard


def is_split(tensor: Any) -> bool:
    """Returns True for a DTensor."""
    # By attribute and not by class, because importing its module takes half as long as importing torch.
    return hasattr(tensor, "device_mesh")


def own_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's shard of a parameter's gradient, sharded like the parameter; None if there is none.

    The gradient of a parameter that is replicated along `tensor` may be a partial sum on each rank; it is summed here
    and stored.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if is_split(gradient):
        placements = parameter.placements  # type: ignore[attr-defined]  # both are DTensors
        if gradient.placements != placements:  # type: ignore[attr-defined]
            gradient = parameter.grad = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return local(gradient)


def gradient_dtype(parameter: torch.nn.Parameter) -> torch.dtype:
    """Returns the dtype in which a parameter's gradient is accumulated: see `set_gradient_dtype`."""
    return parameter.grad_dtype or parameter.dtype


def set_gradient_dtype(parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
    """Sets the dtype in which a gradient is accumulated and reduced, and converts an existing gradient."""
    gradient = parameter.grad
    if gradient is None:
        if parameter.grad_dtype != dtype:
            parameter.grad_dtype = dtype
    elif gradient.dtype != dtype or parameter.grad_dtype != dtype:
        parameter.grad = None
        parameter.grad_dtype = dtype
        parameter.grad = gradient.to(dtype)


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and buffers under all of their names, including non-persistent buffers."""
    parameters = module.named_parameters(remove_duplicate=False)
    return chain(parameters, module.named_buffers(remove_duplicate=False))


AXES = ("pipeline", "replicate", "fsdp", "context", "tensor")
"""The axes of the mesh, the one with the slowest connection first."""

ALONE: Mapping[str, int] = MappingProxyType(dict.fromkeys(AXES, 1))


@dataclass(frozen=True)
class Mesh:
    """A rank's coordinate on each axis, and torch's meshes for the collectives along them.

    `layers` has the axes pipeline, replicate, shard (fsdp × context) and tensor; `sequence` has all five, and exists
    only if context is larger than 1. Both are None in a single process without a launcher. `stage` is the group of
    the ranks of this pipeline stage; None if that is all ranks.
    """

    sizes: Mapping[str, int] = field(default_factory=lambda: ALONE)
    global_rank: int = 0
    layers: DeviceMesh | None = None
    sequence: DeviceMesh | None = None
    stage: Any = None

    def size(self, *axes: str) -> int:
        """Returns the number of ranks along an axis, or along several together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def rank(self, *axes: str) -> int:
        """Returns this rank's coordinate along an axis, or along several together, the last the fastest."""
        rest, numbers = self.global_rank, {}
        for axis in reversed(AXES):
            rest, numbers[axis] = divmod(rest, self.sizes[axis])
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + numbers[axis]
        return number

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks with different samples; the other ranks share theirs."""
        return self.size("replicate", "fsdp")

    @property
    def data_rank(self) -> int:
        """The number of this rank among those with different samples."""
        return self.rank("replicate", "fsdp")

    @property
    def draws(self) -> tuple[int, ...]:
        """The key of this rank's random numbers: its samples, and in a pipeline its layers."""
        stage = self.rank("pipeline")
        return (self.data_rank, stage) if stage else (self.data_rank,)

    @property
    def is_loss_rank(self) -> bool:
        """True if this rank's loss counts: of the ranks that share samples, the first of the last stage."""
        is_last = self.rank("pipeline") == self.size("pipeline") - 1
        return is_last and self.rank("context") == 0 and self.rank("tensor") == 0

    @property
    def first_of_stage(self) -> int:
        """The first rank of this pipeline stage, from which the others receive values."""
        return self.rank("pipeline") * self.size("replicate", "fsdp", "context", "tensor")

    @property
    def is_first_of_stage(self) -> bool:
        """True for the first rank of each pipeline stage; without a pipeline, for the first rank."""
        return self.global_rank == self.first_of_stage

    @property
    def num_gradient_copies(self) -> int:
        """How often each sample's gradient is included in the sum over ranks; ranks along context propagate the same
        loss."""
        return self.size("context")

    @property
    def is_split(self) -> bool:
        """True if the model is sharded: no rank has all of it."""
        return self.size("pipeline", "fsdp", "context", "tensor") > 1

    def along(self, axis: str) -> DeviceMesh | None:
        """Returns torch's mesh of pipeline, replicate, shard, tensor or context; None if it has one rank."""
        if axis == "context":
            return None if self.sequence is None else self.sequence["context"]
        size = self.size("fsdp", "context") if axis == "shard" else self.size(axis)
        return None if self.layers is None or size == 1 else self.layers[axis]

    def group(self, axis: str) -> Any:
        """Returns the process group along an axis; None if it has one rank."""
        mesh = self.along(axis)
        return None if mesh is None else mesh.get_group()

    @property
    def all_ranks(self) -> Any:
        """The process group of all ranks: that of an axis with all ranks, or None for torch's default group.

        Each group has its own buffers on a GPU, and a CUDA graph should contain the collectives of few groups.
        """
        for axis, axes in {"replicate": ("replicate",), "shard": ("fsdp", "context")}.items():
            if self.size(*axes) == self.size(*AXES):
                return self.group(axis)
        return None


def lay_out(axes: Mapping[str, int], *, device_type: str) -> Mesh:
    """Returns the mesh of the open process group; `axes` may omit those of size 1."""
    sizes = {axis: axes.get(axis, 1) for axis in AXES}
    if not dist.is_initialized():
        return Mesh(MappingProxyType(sizes))
    _clear_sharding_cache()
    shape = (sizes["pipeline"], sizes["replicate"], sizes["fsdp"] * sizes["context"], sizes["tensor"])
    layers = init_device_mesh(device_type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    sequence = None
    if sizes["context"] > 1:
        sequence = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)
    mesh = Mesh(MappingProxyType(sizes), dist.get_rank(), layers, sequence)
    ranks = [replace(mesh, global_rank=global_rank) for global_rank in range(dist.get_world_size())]
    members = [
        [each.global_rank for each in ranks if each.rank("pipeline") == stage] for stage in range(sizes["pipeline"])
    ]
    # Every rank creates every group in the same order, including those that do not contain it, because torch names them
    # by a counter.
    groups = [None if len(each) == len(ranks) else dist.new_group(each) for each in members]
    return replace(mesh, stage=groups[mesh.rank("pipeline")])


def _clear_sharding_cache() -> None:
    """Clears torch's cache of layouts on meshes of closed process groups.

    In the cache, meshes of the same shape are equal: an operation on a DTensor of the new mesh would return the old
    mesh, and gather over closed groups or, if their names are reused, over the wrong ranks.
    """
    if "torch.distributed.tensor" in sys.modules:  # otherwise the cache is empty
        # Private, but recommended by torch: there is no public function.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
