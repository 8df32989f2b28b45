"""The verbs in which a model speaks of its sequence, for one that holds all of it.

Models and their attention layers hold one of these as `self.sequence`. Where a sequence is split over ranks
(parallel/context.py), an object with the same verbs stands in its place, and the model stays as it is written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.models.layers.document_borders import DocumentBorders, attend_within_documents, visible_pairs


class WholeSequence:
    """All positions of the sequence are here: nothing is cut, gathered or weighed."""

    is_whole = True

    def take(self, tensor: Tensor, dim: int = 1, fill: int = 0) -> Tensor:
        """Returns this rank's part of what has one entry per position in `dim`; `fill` stands for positions added."""
        return tensor

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the places [S] in the whole sequence of `length` that this rank's tokens have."""
        return torch.arange(length, device=device)

    def expect(self, length: int) -> None:
        """Says how long the sequence is whose parts come next, where a stage of a pipeline cuts none itself."""

    def bounds(self, length: int, device: torch.device) -> Tensor | None:
        """Returns a mask [1, 1, 1, all keys] for where every query sees every key; None where none is needed."""
        return None

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Tensor | DocumentBorders | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Mixes the values of all positions for this rank's queries: each [B, heads, S, W], of this rank's positions.

        `mask` broadcasts to [B, heads, all queries, all keys]: bool (True: may see), or numbers added to the scores;
        or it is the borders of documents, within which no query sees a later key.
        """
        if isinstance(mask, DocumentBorders):
            if not dropout:
                mixed = attend_within_documents(queries, keys, values, mask, scale=scale, enable_gqa=enable_gqa)
                if mixed is not None:
                    return mixed
            mask = visible_pairs(mask.document_ids)
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    def mean(self, loss: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss over the whole sequence, from that over this rank's `targets` (ignored ones apart)."""
        return loss

    def whole(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Returns the parts of all ranks along `dim`, in the order of positions, without any that were added."""
        return tensor

    def beside_loss(self, logits: Tensor) -> Tensor | None:
        """Returns the logits that go with a loss; in a training step on a split sequence there are none."""
        return logits
