"""Rotary positions: each pair of a head's features is rotated by an angle that grows with the position.

Scaling stretches the low frequencies, so that a model can read rows longer than those it was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.backends import waits_for_memory
from trainwright.errors import ConfigError

# (cosines, sines) of the rotation angles, each [S, W / 2], or [B, 1, S, W / 2] if rows have different positions.
Rotations = tuple[Tensor, Tensor]

SCALINGS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The kinds of scaling, with Hugging Face's names, and the numbers that each needs."""


def rotary_angles(
    positions: Tensor, *, head_size: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> Rotations:
    """Returns the cosines and sines by which each position (float32) rotates each pair of a head's features.

    They are computed in every forward instead of stored in a buffer. This takes a few small kernels, and a model can be
    created on the meta device or cast to 16 bits without losing the precision of its positions.
    """
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    periods = theta**exponents  # positions per radian
    periods = periods if scaling is None else scaled_periods(periods, scaling)
    if torch.compiler.is_compiling():
        cosines, sines = _opaque_rotations(positions, periods)
        return cosines, sines
    return _rotations(positions, periods)


def _rotations(positions: Tensor, periods: Tensor) -> Rotations:
    angles = positions[..., None] / periods
    return angles.cos(), angles.sin()


@torch.library.custom_op("trainwright::rotations", mutates_args=())
def _opaque_rotations(positions: Tensor, periods: Tensor) -> tuple[Tensor, Tensor]:
    # A custom operation, because the compiler would otherwise recompute the cosines and sines for every element of
    # every head in every layer, which took an eighth of a training step.
    return _rotations(positions, periods)


@_opaque_rotations.register_fake
def _shapes_of_rotations(positions: Tensor, periods: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, *periods.shape)
    return positions.new_empty(shape), positions.new_empty(shape)


def scaled_periods(periods: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Stretches the periods [W / 2] by `factor`: all of them, or only the long ones as in Llama 3.

    llama3: a period that fits at least `high_freq_factor` times into the original context is unchanged, one that fits
    fewer than `low_freq_factor` times is fully stretched, and in between the frequencies are interpolated.
    """
    stretched: Tensor = periods * scaling["factor"]
    if scaling["rope_type"] == "linear":
        return stretched
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi * periods)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: unchanged, 0: stretched
    blended: Tensor = 1.0 / ((1 - share) / stretched + share / periods)
    return blended


def rotate(heads: Tensor, rotations: Rotations) -> Tensor:
    """Rotates features i and i + W/2 of each head [B, heads, S, W] by their position's angle."""
    cosines, sines = rotations
    if waits_for_memory(heads.device) and not torch.compiler.is_compiling():
        turn: Callable[..., Tensor] = _Turn.apply  # torch has no types here
        return turn(heads, cosines, sines)
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return rotated.type_as(heads)  # the angles are float32 and would promote 16-bit heads


class _Turn(torch.autograd.Function):
    """The rotation with fewer passes over memory than autograd; its gradient is the inverse rotation.

    For GPUs without a compiler; saves 4 % of a training step of a model with a billion weights.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turn(heads, cosines, sines)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _turn(grad, cosines, -sines), None, None


def _turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    turned = torch.empty_like(heads)
    first, second = heads.chunk(2, dim=-1)
    half = first.shape[-1]
    turned[..., :half] = torch.addcmul(first * cosines, second, sines, value=-1)
    turned[..., half:] = torch.addcmul(second * cosines, first, sines)
    return turned


def checked_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns a scaling with its `rope_type` and numbers, or None; rejects unknown kinds."""
    if not scaling:
        return None
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"rope_scaling is {scaling!r}. Use a mapping such as {{rope_type: linear, factor: 2.0}}.")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        if set(scaling) - {"type", "rope_type", "rope_theta"}:
            raise ConfigError(
                f"rope_scaling: {dict(scaling)} scales nothing. Give its rope_type: {', '.join(SCALINGS)}."
            )
        return None
    if kind not in list(SCALINGS):  # a list, because unhashable values are rejected too
        raise ConfigError(f"rope_scaling: the rope_type {kind!r} is not supported. Known: {', '.join(SCALINGS)}.")
    needed = SCALINGS[kind]
    numbers = [scaling.get(name) for name in needed]
    are_right = all(isinstance(one, int | float) and not isinstance(one, bool) and one > 0 for one in numbers)
    unknown = set(scaling) - {*needed, "type", "rope_type", "rope_theta"}
    if not are_right or unknown:
        raise ConfigError(
            f"rope_scaling: {kind} needs the numbers {', '.join(needed)}, all above 0, and nothing else; "
            f"got {dict(scaling)}."
        )
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ConfigError(
            f"rope_scaling: high_freq_factor {scaling['high_freq_factor']} must be above low_freq_factor "
            f"{scaling['low_freq_factor']}: between the two, frequencies are interpolated."
        )
    return {"rope_type": kind, **{name: scaling[name] for name in needed}}
