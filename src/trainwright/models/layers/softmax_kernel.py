"""Computes the log-probability of each row's target and the gradient of its loss from logits, in one Triton kernel.

Each row is read twice and written once, in the logits' own precision, with the arithmetic in float32. A compiled
version of the same formulas took 1.2 to 2.3 times as long on an H200 (benchmarks/results/loss.md, which names the
measured version). Only losses.py imports this, if Triton is available. The tensors must be on the current device, where
Triton launches kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

BLOCK_CLASSES = 8192
"""The number of classes at a time; with 8 warps, the best of ten choices for 32,000 to 128,256 classes, or within 3 %
of it."""
NUM_WARPS = 8


@triton_op("trainwright::softmax_gradient", mutates_args={})
def softmax_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-probability of each row's target [rows, 1], and the probabilities minus one at the target [rows,
    V].

    Both are nan in rows whose target is not one of the classes.
    """
    logits = logits.contiguous()
    num_rows, num_classes = logits.shape
    of_target = torch.empty((num_rows, 1), dtype=torch.float32, device=logits.device)
    gradients = torch.empty_like(logits)
    if num_rows:
        wrap_triton(_softmax_gradient)[(num_rows,)](
            logits, targets, of_target, gradients, num_classes, block_size=BLOCK_CLASSES, num_warps=NUM_WARPS
        )
    return of_target, gradients


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _softmax_gradient(logits, targets, of_target, gradients, num_classes, block_size: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # Triton gives annotations a meaning of its own
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_classes
    gradients += row * num_classes
    target = tl.load(targets + row)
    # Not -inf, because in a first block without larger values the difference would be nan.
    largest = -3.4e38
    total = 0.0
    for start in range(0, num_classes, block_size):
        classes = start + tl.arange(0, block_size)
        block = tl.load(logits + classes, mask=classes < num_classes, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(block))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(block - larger))
        largest = larger
    is_class = (target >= 0) & (target < num_classes)
    log_total = tl.where(is_class, largest + tl.log(total), float("nan"))
    of_class = tl.load(logits + target, mask=is_class, other=0.0).to(tl.float32)
    tl.store(of_target + row, of_class - log_total)
    for start in range(0, num_classes, block_size):
        classes = start + tl.arange(0, block_size)
        inside = classes < num_classes
        block = tl.load(logits + classes, mask=inside, other=-float("inf")).to(tl.float32)
        shares = tl.exp(block - log_total)
        shares = tl.where(classes == target, shares - 1.0, shares)
        tl.store(gradients + classes, shares.to(gradients.dtype.element_ty), mask=inside)
