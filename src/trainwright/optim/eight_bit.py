"""AdamW with both moments in 8 bits: the encoding of moments, and the step in plain torch.

Each row of dim 0 is divided into blocks of 256 elements. A block has an fp32 scale, its largest magnitude:

    first  ≈ scale · sign(code) · (code / 127)²     int8, rounded to nearest
    second ≈ scale · (code / 255)⁴                  uint8, rounded stochastically

The powers assign relatively more codes to small elements of a block. The second moment changes by a thousandth in a
step, far less than the distance between two codes; rounded to nearest, it would never change. A positive second moment
is never rounded to 0, which would make the next update very large.

Blocks do not depend on how dim 0 is sharded, so a checkpoint fits any number of ranks. On a GPU adamw_kernels.py
computes the same in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.backends import waits_for_memory
from trainwright.backends.private_torch import has_triton
from trainwright.errors import ConfigError
from trainwright.optim.rounding import noise_of, positions_in, round_to_bf16, salt_of
from trainwright.optim.sharded import shard_like
from trainwright.parallel.mesh import is_split, local, own_gradient

BLOCK = 256
"""The number of elements of a row that share a scale."""
MIN_ELEMENTS = 4096
"""Smaller parameters keep moments in fp32, because they need little memory, and biases and gains are sensitive."""
MIN_ROW = 16
"""The minimum number of elements of a row; the scales of shorter rows would need as much memory as the codes save."""
CHUNK_ELEMENTS = 2**23
"""The number of elements that the step in plain torch processes at once."""
FIRST, SECOND = "exp_avg", "exp_avg_sq"
SCALES = {FIRST: "exp_avg_scale", SECOND: "exp_avg_sq_scale"}
CODE_DTYPES = {FIRST: torch.int8, SECOND: torch.uint8}
TINY = 1e-37
"""Blocks below this are stored as 0: the reciprocal of their scale would overflow."""


def is_quantized(parameter: Tensor) -> bool:
    """Returns True if the moments of this parameter have 8 bits; depends on its full shape, the same on every rank."""
    return parameter.ndim > 1 and parameter.numel() >= MIN_ELEMENTS and parameter.shape[1:].numel() >= MIN_ROW


def has_codes(state: Mapping[str, Any]) -> bool:
    """Returns True if the moments in a parameter's state have 8 bits."""
    return SCALES[FIRST] in state


def zero_codes(parameter: Tensor) -> dict[str, Tensor]:
    """Returns the codes and scales of moments of 0, sharded like the parameter."""
    _check_layout(parameter)
    shape = (parameter.shape[0], _num_blocks(parameter))
    own = local(parameter)
    state = {}
    for key, dtype in CODE_DTYPES.items():
        state[key] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format).detach()
        scales = torch.zeros(own.shape[0], _num_blocks(own), dtype=torch.float32, device=own.device)
        state[SCALES[key]] = _as_shard(scales, parameter, shape)
    return state


def encode_state(state: dict[str, Any], parameter: Tensor) -> None:
    """Replaces moments of a parameter that were saved in fp32 or bf16 by codes, in place."""
    codes = zero_codes(parameter)
    for key in (FIRST, SECOND):
        moment = _blocks(_rows(local(shard_like(state[key], parameter)).to(torch.float32)))
        if moment.numel():
            found, scales = encode_first(moment) if key == FIRST else encode_second(moment, None)
            own = local(codes[key])
            own.copy_(_unblocked(found, own))
            local(codes[SCALES[key]]).copy_(scales)
    state.update(codes)


def decode_state(state: dict[str, Any]) -> None:
    """Replaces the codes of a parameter's moments by their values in fp32, in place."""
    for key, decode in ((FIRST, decode_first), (SECOND, decode_second)):
        codes, scales = state[key], state.pop(SCALES[key])
        moment = torch.zeros_like(codes, dtype=torch.float32)
        own = local(moment)
        if own.numel():
            own.copy_(_unblocked(decode(_blocks(_rows(local(codes))), local(scales)), own))
        state[key] = moment


def place_scales(state: dict[str, Any], parameter: Tensor) -> None:
    """Shards loaded scales, which every rank has in full, like the parameter along dim 0."""
    for key in SCALES.values():
        if key in state:
            state[key] = shard_like(state[key], parameter)


def encode_first(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes [rows, blocks, 256] of a first moment and its scales [rows, blocks]."""
    magnitudes = blocks.abs()
    scales = magnitudes.amax(-1)
    roots = magnitudes.mul_(_reciprocal(scales)).sqrt_()
    codes = roots.mul_(127.0).add_(0.5).floor_().clamp_(max=127.0).copysign_(blocks)
    return codes.to(torch.int8), scales


def decode_first(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the first moment of blocks in fp32."""
    roots = codes.to(torch.float32).mul_(1.0 / 127.0)
    return roots.mul_(roots.abs()).mul_(scales.unsqueeze(-1))


def encode_second(blocks: Tensor, salt: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the codes [rows, blocks, 256] of a second moment and its scales [rows, blocks].

    Rounds to nearest without a salt.
    """
    scales = blocks.amax(-1)
    powers = (blocks * _reciprocal(scales)).mul_(255.0**4)  # in this order: the product of the factors may overflow
    lower = powers.sqrt().sqrt_().floor_().clamp_(max=254.0)
    below = lower.square().square_()
    distance = (lower + 1.0).square_().square_().sub_(below)
    chance: Tensor | float = 0.5
    if salt is not None:
        noise = noise_of(blocks, salt, positions_in(blocks[:1].flatten()).view(blocks.shape[1:]))
        chance = noise.to(torch.float32).add_(0.5).mul_(2.0**-16)
    is_up = powers.sub_(below) > distance.mul_(chance)
    codes = lower.add_(is_up).clamp_(min=1.0).masked_fill_(blocks == 0.0, 0.0)
    return codes.to(torch.uint8), scales


def decode_second(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the second moment of blocks in fp32."""
    return codes.to(torch.float32).mul_(1.0 / 255.0).square_().square_().mul_(scales.unsqueeze(-1))


class StepNumbers(NamedTuple):
    """The scalars of one step on the device: those of the optimizer's group, and one row per parameter."""

    rates: Tensor
    """[parameters, 4] in fp32: lr / bias correction of the first moment, lr · weight_decay, 1 / root of the bias
    correction of the second moment, and the factor on gradients."""
    salts: Tensor
    """[parameters] in int32, for stochastic rounding."""
    found_inf: Tensor | None
    """Nonzero if the step is skipped."""
    betas: tuple[float, float]
    eps: float


def step_numbers(
    steps: Sequence[Tensor], group: Mapping[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None
) -> StepNumbers:
    """Returns the scalars of a step of a group; `steps` are the counters, including this step."""
    count = torch.stack(list(steps)).to(torch.float64)
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    if isinstance(lr, Tensor):
        rate = lr.to(device=count.device, dtype=torch.float64, non_blocking=True).reshape(())
    else:  # not `torch.tensor`, which would copy a number from the host and synchronize
        rate = torch.full_like(count[0], lr)
    factor = torch.ones_like(count) if grad_scale is None else (1.0 / grad_scale.to(torch.float64)).expand_as(count)
    columns = (
        rate / (1.0 - beta1**count),
        (rate * group["weight_decay"]).expand_as(count),
        (1.0 - beta2**count).rsqrt(),
        -factor if group["maximize"] else factor,
    )
    rates = torch.stack(columns, 1).to(torch.float32)
    return StepNumbers(rates, salt_of(count), found_inf, (beta1, beta2), group["eps"])


def step_quantized(
    parameter: Any, weight: Any, state: Mapping[str, Tensor], numbers: StepNumbers, row: int, *, is_stochastic: bool
) -> None:
    """Runs one AdamW step of a parameter whose state has codes.

    `weight` is the tensor that is stepped: the parameter itself, or its fp32 master, from which it is rounded. `row` is
    the parameter's row in `numbers`.
    """
    own, gradient = local(parameter), own_gradient(parameter)
    assert gradient is not None  # parameters without a gradient are skipped
    if not own.numel():
        return  # this rank has no rows
    master = None if weight is parameter else local(weight)
    moments = [local(state[key]) for key in (FIRST, SCALES[FIRST], SECOND, SCALES[SECOND])]
    has_kernel = waits_for_memory(own.device) and has_triton()
    if has_kernel and all(each.is_contiguous() for each in (own, *moments, *([] if master is None else [master]))):
        from trainwright.optim import adamw_kernels  # needs Triton

        adamw_kernels.step_quantized_by_kernel(
            own, master, gradient, moments, numbers, row, is_stochastic=is_stochastic
        )
    else:
        _step_in_torch(own, master, gradient, moments, numbers, row, is_stochastic=is_stochastic)


def _step_in_torch(
    parameter: Tensor,
    master: Tensor | None,
    gradient: Tensor,
    moments: Sequence[Tensor],
    numbers: StepNumbers,
    row: int,
    *,
    is_stochastic: bool,
) -> None:
    step_size, decay, root, factor = numbers.rates[row].unbind()
    salt, (beta1, beta2) = numbers.salts[row], numbers.betas
    skip = None if numbers.found_inf is None else numbers.found_inf.reshape(()) != 0
    num_rows = max(1, CHUNK_ELEMENTS // parameter.shape[1:].numel())
    for start in range(0, parameter.shape[0], num_rows):
        some = slice(start, start + num_rows)
        first_codes, first_scales, second_codes, second_scales = (each[some] for each in moments)
        blocks = _blocks(_rows(gradient[some].to(torch.float32))) * factor
        first = decode_first(_blocks(_rows(first_codes)), first_scales).lerp_(blocks, 1.0 - beta1)
        second = decode_second(_blocks(_rows(second_codes)), second_scales).mul_(beta2)
        second.addcmul_(blocks, blocks, value=1.0 - beta2)
        update = first * step_size / (second.sqrt() * root + numbers.eps)
        stepped = parameter[some] if master is None else master[some]
        weight = stepped.to(torch.float32)
        # In torch's order, because 1 - lr · weight_decay would round small decays to 0.
        weight = weight - weight * decay - _unblocked(update, stepped)
        new = [*encode_first(first), *encode_second(second, salt)]
        old = [first_codes, first_scales, second_codes, second_scales]
        pairs = [(old[0], _unblocked(new[0], old[0])), (old[1], new[1])]
        pairs += [(old[2], _unblocked(new[2], old[2])), (old[3], new[3])]
        if master is not None:
            pairs.append((parameter[some], weight.to(parameter.dtype)))
        elif is_stochastic and parameter.dtype == torch.bfloat16:
            weight = weight.contiguous()
            round_to_bf16(weight, salt, positions_in(weight[0].flatten()).view(weight.shape[1:]))
        pairs.append((stepped, weight.to(stepped.dtype)))
        for kept, found in pairs:
            kept.copy_(found if skip is None else torch.where(skip, kept, found))


def _num_blocks(parameter: Tensor) -> int:
    return -(-parameter.shape[1:].numel() // BLOCK)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1)


def _blocks(rows: Tensor) -> Tensor:
    """Returns rows [R, N] as [R, blocks, 256], padded with zeros."""
    return F.pad(rows, (0, -rows.shape[1] % BLOCK)).view(rows.shape[0], -1, BLOCK)


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    """Reverses `_blocks`: returns the elements in the shape of `like`."""
    rows = blocks.flatten(1)
    return rows[:, : like.shape[1:].numel()].reshape(like.shape)


def _reciprocal(scales: Tensor) -> Tensor:
    """Returns 1 / scale for each block, 0 for blocks whose scale is too small; nan stays nan."""
    return torch.where(scales < TINY, 0.0, 1.0 / scales).unsqueeze(-1)


def _check_layout(parameter: Any) -> None:
    """Raises for shards that would divide a block of elements."""
    for placement in parameter.placements if is_split(parameter) else ():
        dim = getattr(placement, "dim", 0)
        width = local(parameter).shape[1:].numel()
        if dim > 1 or (dim == 1 and width % BLOCK):
            raise ConfigError(
                f"state: 8bit supports parameters that are sharded along dim 0, or along dim 1 in multiples of {BLOCK} "
                f"elements. One of shape {tuple(parameter.shape)} is sharded along dim {dim}, {width} elements of each "
                "row per rank. Use runtime.mesh.fsdp instead of tensor, or remove state."
            )


def _as_shard(own: Tensor, parameter: Any, shape: tuple[int, int]) -> Tensor:
    """Returns this rank's scales; as a DTensor of the full shape if the parameter is a DTensor."""
    if not is_split(parameter):
        return own
    from torch.distributed.tensor import DTensor  # slow to import, and a single process does not need it

    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
