"""Table and loss over a vocabulary that is split: each rank has the rows, and the logits, of some tokens.

Both compute what torch's nn.Embedding and nn.CrossEntropyLoss do on the whole. No rank ever holds all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate


def look_up(table: DTensor, ids: Tensor, *, padding_idx: int | None = None) -> DTensor:
    """Returns the rows [..., D] of a table [V, D] that is split by rows, as parts whose sum they are.

    Ids that the table does not have are refused where that costs no wait for the device, as nn.Embedding does.
    """
    mesh, num_rows = table.device_mesh, table.shape[0]
    _check_range(ids, num_rows)
    rows = table.to_local()
    start = first_row(num_rows, mesh)
    is_here = (ids >= start) & (ids < start + rows.shape[0])
    if rows.shape[0] == 0:
        found = rows.sum() * torch.zeros((*ids.shape, table.shape[1]), dtype=rows.dtype, device=rows.device)
    else:
        found = F.embedding(torch.where(is_here, ids - start, 0), rows)
        found = torch.where(is_here[..., None], found, 0.0)
    if padding_idx is not None:
        # The row of padding is read but never learned.
        found = torch.where((ids == padding_idx)[..., None], found.detach(), found)
    return DTensor.from_local(found, mesh, [Partial()], run_check=False)


def split_cross_entropy(logits: DTensor, targets: Tensor, *, ignore_index: int, reduction: str) -> Tensor:
    """Returns the cross entropy of logits [N, V], split by columns, on targets [N] that every rank has."""
    mesh, size = logits.device_mesh, logits.shape[-1]
    is_counted = targets != ignore_index
    apply: Callable[..., Tensor] = _SplitCrossEntropy.apply  # torch has no types here
    losses = apply(logits.to_local(), torch.where(is_counted, targets, 0), first_row(size, mesh), mesh)
    losses = torch.where(is_counted, losses, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / is_counted.sum() if reduction == "mean" else total


def first_row(size: int, mesh: DeviceMesh) -> int:
    """Returns where this rank's part of a split dim begins: parts are of equal size but for the last ones."""
    length = -(-size // mesh.size())
    return min(length * mesh.get_local_rank(), size)


def over_ranks(tensor: Tensor, mesh: DeviceMesh, operation: str) -> Tensor:
    """Returns the sum or the maximum of a tensor over the ranks of a mesh of one axis; outside of autograd."""
    return (
        DTensor.from_local(tensor, mesh, [Partial(operation)], run_check=False)
        .redistribute(placements=[Replicate()])
        .to_local()
    )


def _check_range(ids: Tensor, num_rows: int) -> None:
    try:
        # torch's only assertion that does not wait for the device; it has no public name.
        torch._assert_async(((ids >= 0) & (ids < num_rows)).all())
    except RuntimeError as error:
        raise IndexError(f"ids from {int(ids.min())} to {int(ids.max())} in a table of {num_rows} rows") from error


class _SplitCrossEntropy(torch.autograd.Function):
    """Works on one rank's columns; the largest logit, the sum of exponentials and the target's logit are exchanged."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, mesh: DeviceMesh) -> Tensor:
        is_here = (targets >= start) & (targets < start + logits.shape[-1])
        chosen = torch.where(is_here, targets - start, 0)[:, None]
        if logits.shape[-1] == 0:  # more ranks than tokens: this one adds nothing
            largest = logits.new_full(targets.shape, -torch.inf)
            of_target = logits.new_zeros(targets.shape)
        else:
            largest = logits.amax(dim=-1)
            of_target = logits.gather(1, chosen)[:, 0]
        largest = over_ranks(largest, mesh, "max")
        shares = (logits - largest[:, None]).exp_()
        sums = over_ranks(torch.stack((shares.sum(dim=-1), torch.where(is_here, of_target, 0.0))), mesh, "sum")
        shares /= sums[0][:, None]
        ctx.save_for_backward(shares, chosen, is_here)
        return sums[0].log() + largest - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None, None]:
        shares, chosen, is_here = ctx.saved_tensors
        grads = shares.clone()
        if grads.shape[-1]:
            grads.scatter_add_(1, chosen, -is_here[:, None].to(grads.dtype))
        return grads.mul_(grad_losses[:, None]), None, None, None
