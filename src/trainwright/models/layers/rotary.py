"""Rotary positions: each pair of a head's features is turned by an angle that grows with the position.

Scaling stretches the slow turns, so that a model reads rows longer than those it was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.errors import ConfigError

# (cosines, sines) of the rotation angles, each [S, W / 2], or [B, 1, S, W / 2] where rows have positions of their own.
Rotations = tuple[Tensor, Tensor]

SCALINGS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The kinds of scaling, in Hugging Face's words, and the numbers that each needs."""


def rotary_angles(
    positions: Tensor, *, head_size: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> Rotations:
    """Returns the cosines and sines by which each position (float32) rotates each pair of a head's features.

    They are worked out in every forward pass instead of kept in a buffer: a few tiny kernels, for which a model may
    be made on the meta device or cast to 16 bits without its positions being lost or blurred.
    """
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    periods = theta**exponents  # positions per radian
    angles = positions[..., None] / (periods if scaling is None else scaled_periods(periods, scaling))
    return angles.cos(), angles.sin()


def scaled_periods(periods: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Stretches the periods [W / 2] by `factor`: all of them, or as Llama 3 does only the long ones.

    llama3: a turn that fits `high_freq_factor` times into the original context stays as it is, one that fits fewer
    than `low_freq_factor` times is stretched in full, and between the two the frequencies are blended.
    """
    stretched: Tensor = periods * scaling["factor"]
    if scaling["rope_type"] == "linear":
        return stretched
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi * periods)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: as it is, 0: stretched
    blended: Tensor = 1.0 / ((1 - share) / stretched + share / periods)
    return blended


def rotate(heads: Tensor, rotations: Rotations) -> Tensor:
    """Rotates features i and i + W/2 of each head [B, heads, S, W] by their position's angle."""
    cosines, sines = rotations
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return rotated.type_as(heads)  # the angles are float32 and would promote 16-bit heads


def checked_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns a scaling with its `rope_type` and numbers, None for none; refuses kinds that there are not."""
    if not scaling:
        return None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise ConfigError(
            f"rope_scaling: the rope_type {kind!r} is not supported. Known: {', '.join(SCALINGS)}.", where="model"
        )
    needed = SCALINGS[kind]
    absent = [name for name in needed if not isinstance(scaling.get(name), int | float)]
    unknown = set(scaling) - {*needed, "type", "rope_type", "rope_theta"}
    if absent or unknown:
        raise ConfigError(
            f"rope_scaling: {kind} needs the numbers {', '.join(needed)} and nothing else, got {dict(scaling)}.",
            where="model",
        )
    return {"rope_type": kind, **{name: scaling[name] for name in needed}}
