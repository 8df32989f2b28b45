"""The step of AdamW as one Triton kernel, for moments in 8 bits, and for weights or moments in 16 bits.

Each element is read and written once, including clipping, skipping and the rounding of weights and moments:

| bf16 weights and gradients, bytes per element | fp32 master | stochastic rounding |
|-----------------------------------------------|-------------|---------------------|
| moments in fp32                               | 28          | 22                  |
| moments in bf16                               | 20          | 14                  |
| moments in 8 bits                             | 16          | 10                  |

The formulas are those of adamw.py and eight_bit.py, which import this file if Triton is available. Results may differ
in the last bit of fp32, which can change the direction of a stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from trainwright.optim.eight_bit import BLOCK, TINY, StepNumbers
from trainwright.optim.rounding import GOLDEN, MIX_FACTOR, POSITION_FACTOR

BLOCKS = 8
"""Blocks of moments in 8 bits per program, each of 256 elements."""
ELEMENTS = 2048
"""Elements per program if moments are in fp32 or bf16."""
NUM_WARPS = 4


def step_by_kernel(
    parameter: Tensor,
    master: Tensor | None,
    gradient: Tensor,
    moments: Sequence[Tensor],
    numbers: StepNumbers,
    row: int,
    *,
    is_stochastic: bool,
) -> None:
    """Steps one contiguous parameter, its master if it has one, and both moments in place."""
    row_size = parameter.shape[1:].numel() if parameter.ndim > 1 else parameter.numel()
    written = [parameter, *moments] if master is None else [parameter, master, *moments]
    with torch.cuda.device(parameter.device):  # Triton launches on the current device
        _adamw_kernel[(triton.cdiv(parameter.numel(), ELEMENTS),)](
            parameter,
            parameter if master is None else master,
            gradient.contiguous(),
            *moments,
            numbers.rates[row],
            numbers.salts[row],
            numbers.rates if numbers.found_inf is None else numbers.found_inf,
            parameter.numel(),
            row_size,
            1.0 - numbers.betas[0],
            numbers.betas[1],
            1.0 - numbers.betas[1],
            numbers.eps,
            has_master=master is not None,
            is_stochastic=is_stochastic and master is None and parameter.dtype == torch.bfloat16,
            rounds_moments=moments[0].dtype == torch.bfloat16,
            may_skip=numbers.found_inf is not None,
            num_elements_of_program=ELEMENTS,
            golden=GOLDEN,
            position_factor=POSITION_FACTOR,
            mix_factor=MIX_FACTOR,
            num_warps=NUM_WARPS,
        )
    increment_version(written)  # like torch's own in-place operations, so that autograd rejects an outdated weight


def step_quantized_by_kernel(
    parameter: Tensor,
    master: Tensor | None,
    gradient: Tensor,
    moments: Sequence[Tensor],
    numbers: StepNumbers,
    row: int,
    *,
    is_stochastic: bool,
) -> None:
    """Steps one contiguous parameter, its master if it has one, and the codes and scales of both moments in place."""
    row_size = parameter.numel() // parameter.shape[0]
    per_row = triton.cdiv(row_size, BLOCK)
    num_blocks = parameter.shape[0] * per_row
    written = [parameter, *moments] if master is None else [parameter, master, *moments]
    with torch.cuda.device(parameter.device):  # Triton launches on the current device
        _eight_bit_adamw_kernel[(triton.cdiv(num_blocks, BLOCKS),)](
            parameter,
            parameter if master is None else master,
            gradient.contiguous(),
            *moments,
            numbers.rates[row],
            numbers.salts[row],
            numbers.rates if numbers.found_inf is None else numbers.found_inf,
            num_blocks,
            row_size,
            per_row,
            1.0 - numbers.betas[0],
            numbers.betas[1],
            1.0 - numbers.betas[1],
            numbers.eps,
            has_master=master is not None,
            is_stochastic=is_stochastic and master is None and parameter.dtype == torch.bfloat16,
            may_skip=numbers.found_inf is not None,
            is_even=row_size % BLOCK == 0,
            block_size=BLOCK,
            blocks=BLOCKS,
            golden=GOLDEN,
            position_factor=POSITION_FACTOR,
            mix_factor=MIX_FACTOR,
            tiny=TINY,
            num_warps=NUM_WARPS,
        )
    increment_version(written)  # like torch's own in-place operations, so that autograd rejects an outdated weight


@triton.jit
def _mixed(value, position, salt, golden, position_factor, mix_factor):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # Triton gives annotations a meaning of its own
    """Returns 16 pseudo-random bits for each value and its position in a row: `noise_of` of rounding.py."""
    noise = (value.to(tl.int32, bitcast=True) + position * position_factor) * golden + salt
    return (((noise ^ (noise >> 15)) * mix_factor) >> 16) & 0xFFFF


@triton.jit
def _rounded(value, noise):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Returns fp32 values rounded to values of bf16: up if the noise carries. nan stays nan."""
    noise = tl.where(value == value, noise, 0)
    return ((value.to(tl.int32, bitcast=True) + noise) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    parameter,  # noqa: ANN001
    master,  # noqa: ANN001
    gradient,  # noqa: ANN001
    first,  # noqa: ANN001
    second,  # noqa: ANN001
    rates,  # noqa: ANN001
    salt,  # noqa: ANN001
    found_inf,  # noqa: ANN001
    num_elements,  # noqa: ANN001
    row_size,  # noqa: ANN001
    share1,  # noqa: ANN001
    beta2,  # noqa: ANN001
    share2,  # noqa: ANN001
    eps,  # noqa: ANN001
    has_master: tl.constexpr,
    is_stochastic: tl.constexpr,
    rounds_moments: tl.constexpr,
    may_skip: tl.constexpr,
    num_elements_of_program: tl.constexpr,
    golden: tl.constexpr,
    position_factor: tl.constexpr,
    mix_factor: tl.constexpr,
):
    step_size, decay = tl.load(rates), tl.load(rates + 1)
    root, factor = tl.load(rates + 2), tl.load(rates + 3)
    start = tl.program_id(0).to(tl.int64) * num_elements_of_program
    number = tl.arange(0, num_elements_of_program)
    offset = start + number
    inside = offset < num_elements
    if may_skip:
        inside = inside & (tl.load(found_inf) == 0.0)  # a skipped step reads and writes nothing

    grad = tl.load(gradient + offset, mask=inside, other=0.0).to(tl.float32) * factor
    moment1 = tl.load(first + offset, mask=inside, other=0.0).to(tl.float32)
    moment2 = tl.load(second + offset, mask=inside, other=0.0).to(tl.float32)
    moment1 = moment1 + (grad - moment1) * share1
    moment2 = moment2 * beta2 + grad * grad * share2
    update = moment1 * step_size / (tl.sqrt(moment2) * root + eps)
    weight = tl.load(master + offset, mask=inside, other=0.0).to(tl.float32)
    weight = weight - weight * decay - update
    if has_master:
        tl.store(master + offset, weight, mask=inside)
    salt_bits = tl.load(salt)
    if is_stochastic:
        # One 64-bit remainder per program, because one per element would take longer than the memory access.
        position = ((start % row_size).to(tl.int32) + number) % row_size
        weight = _rounded(weight, _mixed(weight, position, salt_bits, golden, position_factor, mix_factor))
    tl.store(parameter + offset, weight.to(parameter.dtype.element_ty), mask=inside)
    if rounds_moments:  # without positions, as in adamw.py
        noise1 = ((moment1.to(tl.int32, bitcast=True) * golden + salt_bits) >> 16) & 0xFFFF
        noise2 = ((moment2.to(tl.int32, bitcast=True) * golden + salt_bits) >> 16) & 0xFFFF
        moment1, moment2 = _rounded(moment1, noise1), _rounded(moment2, noise2)
    tl.store(first + offset, moment1.to(first.dtype.element_ty), mask=inside)
    tl.store(second + offset, moment2.to(second.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _eight_bit_adamw_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    parameter,  # noqa: ANN001
    master,  # noqa: ANN001
    gradient,  # noqa: ANN001
    first,  # noqa: ANN001
    first_scale,  # noqa: ANN001
    second,  # noqa: ANN001
    second_scale,  # noqa: ANN001
    rates,  # noqa: ANN001
    salt,  # noqa: ANN001
    found_inf,  # noqa: ANN001
    num_blocks,  # noqa: ANN001
    row_size,  # noqa: ANN001
    per_row,  # noqa: ANN001
    share1,  # noqa: ANN001
    beta2,  # noqa: ANN001
    share2,  # noqa: ANN001
    eps,  # noqa: ANN001
    has_master: tl.constexpr,
    is_stochastic: tl.constexpr,
    may_skip: tl.constexpr,
    is_even: tl.constexpr,
    block_size: tl.constexpr,
    blocks: tl.constexpr,
    golden: tl.constexpr,
    position_factor: tl.constexpr,
    mix_factor: tl.constexpr,
    tiny: tl.constexpr,
):
    step_size, decay = tl.load(rates), tl.load(rates + 1)
    root, factor = tl.load(rates + 2), tl.load(rates + 3)
    salt_bits = tl.load(salt)

    block = tl.program_id(0) * blocks + tl.arange(0, blocks)
    is_block = block < num_blocks
    if may_skip:
        is_block = is_block & (tl.load(found_inf) == 0.0)  # a skipped step reads and writes nothing
    column = (block % per_row)[:, None] * block_size + tl.arange(0, block_size)[None, :]
    offset = (block // per_row).to(tl.int64)[:, None] * row_size + column
    inside = is_block[:, None]
    if not is_even:
        inside = inside & (column < row_size)

    grad = tl.load(gradient + offset, mask=inside, other=0.0).to(tl.float32) * factor
    root1 = tl.load(first + offset, mask=inside, other=0).to(tl.float32) * (1.0 / 127.0)
    scale1 = tl.load(first_scale + block, mask=is_block, other=0.0)
    moment1 = root1 * tl.abs(root1) * scale1[:, None]
    root2 = tl.load(second + offset, mask=inside, other=0).to(tl.float32) * (1.0 / 255.0)
    scale2 = tl.load(second_scale + block, mask=is_block, other=0.0)
    square = root2 * root2
    moment2 = square * square * scale2[:, None]

    moment1 = moment1 + (grad - moment1) * share1
    moment2 = moment2 * beta2 + grad * grad * share2
    update = moment1 * step_size / (tl.sqrt(moment2) * root + eps)
    weight = tl.load(master + offset, mask=inside, other=0.0).to(tl.float32)
    weight = weight - weight * decay - update
    if has_master:
        tl.store(master + offset, weight, mask=inside)
    if is_stochastic:
        weight = _rounded(weight, _mixed(weight, column, salt_bits, golden, position_factor, mix_factor))
    tl.store(parameter + offset, weight.to(parameter.dtype.element_ty), mask=inside)

    magnitude = tl.abs(moment1)
    scale1 = tl.max(magnitude, axis=1)
    inverse1 = tl.where(scale1 < tiny, 0.0, 1.0 / scale1)
    code1 = tl.minimum(tl.floor(tl.sqrt(magnitude * inverse1[:, None]) * 127.0 + 0.5), 127.0)
    code1 = tl.where(moment1 < 0.0, -code1, code1)
    tl.store(first + offset, code1.to(tl.int8), mask=inside)
    tl.store(first_scale + block, scale1, mask=is_block)

    scale2 = tl.max(moment2, axis=1)
    inverse2 = tl.where(scale2 < tiny, 0.0, 1.0 / scale2)
    power = moment2 * inverse2[:, None] * (255.0 * 255.0 * 255.0 * 255.0)
    lower = tl.minimum(tl.floor(tl.sqrt(tl.sqrt(power))), 254.0)
    square = lower * lower
    below = square * square
    square = (lower + 1.0) * (lower + 1.0)
    noise2 = _mixed(moment2, column, salt_bits, golden, position_factor, mix_factor)
    chance = (noise2.to(tl.float32) + 0.5) * (1.0 / 65536.0)
    code2 = lower + tl.where(power - below > (square * square - below) * chance, 1.0, 0.0)
    code2 = tl.where(moment2 == 0.0, 0.0, tl.maximum(code2, 1.0))
    tl.store(second + offset, code2.to(tl.int32).to(tl.uint8), mask=inside)
    tl.store(second_scale + block, scale2, mask=is_block)
