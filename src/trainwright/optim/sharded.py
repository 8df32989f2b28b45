"""Optimizers over sharded parameters: each rank steps its own shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.parallel.mesh import is_split, local, own_gradient


def has_shards(groups: Iterable[Mapping[str, Any]]) -> bool:
    """Returns True if any parameter of the groups is sharded. Optimizers check it once, not in every step."""
    return any(is_split(parameter) for group in groups for parameter in group["params"])


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns this rank's shard of each tensor; a full tensor is its own shard."""
    return [local(tensor) for tensor in tensors]


def local_gradients(parameters: Iterable[Any]) -> list[Tensor]:
    """Returns this rank's shards of the existing gradients, each sharded like its parameter."""
    gradients = (own_gradient(parameter) for parameter in parameters)
    return [gradient for gradient in gradients if gradient is not None]


def sharded_axes(tensor: Any) -> tuple[int, ...]:
    """Returns the mesh axes along which the tensor is sharded; none for a tensor that every rank has in full."""
    if not is_split(tensor):
        return ()
    return tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())


def shard_like(full: Tensor, parameter: Any) -> Tensor:
    """Returns a tensor that every rank has in full as a DTensor that is sharded like the parameter, if the parameter is
    sharded."""
    if is_split(full) or not is_split(parameter):
        return full
    from torch.distributed.tensor import distribute_tensor  # slow to import, and a single process does not need it

    # Every rank has the same values, so there is no communication.
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)


def sum_over_ranks(
    parameters: Sequence[Any], values: Sequence[Tensor], *, stages: Any, device: torch.device | None = None
) -> Tensor:
    """Sums one number per parameter shard over the ranks with the shards; the result is equal on every rank.

    `stages` is the process group of the other pipeline stages, or None. Collective if a parameter is sharded or there
    are stages; a stage without parameters participates with a zero on `device`. A weight that several stages share (a
    tied weight, marked with `num_stages`) counts once.
    """
    by_layout: dict[Any, list[Tensor]] = {}
    for parameter, value in zip(parameters, values, strict=True):
        axes = sharded_axes(parameter)
        mesh = parameter.device_mesh if axes else None
        number = value.to(torch.float32)
        num_stages = getattr(parameter, "num_stages", 1)
        by_layout.setdefault((mesh, axes), []).append(number if num_stages == 1 else number / num_stages)
    total = torch.zeros((), device=values[0].device if values else device)
    for (mesh, axes), numbers in by_layout.items():
        subtotal = torch.stack(numbers).sum()
        for axis in axes:
            dist.all_reduce(subtotal, group=mesh.get_group(axis))
        total = total + subtotal
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total
