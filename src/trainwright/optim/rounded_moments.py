"""AdamW's moments in another precision than its weights: bf16 halves the state, fp32 beside bf16 weights keeps bits.

    for each piece:   widen to fp32 → torch's fused kernel → round the moments back, and masters to their weights

A second moment changes by a thousandth a step, which is less than bf16's spacing: plain rounding would freeze it. So
moments are rounded up or down by chance, with the mean right. The chance is a hash of the value and the step, not a
generator: every rank, every resume and every device rounds alike, and there is nothing to save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.optim.device_step import PIECE_ELEMENTS, in_pieces, updated_parameters
from trainwright.optim.master_weights import masters_of, write_back
from trainwright.parallel.local import local, own_gradient

_SPREAD = 0x9E3779B1 - 2**32  # 2³² over the golden ratio, as the signed 32-bit number that it is


class _Part(NamedTuple):
    """A parameter or a stretch of a large one, with what belongs to it; all of one shape but the step."""

    parameter: Tensor
    weight: Tensor
    """What is stepped: the parameter itself, or its master."""
    gradient: Tensor
    first: Tensor
    second: Tensor
    step: Tensor


def step_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, *, has_masters: bool = False
) -> None:
    """Does one AdamW step of the group with moments kept in `dtype`; the arithmetic is in fp32.

    With `has_masters` parameters in 16 bits are rounded from masters in fp32 (master_weights.py).
    """
    parameters = updated_parameters(group)
    if not parameters:
        return
    weights = masters_of(optimizer, parameters) if has_masters else parameters
    for parameter in parameters:
        state = optimizer.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
    found_inf = getattr(optimizer, "found_inf", None)
    steps = [optimizer.state[parameter]["step"] for parameter in parameters]
    torch._foreach_add_(steps, 1.0)
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf.reshape(())] * len(steps))  # a list: one tensor would be read by the host
    parts = [
        part
        for parameter, weight in zip(parameters, weights, strict=True)
        for part in _parts_of(parameter, weight, optimizer.state[parameter])
    ]
    salt = salt_of(steps[0])
    for piece in in_pieces([part.parameter for part in parts]):
        _step_piece(parts[piece], group, salt, getattr(optimizer, "grad_scale", None), found_inf)


def _parts_of(parameter: Any, weight: Any, state: Mapping[str, Tensor]) -> Iterator[_Part]:
    gradient, step = own_gradient(parameter), state["step"]
    assert gradient is not None  # parameters without are left out
    own = local(parameter)
    stepped = own if weight is parameter else local(weight)
    whole = _Part(own, stepped, gradient, local(state["exp_avg"]), local(state["exp_avg_sq"]), step)
    if not all(tensor.is_contiguous() for tensor in whole):
        yield whole
        return
    for start in range(0, own.numel(), PIECE_ELEMENTS):
        stretch = slice(start, start + PIECE_ELEMENTS)
        flat = [tensor.view(-1)[stretch] for tensor in whole[:5]]
        yield _Part(flat[0], flat[0] if stepped is own else flat[1], flat[2], flat[3], flat[4], step)


def _step_piece(
    parts: Sequence[_Part], group: Mapping[str, Any], salt: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    columns = [list(column) for column in zip(*parts, strict=True)]
    parameters, weights, gradients, firsts, seconds, steps = columns
    wide = [_widen(column) for column in (weights, gradients, firsts, seconds)]
    torch._fused_adamw_(  # type: ignore[call-overload]  # torch's annotation knows no lr on the device
        *(tensors for tensors, _ in wide),
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        grad_scale=grad_scale,
        found_inf=found_inf,
    )
    (new_weights, room), _, *moments = wide
    if room is not None:
        torch._foreach_copy_(weights, new_weights)
    write_back(parameters, weights)
    for kept, (new, room) in zip((firsts, seconds), moments, strict=True):
        if room is not None:
            if kept[0].dtype == torch.bfloat16:
                round_to_bf16(room, salt)
            torch._foreach_copy_(kept, new)


def _widen(tensors: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """Returns the tensors in fp32: themselves, or views of one stretch of memory that is returned beside them."""
    if all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors):
        return tensors, None
    sizes = [tensor.numel() for tensor in tensors]
    room = torch.empty(sum(sizes), dtype=torch.float32, device=tensors[0].device)
    views = [view.view(tensor.shape) for view, tensor in zip(room.split(sizes), tensors, strict=True)]  # type: ignore[no-untyped-call]
    torch._foreach_copy_(views, tensors)
    return views, room


def salt_of(step: Tensor) -> Tensor:
    """Returns 32 bits for a step, as if drawn by chance: a counter alone would make the roundings of a value that
    stands still follow each other too evenly, and a moment would decay too slowly.
    """
    word = step.to(torch.int64) * 0x9E3779B1 & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = ((word ^ (word >> shift)) * factor) & 0xFFFFFFFF
    word = word ^ (word >> 16)
    return (word - 2**31).to(torch.int32)


def round_to_bf16(values: Tensor, salt: Tensor) -> None:
    """Rounds fp32 values in place to ones that bf16 holds, up with the probability that makes the mean right.

    What bf16 holds already stays as it is, so that a skipped update changes nothing. The largest nan becomes −0,
    which hides nothing: the weight was computed before and is nan.
    """
    bits = values.view(torch.int32)
    noise = torch.add(salt, bits, alpha=_SPREAD)
    noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    bits.add_(noise).bitwise_and_(-0x10000)
