"""Losses of the shipped models: the fused output projection and cross-entropy, and the classifiers' loss.

The fused loss never stores the logits of all tokens. On a GPU its kernel is in softmax_kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainwright.backends import waits_for_memory
from trainwright.backends.private_torch import has_triton
from trainwright.errors import ConfigError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.layers.attention import WholeSequence


def at_least_float32(tensor: Tensor) -> Tensor:
    """Returns the tensor in float32, or float64 unchanged, because the log of a sum is too inaccurate in 16 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def label_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the log-probability of each label [B, S − 1] for logits [B, S, V] of a causal model, in at least float32.

    Labels [B, S] are those of the input tokens; it is 0 where they are -100, and the first one is not predicted.
    """
    targets = labels[:, 1:]
    scores = at_least_float32(logits[:, :-1])
    losses = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return -losses.view(targets.shape)


CHUNK_ELEMENTS = 2**27
"""The number of logits at a time, in memory twice: 1 GiB in float32, half of that in bf16 with the kernel. On an H200,
without that kernel, half as many took 12 % longer, and twice as many needed 83 % more memory without saving time
(benchmarks/results/loss.md)."""
CHUNK_MULTIPLE = 128
"""Chunks have the same number of rows, a multiple of this, so no tile of a matrix product is partial and compiled code
has one chunk shape."""
ALIGNED_CLASSES = 64
"""On a GPU, a head is padded to a multiple of this many classes, because products with GPT-2's 50,257 take a slow
path."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    bias: Tensor | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Returns the mean loss, float32, of hidden states [N, D] through a head [V, D] (and [V]) on targets [N].

    Targets of `ignore_index` are ignored; if all are ignored, the loss is nan, as in torch, and the gradients are 0.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rows = chunk_rows or max(rows_of_chunk(len(targets), weight.shape[0]), 1)  # there may be no targets
    apply: Callable[..., Tensor] = _LinearCrossEntropy.apply  # torch has no types here
    return apply(hidden, weight, bias, targets, ignore_index, rows)


def score_tokens(
    model: Any, hidden: Tensor, targets: Tensor | None, sequence: WholeSequence
) -> dict[str, Tensor | None]:
    """Maps states [B, S, D] through `model.lm_head` to logits and, given targets [B, S], their mean loss."""
    if targets is None:
        return {"loss": None, "logits": sequence.whole(model.lm_head(hidden))}
    if fuses_loss(model.fused_loss, model.lm_head, model.criterion, hidden, training=model.training):
        return {"loss": sequence.mean(head_loss(model.lm_head, hidden, targets), targets), "logits": None}
    logits = model.lm_head(hidden)
    loss = model.criterion(at_least_float32(logits.flatten(0, 1)), targets.flatten())
    return {"loss": sequence.mean(loss, targets), "logits": sequence.beside_loss(logits)}


def head_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean loss of states [B, S, D] through a plain head on targets [B, S]; see `fuses_loss`."""
    linear: Any = head
    return linear_cross_entropy(
        hidden.flatten(0, 1), linear.weight, targets.flatten(), ignore_index=IGNORED_LABEL, bias=linear.bias
    )


def rows_of_chunk(num_rows: int, num_classes: int) -> int:
    """Returns the number of rows per chunk, so that chunks are nearly equal and within CHUNK_ELEMENTS."""
    num_chunks = max(1, -(-num_rows * num_classes // CHUNK_ELEMENTS))
    return -(-num_rows // (num_chunks * CHUNK_MULTIPLE)) * CHUNK_MULTIPLE


def fuses_loss(wanted: bool | None, head: nn.Module, criterion: nn.Module, hidden: Tensor, *, training: bool) -> bool:
    """Returns True if a forward fuses head and loss: only in training, and by default (None) only on a GPU.

    Raises if `wanted` is true but the fused loss is impossible.
    """
    asked = waits_for_memory(hidden.device) if wanted is None else wanted
    if not (asked and training and torch.is_grad_enabled()):
        return False
    usable = is_plain_head(head) and is_plain_mean(criterion)
    if wanted and not usable:
        raise ConfigError(
            f"fused_loss is true, but the model has the head {head} and the criterion {criterion}. "
            "It needs the original ones: a linear head without hooks or sharded weight, and the "
            "mean cross-entropy. Leave fused_loss out."
        )
    return usable


def is_plain_head(head: nn.Module) -> bool:
    """Returns True if a head is only its weight and bias, in full on this rank, without adapters or hooks."""
    return (
        type(head) is nn.Linear
        and isinstance(head.weight, nn.Parameter)
        and not hasattr(head.weight, "device_mesh")  # a DTensor, whose class is slow to import
        and not (head._forward_hooks or head._forward_pre_hooks)
    )


def is_plain_mean(criterion: nn.Module) -> bool:
    """Returns True if a criterion is exactly the mean cross-entropy with -100 ignored."""
    return (
        type(criterion) is nn.CrossEntropyLoss
        and (criterion.ignore_index, criterion.reduction) == (IGNORED_LABEL, "mean")
        and criterion.weight is None
        and criterion.label_smoothing == 0.0
        and not (criterion._forward_hooks or criterion._forward_pre_hooks)
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, while a chunk's logits are in memory; `backward` only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        chunk_rows: int,
    ) -> Tensor:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        aligned, offsets = _aligned(weight, bias)
        counted = targets != ignore_index
        total = hidden.new_zeros((), dtype=precise)
        hidden_grads: list[Tensor] = []
        sums: dict[str, Tensor] = {}  # of the gradients of weight and bias, in full precision
        # One chunk without a range: torch 2.11 would compile it for this number of rows, and fail for the next.
        for start in range(0, len(targets), chunk_rows) if len(targets) > chunk_rows else (0,):
            rows = slice(start, start + chunk_rows)
            states, is_counted = hidden[rows], counted[rows, None]
            chosen = torch.where(is_counted, targets[rows, None], 0)  # [rows, 1]
            if len(aligned) != len(weight):  # the classes that were added are not targets
                chosen = torch.where(chosen < len(weight), chosen, -1)
            of_target, grads = _losses_and_grads(states, aligned, offsets, chosen, precise)
            total = total - torch.where(is_counted, of_target, 0.0).sum()
            if needs_hidden:
                hidden_grads.append(torch.where(is_counted, grads @ aligned, 0.0))
            # Rows that do not count are zero on this side of the products: cheaper than a pass over all logits.
            if needs_weight:
                _add(sums, "weight", grads.t() @ torch.where(is_counted, states, 0.0), precise)
            if needs_bias:
                _add(sums, "bias", (grads.t() @ is_counted.to(grads.dtype)).squeeze(1), precise)
            del grads  # before the next chunk's are allocated
        count = counted.sum()
        # Scaled only in `backward`, because in float16 a gradient divided by the number of tokens would underflow.
        ctx.save_for_backward(
            None if not needs_hidden else torch.cat(hidden_grads) if hidden_grads else torch.zeros_like(hidden),
            _sum_of(sums, "weight", weight) if needs_weight else None,
            None if bias is None or not needs_bias else _sum_of(sums, "bias", bias),
            count,
        )
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        *grads, count = ctx.saved_tensors
        scale = grad_loss / count.clamp(min=1)  # a 0-dim tensor, so the gradients keep their dtype
        return (*(None if grad is None else grad * scale for grad in grads), None, None, None)


def _losses_and_grads(
    states: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, precise: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns each target's log-probability [rows, 1] and the gradient of its loss [rows, V], in the dtype of `states`.

    The gradient is the probabilities, minus one at the target.
    """
    logits = states @ weight.t() if bias is None else torch.addmm(bias, states, weight.t())
    if precise == torch.float32 and waits_for_memory(logits.device) and has_triton():
        from trainwright.models.layers.softmax_kernel import softmax_gradient

        of_target, grads = softmax_gradient(logits, chosen)
        return of_target, grads
    # Only the precise form of the logits is kept, so at most two tensors of their size exist at any time.
    logits = logits.to(precise)
    log_shares = torch.log_softmax(logits, dim=-1)
    del logits
    of_target = log_shares.gather(1, chosen)
    if torch.compiler.is_compiling():
        # One pass that the compiler fuses, without any float32 copy; a scatter would end it.
        classes = torch.arange(log_shares.shape[1], device=states.device)
        shares = log_shares.exp()
        return of_target, torch.where(classes == chosen, shares - 1, shares).to(states.dtype)
    # Rounded while it is written.
    rounded = log_shares if states.dtype == precise else torch.empty_like(log_shares, dtype=states.dtype)
    grads = torch.exp(log_shares, out=rounded)
    return of_target, grads.scatter_(1, chosen, (of_target.exp() - 1).to(grads.dtype))


def _aligned(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns head and bias, padded with classes of probability 0 if products are then faster."""
    missing = -weight.shape[0] % ALIGNED_CLASSES if waits_for_memory(weight.device) else 0
    if not missing:
        return weight, bias
    bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    return F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing), value=float("-inf"))


def _add(sums: dict[str, Tensor], name: str, share: Tensor, precise: torch.dtype) -> None:
    if name in sums:
        sums[name].add_(share)  # in place, and precise without a precise copy of the probabilities
    else:
        sums[name] = share.to(precise)


def _sum_of(sums: Mapping[str, Tensor], name: str, parameter: Tensor) -> Tensor:
    """Returns the summed gradient of a parameter, without the classes that `_aligned` added; zeros without a chunk."""
    return sums[name][: len(parameter)].to(parameter.dtype) if name in sums else torch.zeros_like(parameter)


def count_labels(criterion: Any, labels: Tensor) -> Tensor | None:
    """Returns the divisor of a criterion's mean, on the device; None for a mean over samples or an unknown criterion.

    It is the number of labels that are not ignored or, with class weights, the sum of their weights.
    """
    is_mean = type(criterion) in (nn.CrossEntropyLoss, nn.NLLLoss) and criterion.reduction == "mean"
    if not is_mean or labels.is_floating_point():
        return None
    counted: Tensor = labels != criterion.ignore_index
    if criterion.weight is None:
        return counted.sum()
    weights: Tensor = criterion.weight[labels.where(counted, 0)]
    return (weights * counted).sum()


def class_criterion(num_labels: int) -> nn.Module:
    """Returns the cross entropy over classes or, as in transformers, the squared error for a single output."""
    return nn.MSELoss() if num_labels == 1 else nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL)


def class_loss(criterion: nn.Module, logits: Tensor, labels: Tensor | None) -> Tensor | None:
    """Returns the loss of logits [B, classes] on labels [B], or None without labels.

    A single output is a number, not a class: it is compared with float labels as [B].
    """
    if labels is None:
        return None
    scores = at_least_float32(logits)
    if scores.shape[-1] == 1:
        scores, labels = scores.squeeze(-1), labels.reshape(scores.shape[:-1]).to(scores.dtype)
    loss: Tensor = criterion(scores, labels)
    return loss


def num_labels_of(config: Mapping[str, Any]) -> int:
    """Returns the number of classes in a config.json; Hugging Face writes only their names, and none for two
    classes."""
    if config.get("id2label"):
        return len(config["id2label"])
    return int(config.get("num_labels") or 2)


def label_names(num_labels: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the classes' names for config.json: numbers, unless the same number of names was read with the model."""
    if config.get("id2label") and len(config["id2label"]) == num_labels:
        return {}  # the config that was read is kept
    names = [f"LABEL_{number}" for number in range(num_labels)]
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
