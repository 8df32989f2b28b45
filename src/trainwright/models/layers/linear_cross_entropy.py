"""The head's matrix product and the mean cross-entropy in one, without ever holding the logits of all tokens.

The logits are worked out for some rows at a time, and their gradients at once with them; what is kept for the backward
pass is as large as the hidden states and the head. The same numbers as nn.CrossEntropyLoss on float32 logits, but for
the order in which the chunks' sums are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainwright.labels import IGNORED_LABEL

CHUNK_ELEMENTS = 2**27
"""Logits at a time: 256 MB in bf16 and twice that in float32, enough rows for a matrix product at full speed."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int, chunk_rows: int | None = None
) -> Tensor:
    """Returns the mean loss, float32, of hidden states [N, D] through a head [V, D] on targets [N].

    Targets of `ignore_index` count for nothing; if all are, the loss is nan, as torch's is, and the gradients are 0.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden, weight = (each.to(torch.get_autocast_dtype(kind)) for each in (hidden, weight))
    rows = chunk_rows or max(1, CHUNK_ELEMENTS // weight.shape[0])
    apply: Callable[..., Tensor] = _LinearCrossEntropy.apply  # torch has no types here
    return apply(hidden, weight, targets, ignore_index, rows)


def is_plain_head(head: nn.Module) -> bool:
    """Whether a head is only its weight, whole on this rank: no bias, adapter or hook that a product would miss."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and isinstance(head.weight, nn.Parameter)
        and not hasattr(head.weight, "_local_tensor")  # of a weight that is split over ranks
        and not (head._forward_hooks or head._forward_pre_hooks)
    )


def is_plain_mean(criterion: nn.Module) -> bool:
    """Whether a criterion is the mean cross-entropy with -100 ignored, and nothing more."""
    return (
        type(criterion) is nn.CrossEntropyLoss
        and (criterion.ignore_index, criterion.reduction) == (IGNORED_LABEL, "mean")
        and criterion.weight is None
        and criterion.label_smoothing == 0.0
        and not (criterion._forward_hooks or criterion._forward_pre_hooks)
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Works out the gradients in the forward pass, while a chunk's logits are there; `backward` only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk_rows: int
    ) -> Tensor:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        counted = targets != ignore_index
        total = hidden.new_zeros((), dtype=precise)
        hidden_grads: list[Tensor] = []
        weight_grad: Tensor | None = None
        for start in range(0, len(targets), chunk_rows):
            rows = slice(start, start + chunk_rows)
            states, is_counted = hidden[rows], counted[rows, None]
            chosen = torch.where(is_counted, targets[rows, None], 0)  # [rows, 1]
            log_shares = torch.log_softmax(states @ weight.t(), dim=-1, dtype=precise)  # [rows, V]
            of_target = log_shares.gather(1, chosen)
            total = total - torch.where(is_counted, of_target, 0.0).sum()
            # The gradient of a row's loss: the shares, less one at the target.
            grads = log_shares.exp_().to(hidden.dtype).scatter_(1, chosen, (of_target.exp() - 1).to(hidden.dtype))
            if ctx.needs_input_grad[0]:
                hidden_grads.append(torch.where(is_counted, grads @ weight, 0.0))
            if ctx.needs_input_grad[1]:
                # Rows that do not count are zero on this side of the product: cheaper than a pass over all logits.
                share = (grads.t() @ torch.where(is_counted, states, 0.0)).to(precise)
                weight_grad = share if weight_grad is None else weight_grad + share
        count = counted.sum()
        hidden_grad = torch.cat(hidden_grads) if hidden_grads else None
        # Scaled only in `backward`: in float16 a gradient divided by the number of tokens would vanish.
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_grad, weight_grad, count = ctx.saved_tensors
        scale = grad_loss / count.clamp(min=1)  # a number of no dims: the gradients keep their dtype
        scaled = [None if grad is None else grad * scale for grad in (hidden_grad, weight_grad)]
        return scaled[0], scaled[1], None, None, None
