"""Optimizers over sharded parameters: each rank steps its own shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.parallel.mesh import is_split, local, own_gradient


def has_parts(tensors: Iterable[Any]) -> bool:
    """Is any of the tensors split over ranks?"""
    return any(is_split(tensor) for tensor in tensors)


def optimizes_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Is any parameter of the optimizer split over ranks? Optimizers ask once, not in every step."""
    return any(has_parts(group["params"]) for group in optimizer.param_groups)


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns this rank's part of each tensor; a whole one is its own part."""
    return [local(tensor) for tensor in tensors]


def own_gradients(parameters: Iterable[Any]) -> list[Tensor]:
    """Returns this rank's part of the gradients that are there, each laid out as its parameter."""
    gradients = (own_gradient(parameter) for parameter in parameters)
    return [gradient for gradient in gradients if gradient is not None]


def split_axes(tensor: Any) -> tuple[int, ...]:
    """Returns the axes of the tensor's mesh along which it is split; none for one that is whole on every rank."""
    if not is_split(tensor):
        return ()
    return tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())


def part_of(whole: Tensor, *, like: Any) -> Tensor:
    """Returns a tensor that every rank has whole as a DTensor laid out like another; whole where that is whole."""
    if is_split(whole) or not is_split(like):
        return whole
    from torch.distributed.tensor import distribute_tensor  # slow to import, and one process has no use for it

    # Every rank has the same values: nothing is sent.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def split_state(optimizer: torch.optim.Optimizer) -> None:
    """Lays out loaded state of a parameter's shape as the parameter is; what is laid out so already stays."""
    for parameter, state in optimizer.state.items():
        if is_split(parameter):
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[key] = part_of(value, like=parameter)


def sum_over_ranks(
    parameters: Sequence[Any], values: Sequence[Tensor], *, stages: Any, device: torch.device | None = None
) -> Tensor:
    """Sums a number of each parameter's part over the ranks that hold its parts; the same on every rank.

    `stages` is the process group of the ranks with other layers, or None. Collective where a parameter is split, and
    where there are stages: then one without any parameter asks too, with the `device` that the others' sums lie on.
    What several stages have (tied weights, marked by stages.py) counts once.
    """
    alike: dict[Any, list[Tensor]] = {}
    for parameter, value in zip(parameters, values, strict=True):
        axes = split_axes(parameter)
        mesh = parameter.device_mesh if axes else None
        number = value.to(torch.float32)
        num_stages = getattr(parameter, "num_stages", 1)
        alike.setdefault((mesh, axes), []).append(number if num_stages == 1 else number / num_stages)
    total = torch.zeros((), device=values[0].device if values else device)
    for (mesh, axes), some in alike.items():
        part = torch.stack(some).sum()
        for axis in axes:
            dist.all_reduce(part, group=mesh.get_group(axis))
        total = total + part
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total
