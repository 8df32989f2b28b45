"""GPT2: a decoder-only transformer with learned positions, a norm before each part and a GELU MLP.

Parameters are named as in transformers' GPT2LMHeadModel; files keep its projections as [in, out], so that they are
transposed on the way. Shapes in comments: batch B, sequence S, hidden width D.
Training lives in trainers/language_model.py; splitting over devices lives in parallel/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

from trainwright.errors import DataError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.generation import KeyValueCache, LayerCache, append_tokens
from trainwright.models.layers.annotations import name_tensor
from trainwright.models.layers.attention import Mask, WholeSequence, decoder_mask, next_tokens, split_heads
from trainwright.models.layers.losses import at_least_float32, fuses_loss, head_loss
from trainwright.models.layers.settings import activation as find_activation
from trainwright.models.layers.settings import (
    check_heads,
    check_ids,
    check_keywords,
    check_length,
    embed,
    keywords_of,
    reject_other_values,
)
from trainwright.models.model import KeyRule, Model

# What config.json must say, if anything, of things that this file does in one way only.
SUPPORTED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}


class GPT2(Model):
    """Predicts the next token at every position.

    `forward` returns `{"loss": ..., "logits": ...}`; the loss is `criterion` over all tokens with a label, or None
    without labels. `intermediate_size` defaults to four times the hidden size. `dropout` falls on what each part
    adds to the stream, `embedding_dropout` (default: the same) on the embeddings, `attention_dropout` on the
    attention weights. `fused_loss` takes head and loss in one while training, which never holds the logits of all
    tokens: `logits` is then None. Left at None it is so on a GPU, with the head and the criterion that the model was
    made with.
    """

    hugging_face_types = ("gpt2",)
    hugging_face_architectures = MappingProxyType({"gpt2": "GPT2LMHeadModel"})
    hugging_face_prefix = "transformer"
    ignored_keys = ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias")  # masks, which old files hold
    blocks = "transformer.h"
    parts_before_blocks = ("transformer.wte", "transformer.wpe", "transformer.drop")
    key_rules: ClassVar[tuple[KeyRule, ...]] = tuple(
        KeyRule(f"transformer.h.*.{name}.weight", f"transformer.h.*.{name}.weight", transpose=True)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    )

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        intermediate_size: int | None = None,
        max_positions: int = 1024,
        activation: str = "gelu_new",
        norm_eps: float = 1e-5,
        tie_embeddings: bool = True,
        dropout: float = 0.0,
        embedding_dropout: float | None = None,
        attention_dropout: float = 0.0,
        initializer_range: float = 0.02,
        fused_loss: bool | None = None,
    ) -> None:
        check_keywords(GPT2.__init__, locals())
        intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        embedding_dropout = dropout if embedding_dropout is None else embedding_dropout
        settings = keywords_of(locals())
        super().__init__()
        self.settings = settings
        check_heads(hidden_size, num_heads)
        self.max_positions = max_positions
        self.initializer_range = initializer_range
        self.tie_embeddings = tie_embeddings
        self.fused_loss = fused_loss
        self.sequence = WholeSequence()
        blocks = [
            Block(
                hidden_size=hidden_size,
                num_heads=num_heads,
                intermediate_size=intermediate_size,
                activation=activation,
                norm_eps=norm_eps,
                dropout=dropout,
                attention_dropout=attention_dropout,
            )
            for _ in range(num_layers)
        ]
        self.transformer = Decoder(
            wte=nn.Embedding(vocab_size, hidden_size),
            wpe=nn.Embedding(max_positions, hidden_size),
            drop=nn.Dropout(embedding_dropout),
            blocks=blocks,
            ln_f=nn.LayerNorm(hidden_size, eps=norm_eps),
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.criterion: nn.Module = nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights anew and ties the head again, for a model that was made on the meta device."""
        # What adds to the stream starts smaller the deeper the model is, so that the stream does not grow with depth.
        smaller = self.initializer_range / math.sqrt(2 * len(self.transformer.h))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=smaller if name.endswith("c_proj") else self.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.initializer_range)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        if self.tie_embeddings:
            # Moving off the meta device makes two parameters out of the shared one; this makes them one again.
            self.lm_head.weight = self.transformer.wte.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> dict[str, Tensor | None]:
        """Maps tokens [B, S] to logits [B, S, vocabulary] and, given labels, their mean loss.

        `labels` are the same tokens as `input_ids`, with -100 where there is nothing to learn; they are shifted here,
        so that position i is scored on token i + 1. `attention_mask` [B, S] is 0 at padding; with padding on the
        right it is not needed, and attention is faster without. As [B, 1, S, S] it is bool and taken as it is.

        Rows that hold several documents (data/pack.py) come with `position_ids` [B, S], each token's place in its
        own document, and `document_ids` [B, S], which are equal for tokens that may see each other (-1: padding).
        Padding on the left needs `position_ids` too, which count from the first real token.

        While training with labels, `logits` may be None: see `fused_loss`.

        With a `cache` (generation.py) the tokens go on from those that it holds, and are added to it.
        """
        self._check_tokens(input_ids, cache)
        if cache is not None and not (attention_mask is None and position_ids is None and document_ids is None):
            raise DataError("A cache goes with whole rows: leave out attention_mask, position_ids and document_ids.")
        return self._score(self.transformer(input_ids, attention_mask, position_ids, document_ids, cache), labels)

    def begin(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> Tensor:
        """Embeds the tokens [B, S] and their positions: the states [B, S, D] that the first block gets."""
        self._check_tokens(input_ids)
        return self.transformer.begin(input_ids, position_ids)

    def hidden_shape(self, input_ids: Tensor, **_: Any) -> tuple[int, ...]:
        """Returns [B, S, D] of the states."""
        return (*self.sequence.take(input_ids).shape, self.settings["hidden_size"])

    def beside(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        **_: Any,
    ) -> tuple[Mask | None]:
        """Returns the mask that all blocks get."""
        self.sequence.expect(input_ids.shape[1])
        return (decoder_mask(attention_mask, document_ids, is_whole=self.sequence.is_whole),)

    def finish(self, hidden: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor | None]:
        """Returns the loss and the logits of the last block's states."""
        return self._score(self.transformer.ln_f(hidden), labels)

    def _check_tokens(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> None:
        check_ids(input_ids)
        check_length(input_ids.shape[1] + (0 if cache is None else cache.length), self.max_positions)

    def _score(self, hidden: Tensor, labels: Tensor | None) -> dict[str, Tensor | None]:
        """Maps normalised states [B, S, D] to the logits and, given labels, their mean loss."""
        if labels is None:
            return {"loss": None, "logits": self.sequence.whole(self.lm_head(hidden))}
        targets = self.sequence.take(next_tokens(labels), fill=IGNORED_LABEL)
        if fuses_loss(self.fused_loss, self.lm_head, self.criterion, hidden, training=self.training):
            loss = head_loss(self.lm_head, hidden, targets)
            return {"loss": self.sequence.mean(loss, targets), "logits": None}
        logits = self.lm_head(hidden)
        loss = self.criterion(at_least_float32(logits.flatten(0, 1)), targets.flatten())
        return {"loss": self.sequence.mean(loss, targets), "logits": self.sequence.beside_loss(logits)}

    generate = append_tokens

    @classmethod
    def settings_from_hugging_face(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keywords for a config.json of GPT-2; keys that it lacks have transformers' defaults."""
        reject_other_values(config, SUPPORTED, model="GPT2")
        return {
            "vocab_size": config.get("vocab_size", 50257),
            "hidden_size": config.get("n_embd", 768),
            "num_layers": config.get("n_layer", 12),
            "num_heads": config.get("n_head", 12),
            "intermediate_size": config.get("n_inner"),
            "max_positions": config.get("n_positions", 1024),
            "activation": config.get("activation_function", "gelu_new"),
            "norm_eps": config.get("layer_norm_epsilon", 1e-5),
            "tie_embeddings": config.get("tie_word_embeddings", True),
            "dropout": config.get("resid_pdrop", 0.1),
            "embedding_dropout": config.get("embd_pdrop", 0.1),
            "attention_dropout": config.get("attn_pdrop", 0.1),
            "initializer_range": config.get("initializer_range", 0.02),
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """Returns what transformers' GPT2Config calls these settings."""
        own = self.settings
        return {
            **SUPPORTED,
            "vocab_size": own["vocab_size"],
            "n_embd": own["hidden_size"],
            "n_layer": own["num_layers"],
            "n_head": own["num_heads"],
            "n_inner": own["intermediate_size"],
            "n_positions": own["max_positions"],
            "activation_function": own["activation"],
            "layer_norm_epsilon": own["norm_eps"],
            "tie_word_embeddings": own["tie_embeddings"],
            "resid_pdrop": own["dropout"],
            "embd_pdrop": own["embedding_dropout"],
            "attn_pdrop": own["attention_dropout"],
            "initializer_range": own["initializer_range"],
        }


class Decoder(nn.Module):
    """The stack of blocks between the token ids [B, S] and the head: returns normalised states [B, S, D]."""

    def __init__(
        self, *, wte: nn.Embedding, wpe: nn.Embedding, drop: nn.Dropout, blocks: list[Block], ln_f: nn.LayerNorm
    ) -> None:
        super().__init__()
        self.wte = wte
        self.wpe = wpe
        self.drop = drop
        self.h = nn.ModuleList(blocks)
        self.ln_f = ln_f
        self.sequence = WholeSequence()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Runs every block with the same mask, which is made once."""
        hidden = self.begin(input_ids, position_ids, start=0 if cache is None else cache.length)
        if cache is None:
            mask = decoder_mask(attention_mask, document_ids, is_whole=self.sequence.is_whole)
            for block in self.h:
                hidden = block(name_tensor(hidden, "decoder_input"), mask)
        else:
            mask = cache.visible_keys(input_ids)
            for number, block in enumerate(self.h):
                hidden = block(hidden, mask, cache.layer(number))
            cache.advance(input_ids.shape[1])
        normalised: Tensor = self.ln_f(hidden)
        return normalised

    def begin(self, input_ids: Tensor, position_ids: Tensor | None = None, *, start: int = 0) -> Tensor:
        """Returns the embeddings [B, S, D] of tokens and positions, which without any given count from `start`."""
        if position_ids is None:
            positions = self.sequence.positions(input_ids.shape[1], input_ids.device) + start
        else:
            positions = self.sequence.take(position_ids)
        hidden: Tensor = self.drop(embed(self.wte, self.sequence.take(input_ids)) + self.wpe(positions))
        return hidden


class Block(nn.Module):
    """Attention, then the MLP; each reads a normalised copy of the residual stream [B, S, D] and adds to it."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        activation: str,
        norm_eps: float,
        dropout: float,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.attn = Attention(hidden_size=hidden_size, num_heads=num_heads, dropout=attention_dropout)
        self.ln_2 = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.mlp = MLP(hidden_size=hidden_size, intermediate_size=intermediate_size, activation=activation)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Mask | None, cache: LayerCache | None = None) -> Tensor:
        """Returns the residual stream after this block; dropout falls on what is added, never on the stream."""
        attended: Tensor = self.dropout(self.attn(self.ln_1(hidden), mask, cache))
        hidden = hidden + attended
        transformed: Tensor = self.dropout(self.mlp(self.ln_2(hidden)))
        return hidden + transformed


class Attention(nn.Module):
    """Causal self-attention whose queries, keys and values come out of one projection."""

    def __init__(self, *, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.dropout = dropout
        self.sequence = WholeSequence()
        self.c_attn = nn.Linear(hidden_size, 3 * hidden_size)
        self.c_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor, mask: Mask | None, cache: LayerCache | None = None) -> Tensor:
        """Mixes positions: [B, S, D] → [B, S, D]. Without a mask attention is causal over the whole sequence."""
        projected = self.c_attn(hidden).chunk(3, dim=-1)  # each [B, S, D], without a copy
        queries, keys, values = (split_heads(one, self.head_size) for one in projected)
        is_causal = mask is None
        if cache is not None:
            is_causal = is_causal and not cache.length  # a single token sees all that came before
            keys, values = cache.extend(keys, values)
        dropout = self.dropout if self.training else 0.0
        mixed = self.sequence.attend(queries, keys, values, mask=mask, is_causal=is_causal, dropout=dropout)
        output: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """Widens, bends and narrows each position by itself: [B, S, D] → [B, S, D]."""

    def __init__(self, *, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden_size, intermediate_size)
        self.c_proj = nn.Linear(intermediate_size, hidden_size)
        self.activation = find_activation(activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns what is added to the residual stream."""
        output: Tensor = self.c_proj(self.activation(self.c_fc(hidden)))
        return output
