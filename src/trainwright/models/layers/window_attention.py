"""Causal attention to the last keys only, by the kernel that skips the others; a mask where there is none."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from trainwright.backends import waits_for_memory
from trainwright.backends.private_torch import constant_in_compiled_code

WIDEST = 256
"""The largest width of a head that FlashAttention's kernels accept."""


def band(length: int, window: int, *, device: torch.device) -> Tensor:
    """Returns the mask [S, S] of a window: True for the query's own key and the `window` - 1 before it."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance < window)


def attend_within_window(
    queries: Tensor, keys: Tensor, values: Tensor, window: int, *, scale: float | None
) -> Tensor | None:
    """Mixes values [B, heads, S, W] of the window's keys by FlashAttention; None where its kernel cannot run."""
    if not _is_served(queries, values) or not _has_windows():
        return None
    from torch.nn.attention.varlen import varlen_attn

    num_rows, num_heads, length, width = queries.shape
    flat = [each.transpose(1, 2).flatten(0, 1) for each in (queries, keys, values)]  # [B × S, heads, W]
    starts = torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32, device=queries.device)
    options: dict[str, Any] = {"enable_gqa": True} if _names_groups() else {}
    mixed: Any = varlen_attn(*flat, starts, starts, length, length, scale=scale, window_size=(window - 1, 0), **options)
    result: Tensor = mixed.view(num_rows, length, num_heads, width).transpose(1, 2)
    return result


def _is_served(queries: Tensor, values: Tensor) -> bool:
    is_narrow = queries.dtype in (torch.bfloat16, torch.float16)
    width = queries.shape[-1]
    fits = width == values.shape[-1] and width <= WIDEST and not width % 8
    return waits_for_memory(queries.device) and is_narrow and fits and not hasattr(queries, "device_mesh")


@constant_in_compiled_code
def _has_windows() -> bool:
    return "window_size" in _arguments()


@constant_in_compiled_code
def _names_groups() -> bool:
    """Returns True if fewer keys than queries must be announced, which torch 2.11 does not know."""
    return "enable_gqa" in _arguments()


def _arguments() -> tuple[str, ...]:
    from torch.nn.attention.varlen import varlen_attn

    return tuple(inspect.signature(varlen_attn).parameters)
