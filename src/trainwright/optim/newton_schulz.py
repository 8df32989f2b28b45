"""Orthogonalising a batch of matrices with matrix products alone, which run at full speed in bf16.

The odd polynomial a·x + b·x³ + c·x⁵ is applied to all singular values at once, again and again: with the usual
coefficients five times take every one of them to between about 0.7 and 1.2, which is near enough for Muon.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def orthogonalize(batch: Tensor, coefficients: Sequence[float], *, steps: int, eps: float) -> Tensor:
    """Returns matrices with the same singular vectors and singular values near 1. The batch is overwritten.

    The shape is [matrices, rows, columns] with rows ≤ columns, for the iteration's squares are rows × rows. A matrix
    of norm below `eps` becomes small, not large; one of zeros stays zero.
    """
    a, b, c = coefficients
    norms = torch.linalg.vector_norm(batch, dim=(1, 2), keepdim=True, dtype=_norm_dtype(batch))
    batch.div_(norms.clamp(min=eps))  # the largest singular value is now at most 1
    for _ in range(steps):
        gram = batch @ batch.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b·G + c·G²
        batch = torch.baddbmm(batch, polynomial, batch, beta=a)  # a·X + (b·G + c·G²)·X
    return batch


def as_wide_matrix(tensor: Tensor) -> Tensor:
    """Returns the tensor as [dim 0, the rest], transposed where that is taller than wide."""
    matrix = tensor.flatten(1)
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def _norm_dtype(batch: Tensor) -> torch.dtype:
    return torch.promote_types(batch.dtype, torch.float32)  # a sum of squares in bf16 would lose most of its bits
