"""The shared part of decoder-only models: the pass over a stack of layers, the loss of the next token, generation.

llama.py and gpt2.py define the layers and the names of the weights. Shapes: batch B, sequence S, hidden width D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import DataError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.decoding import KeyValueCache, LayerCache
from trainwright.models.generation import append_tokens
from trainwright.models.layers.annotations import name_tensor
from trainwright.models.layers.attention import Mask, WholeSequence, decoder_mask, next_tokens
from trainwright.models.layers.losses import score_tokens
from trainwright.models.layers.settings import check_ids, check_length
from trainwright.models.model import Model


class DecoderModel(Model):
    """A stack of layers and a head that predicts the next token at every position.

    A subclass defines `body`, and the attributes `lm_head`, `criterion`, `fused_loss`, `max_positions`, `sequence`.
    """

    lm_head: nn.Linear
    criterion: nn.Module
    fused_loss: bool | None
    max_positions: int
    sequence: WholeSequence

    @property
    def body(self) -> DecoderStack:
        """The stack between the tokens and the head."""
        raise NotImplementedError(f"{type(self).__name__} must define body.")

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
        logits_at: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        """Maps tokens [B, S] to logits [B, S, vocabulary] and, given labels, their mean loss.

        `labels` are the same tokens as `input_ids`, with -100 at ignored positions; they are shifted here, so position
        i predicts token i + 1. `attention_mask` [B, S] is 0 at padding. With padding on the right it is not needed,
        because no token attends to a later one; without it, attention uses its fastest kernel. A mask [B, 1, S, S] is
        bool and used unchanged: True where a query attends to a key.

        Rows with several documents (data/pack.py) have `position_ids` [B, S], each token's position in its document,
        and `document_ids` [B, S], which are equal for tokens that attend to each other (-1: padding). Padding on the
        left of learned positions needs `position_ids` too, counted from the first real token.

        In training with labels, `logits` may be None: see `fused_loss`.

        With a `cache` (decoding.py), the tokens continue those in the cache and are added to it. `logits_at` [B] or [B,
        K] selects positions of each row; the logits are then [B, 1 or K, vocabulary].
        """
        self._check_tokens(input_ids, cache)
        if cache is not None and not (attention_mask is None and position_ids is None and document_ids is None):
            raise DataError("A cache needs full rows: remove attention_mask, position_ids and document_ids.")
        if logits_at is not None and labels is not None:
            raise DataError("logits_at selects positions of each row, but labels need all. Remove one of the two.")
        hidden = self.body(input_ids, attention_mask, position_ids, document_ids, cache)
        if logits_at is None:
            return self._score(hidden, labels)
        rows = torch.arange(len(logits_at), device=logits_at.device)[:, None]
        logits_at = logits_at.view(len(logits_at), -1)
        # Sharded states (DTensors, a part of the sequence) cannot be indexed, so their logits are complete.
        if self.sequence.is_whole and not hasattr(hidden, "device_mesh"):
            return self._score(hidden[rows, logits_at], None)
        scored = self._score(hidden, None)
        logits: Any = scored["logits"]
        if hasattr(logits, "full_tensor"):  # a DTensor
            logits = logits.full_tensor()
        return {**scored, "logits": logits[rows, logits_at]}

    def count_targets(self, labels: Tensor) -> Tensor | None:
        """Returns the number of predicted tokens; the first one of a row is not predicted."""
        return super().count_targets(labels[:, 1:])

    def begin(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> Tensor:
        """Embeds the tokens [B, S]: the states [B, S, D] that the first layer gets."""
        self._check_tokens(input_ids)
        return self.body.begin(input_ids, position_ids)

    def hidden_shape(self, input_ids: Tensor, **_: Any) -> tuple[int, ...]:
        """Returns [B, S, D] of the states."""
        return (*self.sequence.take(input_ids).shape, self.settings["hidden_size"])

    def beside(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Returns the arguments of all layers in addition to the states: rotations, if the model has them, and the
        mask."""
        self.sequence.expect(input_ids.shape[1])
        width, is_whole = self.body.head_size, self.sequence.is_whole
        mask = decoder_mask(attention_mask, document_ids, width=width, is_whole=is_whole)
        return (*self.body.positional(input_ids, position_ids), mask)

    def finish(self, hidden: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor | None]:
        """Returns the loss and the logits of the last layer's states."""
        return self._score(self.body.norm(hidden), labels)

    def _check_tokens(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> None:
        check_ids(input_ids)
        # Rows of different lengths are checked before the first token, because a check here would synchronize.
        num_before = 0 if cache is None or cache.lengths is not None else cache.length
        check_length(input_ids.shape[1] + num_before, self.max_positions)

    def _score(self, hidden: Tensor, labels: Tensor | None) -> dict[str, Tensor | None]:
        """Maps normalized states [B, S, D] to the logits and, given labels, their mean loss."""
        targets = None if labels is None else self.sequence.take(next_tokens(labels), fill=IGNORED_LABEL)
        return score_tokens(self, hidden, targets, self.sequence)

    generate = append_tokens


class DecoderStack(nn.Module):
    """The layers between the token ids [B, S] and the head: returns normalized states [B, S, D].

    A subclass defines the attributes `layers`, `norm` and `sequence`, and the methods `begin` and `positional`.
    """

    layers: Any
    norm: Any
    sequence: WholeSequence
    head_size: int | None = None
    """The width of a head; None if unknown."""

    def begin(self, input_ids: Tensor, position_ids: Tensor | None = None, *, start: int = 0) -> Tensor:
        """Returns the embeddings [B, S, D]; without `position_ids` the tokens count from `start`."""
        raise NotImplementedError(f"{type(self).__name__} must define begin(input_ids, position_ids, *, start).")

    def positional(
        self, input_ids: Tensor, position_ids: Tensor | None = None, *, start: int = 0
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """Returns the positional arguments of each layer, which precede the mask."""
        return ()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Runs every layer with the same mask and positions, which are computed once."""
        start = 0
        if cache is not None and cache.lengths is not None:
            position_ids = cache.lengths[:, None]
        elif cache is not None:
            start = cache.length
        hidden = self.begin(input_ids, position_ids, start=start)
        positional = self.positional(input_ids, position_ids, start=start)
        if cache is None:
            is_whole = self.sequence.is_whole
            mask = decoder_mask(attention_mask, document_ids, width=self.head_size, is_whole=is_whole)
            for layer in self.layers:
                hidden = layer(name_tensor(hidden, "decoder_input"), *positional, mask)
        else:
            mask = cache.visible_keys(input_ids)
            for number, layer in enumerate(self.layers):
                hidden = layer(hidden, *positional, mask, cache.layer(number))
            cache.advance(input_ids.shape[1])
        normalized: Tensor = self.norm(hidden)
        return normalized


def attend_causally(
    sequence: WholeSequence,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Mask | None,
    cache: LayerCache | None,
    **options: Any,
) -> Tensor:
    """Returns attention [B, heads, S, W] → [B, S, heads × W]. Without a mask, it is causal over the sequence."""
    is_causal = mask is None
    if cache is not None:
        is_causal = is_causal and not cache.length  # a single token attends to all previous tokens
        keys, values = cache.extend(keys, values)
    mixed = sequence.attend(queries, keys, values, mask=mask, is_causal=is_causal, **options)
    return mixed.transpose(1, 2).flatten(2)
