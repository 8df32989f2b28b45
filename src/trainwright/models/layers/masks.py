"""Which key each query may see. Masks are bool and broadcast to [B, heads, queries, keys]: True means "may see"."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.errors import DataError
from trainwright.labels import IGNORED_LABEL
from trainwright.models.layers.document_borders import (
    DocumentBorders,
    document_borders,
    has_blocks,
    visible_pairs,
)

# What a decoder's layers get: a mask [B, 1, S, S], or the borders of documents in blocks.
Mask = Tensor | DocumentBorders


def unpadded_keys(attention_mask: Tensor | None) -> Tensor | None:
    """Returns the mask of an encoder, [B, 1, 1, S]: every query sees every key that is not padding (0).

    A mask [B, 1, S, S] is bool and taken as it is. None stays None: all see all.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() == 4:
        return checked_mask(attention_mask)
    visible = attention_mask.bool()[:, None, None, :]
    # A row of nothing but padding sees all of it: a softmax over nothing is nan in some kernels.
    return visible | ~visible.any(dim=-1, keepdim=True)


def visible_keys(attention_mask: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """Returns the mask of a decoder, [B, 1, S, S], or None where causality alone decides."""
    visible = None
    if attention_mask is not None:
        visible = checked_mask(attention_mask) if attention_mask.dim() == 4 else causal_mask(attention_mask)
    if document_ids is not None:
        same = visible_pairs(document_ids)
        visible = same if visible is None else visible & same
    return visible


def decoder_mask(attention_mask: Tensor | None, document_ids: Tensor | None, *, is_whole: bool) -> Mask | None:
    """Returns what `visible_keys` does or, where documents alone decide and blocks of them pay, their borders.

    `is_whole` is that of the model's sequence: one that is split over ranks takes masks of all pairs only.
    """
    if attention_mask is None and document_ids is not None and is_whole and has_blocks(document_ids):
        return document_borders(document_ids)
    return visible_keys(attention_mask, document_ids)


def causal_mask(attention_mask: Tensor) -> Tensor:
    """Returns a mask [B, 1, S, S], True where a query may see a key: not later, and not padding (0)."""
    length = attention_mask.shape[-1]
    ones = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device)
    visible = ones.tril() & attention_mask.bool()[:, None, None, :]
    # Padding sees itself: a row without any visible key would be a softmax over nothing, which is nan.
    return visible | ones.triu().tril()


def checked_mask(attention_mask: Tensor) -> Tensor:
    """Returns a mask of four dims, or refuses one that is not bool."""
    if attention_mask.dtype != torch.bool:
        raise DataError(
            f"attention_mask {tuple(attention_mask.shape)} is {attention_mask.dtype}. A mask of four dims says which "
            "key each query may see and must be bool (True: may see); one of two dims is 0 at padding."
        )
    return attention_mask


def next_tokens(labels: Tensor) -> Tensor:
    """Returns the labels [B, S] moved one place to the left, so that position i is scored on token i + 1.

    The labels are shifted, not the logits: cutting a position off the logits would copy them all.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
