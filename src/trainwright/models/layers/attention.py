"""Attention over heads, the masks that limit it, and the operations of a model on its sequence.

Masks are bool and broadcast to [B, heads, queries, keys]; True means visible. `WholeSequence` is the sequence of a
model that is not sharded along it; parallel/context.py has the sharded one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainwright.backends import reads_at_once, waits_for_memory
from trainwright.errors import DataError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.layers.document_attention import (
    DocumentBorders,
    attend_within_documents,
    document_borders,
    has_blocks,
    padded_borders,
    visible_pairs,
)
from trainwright.models.layers.kernel_table import fastest, prefers_flash
from trainwright.models.layers.varlen_attention import DocumentStarts, attend_by_starts, attend_within_window, band

Mask = Tensor | DocumentBorders | DocumentStarts
"""The mask argument of a decoder's layers: a mask [B, 1, S, S], or documents by block boundaries or by their starts."""
MASK_NAMES = ("attention_mask", "decoder_attention_mask")
"""The fields of a batch that are 0 at padding."""
FLASH_BEFORE_CUDNN = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def is_full(attention_mask: Tensor) -> bool:
    """Returns True for a mask [B, S] of `full_rows`: no token is padding.

    Such a mask is recognized by its strides of 0, because compiled code, and code that must not synchronize, cannot
    read values.
    """
    return attention_mask.dim() == 2 and not any(attention_mask.stride())


def full_rows(num_rows: int, length: int, *, device: torch.device, dtype: torch.dtype = torch.bool) -> Tensor:
    """Returns a mask [B, S] of ones, for rows without padding, that `is_full` recognizes."""
    return torch.ones((), dtype=dtype, device=device).expand(num_rows, length)


def mark_full_rows(batch: Any) -> Any:
    """Returns a batch on the host in which masks [B, S] without padding are replaced with those of `full_rows`.

    Collators often add a mask of ones to full rows. Reading its values on the device would synchronize.
    """
    if not isinstance(batch, dict):
        return batch
    marked = {}
    for name in MASK_NAMES:
        mask: Any = batch.get(name)
        is_on_host = isinstance(mask, Tensor) and mask.dim() == 2 and reads_at_once(mask.device)
        if is_on_host and mask.numel() and not mask.is_floating_point() and mask.eq(1).all():
            marked[name] = full_rows(*mask.shape, device=mask.device, dtype=mask.dtype)
    return {**batch, **marked} if marked else batch


def unpadded_keys(attention_mask: Tensor | None) -> Tensor | None:
    """Returns the mask of an encoder, [B, 1, 1, S]: every query attends to every key that is not padding (0).

    A mask [B, 1, S, S] is bool and used unchanged. None stays None: all positions are visible.
    """
    if attention_mask is None or is_full(attention_mask):
        return None
    if attention_mask.dim() == 4:
        return checked_mask(attention_mask)
    visible = attention_mask.bool()[:, None, None, :]
    # In a row that consists of padding, all positions are visible, because the softmax over no keys is nan in some
    # kernels.
    return visible | ~visible.any(dim=-1, keepdim=True)


def visible_keys(attention_mask: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """Returns the mask of a decoder, [B, 1, S, S]; None if attention is only causal."""
    visible = None
    if attention_mask is not None:
        visible = checked_mask(attention_mask) if attention_mask.dim() == 4 else causal_mask(attention_mask)
    if document_ids is not None:
        same = visible_pairs(document_ids)
        visible = same if visible is None else visible & same
    return visible


def decoder_mask(
    attention_mask: Tensor | None,
    document_ids: Tensor | None = None,
    *,
    width: int | None = None,
    is_whole: bool = True,
) -> Mask | None:
    """Returns the mask argument for `attention` and the layers of a decoder, once per batch.

    Args:
        attention_mask: [B, S], 0 at padding. One of four dims is bool and used unchanged.
        document_ids: [B, S], equal for tokens that attend to each other.
        width: The width of the heads. For widths that flex attention does not support, each layer would have to create
            the mask.
        is_whole: That of the model's sequence; a sequence that is sharded over ranks accepts only masks.

    Returns:
        None if attention is only causal, block boundaries where they are faster, and otherwise a mask
        [B, 1, S, S].

    >>> decoder_mask(None) is None
    True
    >>> decoder_mask(torch.tensor([[1, 1, 0]]))[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    if attention_mask is not None and is_full(attention_mask):
        attention_mask = None
    if is_whole and attention_mask is None and document_ids is not None and has_blocks(document_ids, width=width):
        return document_borders(document_ids)
    is_padded = document_ids is None and attention_mask is not None and attention_mask.dim() == 2
    if is_whole and is_padded and attention_mask is not None and has_blocks(attention_mask, "padded", width=width):
        return padded_borders(attention_mask)
    return visible_keys(attention_mask, document_ids)


def causal_mask(attention_mask: Tensor) -> Tensor:
    """Returns a mask [B, 1, S, S], True where a query attends to a key that is not later and not padding (0)."""
    length = attention_mask.shape[-1]
    ones = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device)
    visible = ones.tril() & attention_mask.bool()[:, None, None, :]
    # Padding attends to itself, because the softmax of a row without visible keys is nan.
    return visible | ones.triu().tril()


def checked_mask(attention_mask: Tensor) -> Tensor:
    """Returns a mask of four dims, or rejects one that is not bool."""
    if attention_mask.dtype != torch.bool:
        raise DataError(
            f"attention_mask {tuple(attention_mask.shape)} is {attention_mask.dtype}. A mask of four dims says which "
            "key each query may see and must be bool (True: may see); one of two dims is 0 at padding."
        )
    return attention_mask


def next_tokens(labels: Tensor) -> Tensor:
    """Returns the labels [B, S] shifted to the left, so that position i predicts token i + 1.

    The labels are shifted instead of the logits, because removing a position from the logits would copy all of them.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def split_heads(projected: Tensor, head_size: int) -> Tensor:
    """Returns a view [B, H, S, W] of a projection [B, S, H × W].

    The number of heads is that of the tensor, because with tensor parallelism a rank has only some of them.
    """
    return projected.view(*projected.shape[:-1], -1, head_size).transpose(1, 2)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    head_size: int,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    sequence: WholeSequence | None = None,
) -> Tensor:
    """Computes attention [B, keys, H × W] → [B, queries, H × W] with torch's fastest kernel for the inputs.

    `mask` has four dims and broadcasts to [B, H, queries, keys]: bool (True: visible), or numbers that are added to the
    scores. `dropout` applies to the attention weights in any mode: pass 0 outside of training. `scale` multiplies the
    scores and defaults to 1 / √W. `sequence` is that of a layer whose positions may be sharded over ranks.
    """
    mixed = (sequence or WholeSequence()).attend(
        split_heads(queries, head_size),
        split_heads(keys, head_size),
        split_heads(values, head_size),
        mask=mask,
        dropout=dropout,
        scale=scale,
    )
    return mixed.transpose(1, 2).flatten(2)


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    mask: Mask | None = None,
    is_causal: bool = True,
    window: int | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention for your own model, with the fastest kernel for the inputs.

    Args:
        queries: [B, H, S, W].
        keys: [B, K, S, W], where H is a multiple of K; they are not repeated.
        values: [B, K, S, W].
        mask: None, the result of `decoder_mask(attention_mask, document_ids)`, or a tensor that broadcasts to
            [B, H, S, S]: bool (True: visible) or numbers that are added to the scores.
        is_causal: Whether a query attends only to keys that are not later. Ignored with a mask.
        window: Limits causal attention to that many keys: the query's own and the previous ones.
        dropout: Applied to the attention weights in any mode: pass 0 outside of training.
        scale: Multiplies the scores. Default: 1 / √W.

    Returns:
        The output, [B, H, S, W].

    >>> queries, keys = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    >>> attention(queries, keys, keys).shape
    torch.Size([2, 4, 5, 8])
    """
    if isinstance(mask, Tensor) and mask.dtype != torch.bool and not mask.is_floating_point():
        kind = str(mask.dtype).removeprefix("torch.")
        raise DataError(
            f"attention: mask has the dtype {kind} and the shape {list(mask.shape)}. Use bool (True: visible) or "
            "numbers that are added to the scores. The attention_mask of a batch is for decoder_mask(attention_mask)."
        )
    enable_gqa = queries.shape[1] != keys.shape[1]
    if window is not None and window < keys.shape[2]:
        if not is_causal:
            raise DataError(f"attention: window is {window}, which needs is_causal=True.")
        length, width = queries.shape[2:]
        if mask is None and not dropout and fastest("window", length, width) == "varlen":
            mixed = attend_within_window(queries, keys, values, window, scale=scale)
            if mixed is not None:
                return mixed
        near = band(keys.shape[2], window, device=queries.device)
        if isinstance(mask, DocumentBorders | DocumentStarts):
            mask = mask.visible()
        if mask is None or mask.dtype == torch.bool:
            mask = near if mask is None else mask & near
        else:
            mask = mask.masked_fill(~near, torch.finfo(mask.dtype).min)
    options: dict[str, Any] = {"dropout": dropout, "scale": scale, "enable_gqa": enable_gqa}
    return WholeSequence().attend(queries, keys, values, mask=mask, is_causal=is_causal and mask is None, **options)


def needs_equal_heads(queries: Tensor) -> bool:
    """Returns True if masked attention with fewer key heads than query heads would use torch's math kernel.

    The math kernel stores all weights [B, H, S, S]. On a GPU only cuDNN's kernel accepts both a mask and grouped heads,
    in 16 bits and for widths up to 128 (256 on Hopper) that are multiples of 8; with equal heads other kernels accept
    the mask (benchmarks/results/grouped_attention.md).
    """
    is_served = queries.dtype in (torch.bfloat16, torch.float16) and queries.shape[-1] % 8 == 0
    return waits_for_memory(queries.device) and not (is_served and queries.shape[-1] <= 128)


class WholeSequence:
    """All positions of the sequence are on this rank, so nothing is split, gathered or weighted."""

    is_whole = True

    def take(self, tensor: Tensor, dim: int = 1, fill: int = 0) -> Tensor:
        """Returns this rank's part of a tensor with one entry per position in `dim`; `fill` is the value of added
        positions."""
        return tensor

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the positions [S] of this rank's tokens in the whole sequence of `length`."""
        return torch.arange(length, device=device)

    def expect(self, length: int) -> None:
        """Sets the length of the next sequence on a pipeline stage that does not split it itself."""

    def bounds(self, length: int, device: torch.device) -> Tensor | None:
        """Returns a mask [1, 1, 1, all keys] for attention without causality; None if no mask is needed."""
        return None

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Mask | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention over all positions for this rank's queries; each argument is [B, heads, S, W] of this rank's
        positions.

        `mask` broadcasts to [B, heads, all queries, all keys]: bool (True: visible), or numbers added to the scores; or
        it describes the documents of packed rows, within which attention is causal.
        """
        if isinstance(mask, DocumentBorders):
            if not dropout:
                mixed = attend_within_documents(queries, keys, values, mask, scale=scale, enable_gqa=enable_gqa)
                if mixed is not None:
                    return mixed
            mask = mask.visible()
        elif isinstance(mask, DocumentStarts):
            if not dropout:
                mixed = attend_by_starts(queries, keys, values, mask.starts, window=mask.window, scale=scale)
                if mixed is not None:
                    return mixed
            mask = mask.visible()
        if enable_gqa and mask is not None and needs_equal_heads(queries):
            keys, values = (each.repeat_interleave(queries.shape[1] // each.shape[1], dim=1) for each in (keys, values))
            enable_gqa = False
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        if mask is None and not dropout and waits_for_memory(queries.device) and prefers_flash():
            with sdpa_kernel(FLASH_BEFORE_CUDNN, set_priority=True):
                return F.scaled_dot_product_attention(queries, keys, values, **options)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout, **options)

    def mean(self, loss: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss over the whole sequence from the mean over this rank's `targets` (without ignored
        ones)."""
        return loss

    def whole(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Returns the parts of all ranks along `dim`, in the order of positions, without padding."""
        return tensor

    def beside_loss(self, logits: Tensor) -> Tensor | None:
        """Returns the logits that accompany a loss; None in a training step on a sharded sequence."""
        return logits
