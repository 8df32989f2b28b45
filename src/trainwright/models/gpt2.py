"""GPT2: a decoder-only transformer with learned positions, pre-normalization and a GELU MLP.

Parameters are named as in transformers' GPT2LMHeadModel; its files store projections as [in, out], so they are
transposed when read and written. Shapes in comments: batch B, sequence S, hidden width D. The forward pass is in
decoder.py, training in trainers/language_model.py, sharding in parallel/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.decoder import DecoderModel, DecoderStack, attend_causally
from trainwright.models.decoding import LayerCache
from trainwright.models.layers.attention import Mask, WholeSequence, split_heads
from trainwright.models.layers.settings import activation as find_activation
from trainwright.models.layers.settings import check_heads, check_keywords, draw_weights, embed, keywords_of
from trainwright.models.model import KeyRule


class GPT2(DecoderModel):
    """Predicts the next token at every position.

    `forward` returns `{"loss": ..., "logits": ...}`; the loss is `criterion` over all tokens with a label, or None
    without labels. `intermediate_size` defaults to four times the hidden size. `dropout` applies to the output of each
    part, `embedding_dropout` (default: the same) to the embeddings, and `attention_dropout` to the attention weights.
    `fused_loss` computes head and loss in chunks in training, so the logits of all tokens are never in memory and
    `logits` is None. None enables it on a GPU if the model has its original head and criterion.
    """

    hugging_face_types = ("gpt2",)
    hugging_face_architectures = MappingProxyType({"gpt2": "GPT2LMHeadModel"})
    hugging_face_prefix = "transformer"
    ignored_keys = ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias")  # masks in old files
    blocks = "transformer.h"
    draws_plainly = True
    parts_before_blocks = ("transformer.wte", "transformer.wpe", "transformer.drop")
    key_rules: ClassVar[tuple[KeyRule, ...]] = tuple(
        KeyRule(f"transformer.h.*.{name}.weight", f"transformer.h.*.{name}.weight", transpose=True)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    )
    fixed_config = MappingProxyType(
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        }
    )
    config_keys = MappingProxyType(
        {
            "vocab_size": ("vocab_size", 50257),
            "hidden_size": ("n_embd", 768),
            "num_layers": ("n_layer", 12),
            "num_heads": ("n_head", 12),
            "intermediate_size": ("n_inner", None),
            "max_positions": ("n_positions", 1024),
            "activation": ("activation_function", "gelu_new"),
            "norm_eps": ("layer_norm_epsilon", 1e-5),
            "tie_embeddings": ("tie_word_embeddings", True),
            "dropout": ("resid_pdrop", 0.1),
            "embedding_dropout": ("embd_pdrop", 0.1),
            "attention_dropout": ("attn_pdrop", 0.1),
            "initializer_range": ("initializer_range", 0.02),
        }
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
        self.fused_loss = fused_loss
        self.sequence = WholeSequence()
        self.transformer = Decoder(settings)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.criterion = nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL)
        self.reset_parameters()

    @property
    def body(self) -> Decoder:
        """The stack between the tokens and the head."""
        return self.transformer

    def reset_parameters(self) -> None:
        """Initializes all weights and ties the head."""
        std = self.settings["initializer_range"]
        # The initial weights of output projections decrease with depth, so that the residual stream does not grow.
        draw_weights(self, std, c_proj=std / math.sqrt(2 * len(self.transformer.h)))
        if self.settings["tie_embeddings"]:
            # Moving off the meta device creates two parameters from a shared one; this ties them again.
            self.lm_head.weight = self.transformer.wte.weight


class Decoder(DecoderStack):
    """The stack of blocks between the token ids [B, S] and the head: returns normalized states [B, S, D]."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size = settings["hidden_size"]
        blocks = [Block(settings) for _ in range(settings["num_layers"])]
        self.wte = nn.Embedding(settings["vocab_size"], hidden_size)
        self.wpe = nn.Embedding(settings["max_positions"], hidden_size)
        self.drop = nn.Dropout(settings["embedding_dropout"])
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(hidden_size, eps=settings["norm_eps"])
        self.sequence = WholeSequence()

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, named `h` in files."""
        return self.h

    @property
    def norm(self) -> nn.Module:
        """The norm after the last block, named `ln_f` in files."""
        return self.ln_f

    def begin(self, input_ids: Tensor, position_ids: Tensor | None = None, *, start: int = 0) -> Tensor:
        """Returns the embeddings [B, S, D] of tokens and positions."""
        if position_ids is None:
            positions = self.sequence.positions(input_ids.shape[1], input_ids.device) + start
        else:
            positions = self.sequence.take(position_ids)
        hidden: Tensor = self.drop(embed(self.wte, self.sequence.take(input_ids)) + self.wpe(positions))
        return hidden


class Block(nn.Module):
    """Attention, then the MLP; each reads a normalized copy of the residual stream [B, S, D] and adds to it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(settings["hidden_size"], eps=settings["norm_eps"])
        self.attn = Attention(settings)
        self.ln_2 = nn.LayerNorm(settings["hidden_size"], eps=settings["norm_eps"])
        self.mlp = MLP(settings)
        self.dropout = nn.Dropout(settings["dropout"])

    def forward(self, hidden: Tensor, mask: Mask | None, cache: LayerCache | None = None) -> Tensor:
        """Returns the residual stream after this block; dropout applies to the added outputs."""
        attended: Tensor = self.dropout(self.attn(self.ln_1(hidden), mask, cache))
        hidden = hidden + attended
        transformed: Tensor = self.dropout(self.mlp(self.ln_2(hidden)))
        return hidden + transformed


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size = settings["hidden_size"]
        self.head_size = hidden_size // settings["num_heads"]
        self.dropout = settings["attention_dropout"]
        self.sequence = WholeSequence()
        self.c_attn = nn.Linear(hidden_size, 3 * hidden_size)
        self.c_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor, mask: Mask | None, cache: LayerCache | None = None) -> Tensor:
        """Returns the attention output: [B, S, D] → [B, S, D]."""
        projected = self.c_attn(hidden).chunk(3, dim=-1)  # each [B, S, D], without a copy
        queries, keys, values = (split_heads(one, self.head_size) for one in projected)
        dropout = self.dropout if self.training else 0.0
        mixed = attend_causally(self.sequence, queries, keys, values, mask, cache, dropout=dropout)
        output: Tensor = self.c_proj(mixed)
        return output


class MLP(nn.Module):
    """Two linear layers with an activation between them, for each position: [B, S, D] → [B, S, D]."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.c_fc = nn.Linear(settings["hidden_size"], settings["intermediate_size"])
        self.c_proj = nn.Linear(settings["intermediate_size"], settings["hidden_size"])
        self.activation = find_activation(settings["activation"])

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the output that is added to the residual stream."""
        output: Tensor = self.c_proj(self.activation(self.c_fc(hidden)))
        return output
