"""Causal attention with FlashAttention's kernel for sequences of variable length: packed rows, and windows.

`torch.nn.attention.varlen` has this kernel, which reads the starts of sequences instead of a mask. Devices and dtypes
that it does not support use a mask.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.backends import waits_for_memory
from trainwright.backends.private_torch import constant_in_compiled_code
from trainwright.models.layers.document_attention import visible_pairs
from trainwright.models.layers.kernel_table import FLASH_WIDTHS


class DocumentStarts(NamedTuple):
    """Rows [B, S] of contiguous documents, given by their first tokens, and the window within them, if any."""

    document_ids: Tensor
    starts: Tensor
    """[B × S + 1], int32: the first token of each document, counted over all rows; then the number of tokens."""
    window: int | None = None

    def visible(self) -> Tensor:
        """Returns the mask [B, 1, S, S] of the same documents and window."""
        mask = visible_pairs(self.document_ids)
        if self.window is None:
            return mask
        return mask & band(mask.shape[-1], self.window, device=mask.device)


def document_starts(document_ids: Tensor, *, window: int | None = None) -> DocumentStarts:
    """Returns the starts of the contiguous documents in rows [B, S], without synchronizing.

    The host does not know the number of documents, so there is one entry for each token; unused entries are empty
    documents.
    """
    is_start = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True).flatten()
    total = document_ids.numel()
    tokens = torch.arange(total, dtype=torch.int32, device=document_ids.device)
    # Tokens that start no document write to the last entry, which is the number of tokens.
    indices = torch.where(is_start, is_start.cumsum(dim=0) - 1, total)
    starts = tokens.new_full((total + 1,), total).scatter(0, indices, torch.where(is_start, tokens, total))
    return DocumentStarts(document_ids, starts, window)


def band(length: int, window: int, *, device: torch.device) -> Tensor:
    """Returns the mask [S, S] of a window: True for the query's own key and the `window` - 1 previous keys."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance < window)


def attend_within_window(
    queries: Tensor, keys: Tensor, values: Tensor, window: int, *, scale: float | None
) -> Tensor | None:
    """Attention [B, heads, S, W] over the window's keys; returns None if the kernel cannot run."""
    num_rows, _, length, _ = queries.shape
    starts = torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32, device=queries.device)
    return attend_by_starts(queries, keys, values, starts, window=window, scale=scale)


def attend_by_starts(
    queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, *, window: int | None, scale: float | None
) -> Tensor | None:
    """Attention [B, heads, S, W] over earlier keys of the same sequence; returns None if the kernel cannot run.

    `starts` are the first tokens of the sequences, counted over all rows, and at the end the number of tokens.
    """
    if not _is_served(queries, values) or "window_size" not in _arguments():
        return None
    from torch.nn.attention.varlen import varlen_attn

    num_rows, num_heads, length, width = queries.shape
    flat = [each.transpose(1, 2).flatten(0, 1) for each in (queries, keys, values)]  # [B × S, heads, W]
    # torch 2.11 has no enable_gqa: it always accepts fewer key heads than query heads.
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _arguments() else {}
    options["window_size"] = (-1 if window is None else window - 1, 0)
    kernel: Any = varlen_attn  # its arguments differ between versions of torch
    mixed = kernel(*flat, starts, starts, length, length, scale=scale, **options)
    result: Tensor = mixed.view(num_rows, length, num_heads, width).transpose(1, 2)
    return result


def _is_served(queries: Tensor, values: Tensor) -> bool:
    is_narrow = queries.dtype in (torch.bfloat16, torch.float16)
    fits = queries.shape[-1] == values.shape[-1] and queries.shape[-1] in FLASH_WIDTHS
    return waits_for_memory(queries.device) and is_narrow and fits and not hasattr(queries, "device_mesh")


@constant_in_compiled_code
def _arguments() -> tuple[str, ...]:
    from torch.nn.attention.varlen import varlen_attn

    return tuple(inspect.signature(varlen_attn).parameters)
