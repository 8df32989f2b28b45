"""Which part of each parameter a rank holds, read off a model that was split."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainwright.parallel.local import local
from trainwright.parallel.mesh import Mesh

COPIED = "-"
"""What stands for a dim that is not split."""


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter, or several of one layout whose names differ in numbers alone: then `*` stands for those."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """The mesh axes that split each dim: `data`, `data × tensor`, or `-` for none."""
    local_shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """What one of them takes on this rank."""
    is_trained: bool
    count: int = 1


def layouts_of(model: torch.nn.Module, mesh: Mesh) -> list[ParameterLayout]:
    """Returns the layout of every parameter that this rank holds, in the model's order; tied ones once."""
    return [_layout_of(name, parameter, mesh) for name, parameter in model.named_parameters()]


def grouped(layouts: Iterable[ParameterLayout]) -> list[ParameterLayout]:
    """Returns them with those of equal layers as one, in the order of the first of each."""
    groups: dict[Any, list[ParameterLayout]] = {}
    for each in layouts:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", f".{each.name}.")[1:-1]
        key = (pattern, each.shape, each.axes, each.local_shape, each.dtype, each.is_trained)
        groups.setdefault(key, []).append(each)
    found = []
    for (pattern, *_), some in groups.items():
        first = some[0]
        name = pattern if len(some) > 1 else first.name
        found.append(
            ParameterLayout(
                name,
                first.shape,
                first.axes,
                first.local_shape,
                first.dtype,
                first.num_bytes,
                first.is_trained,
                count=sum(each.count for each in some),
            )
        )
    return found


def _layout_of(name: str, parameter: torch.Tensor, mesh: Mesh) -> ParameterLayout:
    splits: list[list[str]] = [[] for _ in parameter.shape]
    if isinstance(parameter, DTensor):
        for axis, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
            dim = getattr(placement, "dim", None)
            if dim is not None and parameter.device_mesh[axis].size() > 1:
                splits[dim].append(_spell(axis, mesh))
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


def _spell(axis: str, mesh: Mesh) -> str:
    """FSDP's axis is data and context together: names those that have several ranks."""
    if axis != "shard":
        return axis
    return " × ".join(each for each in ("data", "context") if mesh.size(each) > 1)
