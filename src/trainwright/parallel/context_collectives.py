"""The collectives inside a split model's forward, each with its adjoint in backward.

Every rank of the group propagates the same loss, and what comes out is the gradient of the sum of these losses: as many
times the gradient of one as the group has ranks (Mesh.num_gradient_copies).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has other names for both, and warns of the old ones.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def join_chunks(part: Tensor, dim: int, group: Any) -> Tensor:
    """Returns the chunks of all ranks along `dim`, in the order of positions; a rank's part is its two chunks."""
    apply: Callable[..., Tensor] = _JoinChunks.apply  # torch has no types here
    return apply(part, dim, group)


def sum_over(tensor: Tensor, group: Any) -> Tensor:
    """Returns the sum of all ranks' tensors."""
    apply: Callable[..., Tensor] = _SumOver.apply
    return apply(tensor, group)


class _JoinChunks(torch.autograd.Function):
    """Gathers in forward; in backward each rank gets the sum of what all ranks have for its chunks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        size = dist.get_world_size(group)
        gathered = part.new_empty((size * part.shape[0], *part.shape[1:]))
        _ALL_GATHER(gathered, part.contiguous(), group=group)
        pairs = [each.chunk(2, dim) for each in gathered.chunk(size)]
        return torch.cat([first for first, _ in pairs] + [second for _, second in reversed(pairs)], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        size = dist.get_world_size(ctx.group)
        chunks = grad.chunk(2 * size, ctx.dim)
        by_rank = torch.cat([torch.cat((chunks[rank], chunks[-1 - rank]), ctx.dim) for rank in range(size)])
        # One process would add up in float32 and round once, even where the gradients have 16 bits.
        by_rank = by_rank.to(torch.promote_types(grad.dtype, torch.float32))
        summed = by_rank.new_empty((by_rank.shape[0] // size, *by_rank.shape[1:]))
        _REDUCE_SCATTER(summed, by_rank, group=ctx.group)
        return summed.to(grad.dtype), None, None


class _SumOver(torch.autograd.Function):
    """Sums in forward, and in backward the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
