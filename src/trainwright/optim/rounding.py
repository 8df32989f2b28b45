"""Stochastic rounding to bf16: up or down with the probabilities that keep the mean.

bf16 has 8 significant bits. With rounding to nearest, an update below a 512th of a weight is lost in every step. With
stochastic rounding, it is applied in some of the steps, and on average the weight moves as far as in fp32.

The noise is a hash of the value's bits, of the step and, for weights, of the position in a row, because equal weights
with equal updates, such as the gains of a norm, must not all be rounded in one direction. It depends neither on a
generator nor on the rank. A resumed run repeats it, replicas round identically, and shards of dim 0 round as the full
tensor does. A vector is one row, so its shards may round an element in the other direction.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B1 - 2**32  # 2³² over the golden ratio, as a signed 32-bit number
POSITION_FACTOR, MIX_FACTOR = 0x2C1B3C6D, 0x297A2D39  # odd numbers with irregular bits


def salt_of(step: Tensor) -> Tensor:
    """Returns 32 pseudo-random bits for a step, or for each of several.

    With a plain counter, the roundings of a constant value would be too regular, and a moment would decay too slowly.
    """
    word = step.to(torch.int64) * 0x9E3779B1 & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = ((word ^ (word >> shift)) * factor) & 0xFFFFFFFF
    word = word ^ (word >> 16)
    return (word - 2**31).to(torch.int32)


def positions_in(rows: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Returns the position in its row of each element `start` to `stop` of a tensor, int32; a vector is one row."""
    row_size = rows.shape[1:].numel() if rows.ndim > 1 else rows.numel()
    stop = rows.numel() if stop is None else stop
    dtype = torch.int32 if stop < 2**31 else torch.int64
    positions = torch.arange(start, stop, dtype=dtype, device=rows.device)
    return positions.remainder_(max(row_size, 1)).to(torch.int32)


def noise_of(values: Tensor, salt: Tensor, positions: Tensor | None = None) -> Tensor:
    """Returns 16 pseudo-random bits for each fp32 value, as int32.

    Equal values get equal bits unless their `positions`, int32 that broadcasts to the values, differ.
    """
    word = values.view(torch.int32)
    if positions is not None:
        word = word + positions * POSITION_FACTOR
    noise = torch.add(salt, word, alpha=GOLDEN)
    if positions is not None:
        noise = (noise ^ (noise >> 15)) * MIX_FACTOR
    return noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def round_to_bf16(values: Tensor, salt: Tensor, positions: Tensor | None = None) -> None:
    """Rounds fp32 values in place to values of bf16, up with the probability that keeps the mean.

    A value that bf16 can represent does not change, so a skipped update changes nothing. nan stays nan; adding noise to
    the nan that GPUs compute would give −0.
    """
    noise = noise_of(values, salt, positions).masked_fill_(values.isnan(), 0)
    values.view(torch.int32).add_(noise).bitwise_and_(-0x10000)
