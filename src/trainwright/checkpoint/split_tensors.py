"""Tensors that lie in pieces: on several ranks while they are saved, in several files while they are read.

Any layout reads any: a target asks for the region that it holds, whatever the pieces are. Which files hold the pieces
is part_files.py's. DTensor is imported where it is needed only, for that takes as long as half of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainwright.errors import CheckpointError
from trainwright.parallel.local import is_split, local

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a tensor is laid out over ranks: torch's mesh, and a placement for each of its axes."""

    mesh: Any
    placements: tuple[Any, ...]

    def is_written_here(self, first_of_stage: int) -> bool:
        """Says whether this rank is the first of those with the same piece.

        That is: the first along every axis of the mesh with copies; and of equal meshes, in the one with the first
        rank of all that have the same layers.
        """
        coordinate = self.mesh.get_coordinate()
        if coordinate is None or not bool((self.mesh.mesh == first_of_stage).any()):
            return False
        pairs = zip(self.placements, coordinate, strict=True)
        return all(number == 0 for placement, number in pairs if placement.is_replicate())

    def region(self, shape: Sequence[int]) -> tuple[Numbers, Numbers]:
        """Returns where this rank's piece of a tensor of that shape begins in each dim, and its sizes."""
        coordinate = self.mesh.get_coordinate()
        offsets, sizes = [0] * len(shape), list(shape)
        axes = [
            axis for axis, placement in enumerate(self.placements) if placement.is_shard() or _is_strided(placement)
        ]
        # A strided placement says that the axes after it have cut first: FSDP cuts what `tensor` has left of a dim.
        for axis in sorted(axes, key=lambda axis: _is_strided(self.placements[axis])):
            dim = self.placements[axis].dim
            chunk = -(-sizes[dim] // self.mesh.size(axis))
            start = min(chunk * coordinate[axis], sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(chunk, sizes[dim] - start)
        return tuple(offsets), tuple(sizes)


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")


@dataclass(frozen=True)
class Place:
    """Where a piece lies in the whole tensor."""

    offsets: Numbers
    shape: Numbers
    """Of the whole."""
    layout: Layout | None = None
    """How it lay over the ranks of this run; None of a tensor that was whole."""


def place_of(tensor: Any) -> Place | str:
    """Returns where this rank's piece of a DTensor lies, or a sentence that says why it cannot be saved."""
    layout = Layout(tensor.device_mesh, tuple(tensor.placements))
    if any(placement.is_partial() for placement in layout.placements):
        return f"a DTensor that waits for a sum ({layout.placements}). Save it after redistribute()"
    offsets, sizes = layout.region(tensor.shape)
    if sizes != tuple(local(tensor).shape):
        return f"a DTensor whose part is {tuple(local(tensor).shape)} instead of {sizes}. Save its full_tensor()"
    return Place(offsets, tuple(tensor.shape), layout)


class SplitTensor:
    """A tensor in pieces, none of which is copied until somebody asks for a region.

    `pieces` are (where it begins, the piece); together they are the whole, or what of it is at hand.
    """

    def __init__(
        self, shape: Sequence[int], pieces: Sequence[tuple[Numbers, torch.Tensor]], *, layout: Layout | None = None
    ) -> None:
        self.shape = torch.Size(shape)
        self.pieces = list(pieces)
        self.dtype = self.pieces[0][1].dtype
        self.layout = layout

    @torch.no_grad()
    def copy_into(self, target: torch.Tensor, offsets: Sequence[int] | None = None) -> None:
        """Fills a plain tensor with the region of its shape that begins at `offsets`; by default at the beginning."""
        starts = tuple(offsets or (0,) * len(self.shape))
        missing = target.numel()
        for begins, piece in self.pieces:
            bounds = [
                (max(start, begin), min(start + size, begin + length))
                for start, size, begin, length in zip(starts, target.shape, begins, piece.shape, strict=True)
            ]
            if any(first >= last for first, last in bounds):
                continue
            into = tuple(
                slice(first - start, last - start) for (first, last), start in zip(bounds, starts, strict=True)
            )
            source = tuple(
                slice(first - begin, last - begin) for (first, last), begin in zip(bounds, begins, strict=True)
            )
            target[into].copy_(piece[source])
            missing -= math.prod(last - first for first, last in bounds)
        if missing != 0:
            problem = f"Of {target.numel()} values {missing} are in no piece, or in several"
            raise CheckpointError(f"{problem}. Use another step.")

    def whole(self, *, device: str | torch.device = "cpu") -> torch.Tensor:
        """Returns all of it, in memory of its own."""
        made = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.copy_into(made)
        return made

    def as_dtensor(self, layout: Layout) -> torch.Tensor:
        """Returns it laid out over ranks, with this rank's piece on the device of the layout."""
        from torch.distributed.tensor import DTensor

        offsets, sizes = layout.region(self.shape)
        piece = torch.empty(sizes, dtype=self.dtype, device=layout.mesh.device_type)
        self.copy_into(piece, offsets)
        strides = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            piece, layout.mesh, layout.placements, run_check=False, shape=self.shape, stride=strides
        )


def as_split(tensor: torch.Tensor | SplitTensor) -> SplitTensor:
    """Returns a tensor as one in pieces, of which it is the only one."""
    if isinstance(tensor, SplitTensor):
        return tensor
    return SplitTensor(tensor.shape, [((0,) * tensor.ndim, tensor)])


def fill(target: torch.Tensor, source: torch.Tensor | SplitTensor) -> None:
    """Copies values into a tensor in place, into a DTensor those of this rank's piece; the shapes are equal."""
    offsets = None
    if is_split(target):
        place = place_of(target)
        if isinstance(place, str):
            raise CheckpointError(f"Nothing can be read into {place}.")
        offsets = place.offsets
    as_split(source).copy_into(local(target), offsets)


def laid_out_as(like: torch.Tensor, value: Any) -> Any:
    """Returns what belongs to a parameter, such as a momentum, laid out as the parameter is.

    Where it has the parameter's shape, or that of a matrix with 1 in place of some sizes (Adafactor's factors).
    Anything else is whole.
    """
    if not isinstance(value, torch.Tensor | SplitTensor) or is_split_already(value):
        return value
    if is_split(like) and len(value.shape) == like.ndim:
        pairs = list(zip(value.shape, like.shape, strict=True))
        keeps = [own == other for own, other in pairs]
        is_factor = like.ndim > 1 and any(keeps) and all(own in (1, other) for own, other in pairs)
        if all(keeps) or is_factor:
            return as_split(value).as_dtensor(_without(layout_of(like), keeps))
    return as_whole(value)


def is_split_already(value: Any) -> bool:
    """Is it a DTensor?"""
    return isinstance(value, torch.Tensor) and is_split(value)


def layout_of(tensor: Any) -> Layout:
    """Returns how a DTensor is laid out."""
    return Layout(tensor.device_mesh, tuple(tensor.placements))


def _without(layout: Layout, keeps: Sequence[bool]) -> Layout:
    """Returns the layout in which dims that are not kept lie whole on every rank."""
    from torch.distributed.tensor import Replicate

    placements = tuple(
        placement if placement.is_replicate() or keeps[placement.dim] else Replicate()
        for placement in layout.placements
    )
    return Layout(layout.mesh, placements)


def as_whole(value: torch.Tensor | SplitTensor) -> torch.Tensor:
    """Returns a tensor in one piece; of one whose other pieces are on other ranks, a DTensor."""
    if isinstance(value, torch.Tensor):
        return value
    return value.whole() if value.layout is None else value.as_dtensor(value.layout)


def map_tensors(state: Any, change: Any) -> Any:
    """Returns a nest in which each tensor is `change(tensor, key)`; `key` is that of the innermost mapping.

    A tensor that is met under several names is changed once, so that tied ones stay tied.
    """
    known: dict[int, Any] = {}

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, torch.Tensor | SplitTensor):
            if id(value) not in known:
                known[id(value)] = change(value, key)
            return known[id(value)]
        if isinstance(value, Mapping):
            return {inner: walk(item, str(inner)) for inner, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(walk(item, key) for item in value)
        return value

    return walk(state, "")
