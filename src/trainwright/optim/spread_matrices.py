"""Whole matrices from the parts that ranks hold, each on one rank, and the parts of what became of them back.

    parts of all matrices → all-to-all → whole matrices, each on one rank → act → all-to-all → parts of all matrices

Every matrix travels once there and once back, and the ranks share the work: an all-gather would send each matrix to
every rank, and have every rank do all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright.optim.parts import part_of, split_axes
from trainwright.parallel.local import is_split, local

Act = Callable[[list[Tensor]], list[Tensor]]
"""Turns whole tensors into others of the same shapes; given an empty list where a rank has none to work on."""


def act_on_whole(parts: Sequence[Tensor], parameters: Sequence[Any], act: Act, *, turn: int = 0) -> list[Tensor]:
    """Returns this rank's parts of `act` of the whole tensors, of which `parts` are this rank's.

    `parameters` say how each is split; all must be split alike and have one shape. The one with number n is worked
    on by rank (turn + n) of those that share it. Collective along the axes where the parameters are split.
    """
    first = parameters[0]
    axes = split_axes(first)
    if not axes:
        return act(list(parts))
    placement = first.placements[axes[0]]
    if len(axes) > 1 or not placement.is_shard():
        # Split along several axes: the parts lie in each other, and torch knows how. Every rank does all of the work.
        return _act_everywhere(parts, parameters, act)
    return _Exchange(first.shape, placement.dim, first.device_mesh.get_group(axes[0]), turn).run(parts, act)


def layout_of(parameter: Any) -> object:
    """Returns what is equal for parameters that are split alike; None for one that is whole."""
    return (parameter.device_mesh, parameter.placements) if is_split(parameter) else None


class _Exchange:
    """The two all-to-alls of tensors of one shape that are split along one dim over the ranks of a group."""

    def __init__(self, shape: torch.Size, dim: int, group: Any, turn: int) -> None:
        self.dim = dim
        self.group = group
        self.turn = turn
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        longest = -(-shape[dim] // self.size)
        ends = [min(longest * (rank + 1), shape[dim]) for rank in range(self.size)]
        lengths = [end - min(longest * rank, shape[dim]) for rank, end in enumerate(ends)]
        self.shapes = [torch.Size((*shape[:dim], length, *shape[dim + 1 :])) for length in lengths]

    def run(self, parts: Sequence[Tensor], act: Act) -> list[Tensor]:
        owners = [(self.turn + number) % self.size for number in range(len(parts))]
        num_owned = [owners.count(rank) for rank in range(self.size)]
        own, mine = self.shapes[self.rank].numel(), num_owned[self.rank]
        order = sorted(range(len(parts)), key=lambda number: owners[number])
        sizes_there = [own * count for count in num_owned]
        sizes_back = [shape.numel() * mine for shape in self.shapes]
        sent = torch.cat([parts[number].reshape(-1) for number in order])
        received = _exchange(sent, sizes_there, sizes_back, self.group)
        # From each rank came its parts of all my matrices, one after the other.
        stacks = [
            piece.view(mine, *shape)
            for piece, shape in zip(received.split(sizes_back), self.shapes, strict=True)  # type: ignore[no-untyped-call]
        ]
        done = act(list(torch.cat(stacks, dim=self.dim + 1).unbind()) if mine else [])
        if mine:
            lengths = [shape[self.dim] for shape in self.shapes]
            pieces = torch.stack(done).split(lengths, dim=self.dim + 1)  # type: ignore[no-untyped-call]
            sent = torch.cat([piece.reshape(-1) for piece in pieces])
        else:
            sent = received.new_empty(0)
        received = _exchange(sent, sizes_back, sizes_there, self.group)
        back: list[Tensor] = [received] * len(parts)
        for number, piece in zip(order, received.view(len(parts), own), strict=True):
            back[number] = piece.view(self.shapes[self.rank])
        return back


def _exchange(sent: Tensor, sizes: list[int], sizes_received: list[int], group: Any) -> Tensor:
    received = sent.new_empty(sum(sizes_received))
    dist.all_to_all_single(received, sent, sizes_received, sizes, group=group)
    return received


def _act_everywhere(parts: Sequence[Tensor], parameters: Sequence[Any], act: Act) -> list[Tensor]:
    from torch.distributed.tensor import DTensor  # slow to import, and one process has no use for it

    whole = []
    for part, parameter in zip(parts, parameters, strict=True):
        mesh, placements = parameter.device_mesh, parameter.placements
        laid_out = DTensor.from_local(
            part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        whole.append(laid_out.full_tensor())
    return [
        local(part_of(done.contiguous(), like=parameter))
        for done, parameter in zip(act(whole), parameters, strict=True)
    ]
