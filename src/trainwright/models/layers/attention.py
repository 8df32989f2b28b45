"""Attention over heads, on projections that still hold all heads side by side."""

from __future__ import annotations

from torch import Tensor

from trainwright.models.layers.whole_sequence import WholeSequence


def split_heads(projected: Tensor, head_size: int) -> Tensor:
    """Returns a view [B, H, S, W] of a projection [B, S, H × W].

    The number of heads is read off the tensor: under tensor parallelism a rank holds only some of them.
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
    """Mixes values [B, keys, H × W] into [B, queries, H × W] with torch's fastest kernel for the case.

    `mask` has four dims and broadcasts to [B, H, queries, keys]: bool (True: may see), or numbers that are added to
    the scores. `dropout` is that of the attention weights and falls as given: pass 0 outside of training. `scale`
    multiplies the scores and defaults to 1 / √W. `sequence` is that of a layer whose positions may be split over ranks.
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
