"""Llama: a decoder-only transformer with rotary positions, grouped-query attention and a SwiGLU MLP.

This file also covers Qwen 2 (biases on queries, keys and values) and Mistral (a head size independent of the hidden
size). Parameters are named as in transformers' LlamaForCausalLM, so that its weights load without rules.
Shapes in comments: batch B, sequence S, hidden width D, query heads H, key-value heads K, head width W. The forward
pass is in decoder.py, training in trainers/language_model.py, sharding in parallel/.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import ConfigError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.decoder import DecoderModel, DecoderStack, attend_causally
from trainwright.models.decoding import LayerCache
from trainwright.models.layers.attention import Mask, WholeSequence, split_heads
from trainwright.models.layers.fp8_linear import linears
from trainwright.models.layers.rotary import Rotations, checked_scaling, rotary_angles, rotate
from trainwright.models.layers.settings import check_keywords, draw_weights, embed, keywords_of, reject_other_values

BIASES = ("none", "qkv", "all")
"""Which projections of the attention have a bias: none (Llama), those of queries, keys and values (Qwen 2), or all."""

# The only values of these keys of config.json that this file supports.
SUPPORTED = {"hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0.0, "partial_rotary_factor": 1.0}


class Llama(DecoderModel):
    """Predicts the next token at every position.

    `forward` returns `{"loss": ..., "logits": ...}`; the loss is `criterion` over all tokens with a label, or None
    without labels. `intermediate_size` defaults to 8/3 of the hidden size, rounded up to a multiple of 64, so the three
    matrices have as many weights as the two of a classic MLP with four times the hidden size.
    `head_size` defaults to hidden_size / num_heads, `num_kv_heads` to `num_heads`. `rope_scaling` is
    `{rope_type: linear, factor: 2.0}` or Llama 3's (layers/rotary.py); `attention_bias` is one of BIASES.
    `fused_loss` computes head and loss in chunks while training, so the logits of all tokens are never in memory and
    `logits` is None. None enables it on a GPU if the model has its original head and criterion.
    """

    hugging_face_types = ("llama", "qwen2", "mistral")
    hugging_face_architectures = MappingProxyType(
        {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}
    )
    hugging_face_prefix = "model"
    ignored_keys = ("model.layers.*.self_attn.rotary_emb.inv_freq",)  # computed, but stored in old files
    blocks = "model.layers"
    draws_plainly = True
    parts_before_blocks = ("model.embed_tokens",)
    config_keys = MappingProxyType(
        {
            "vocab_size": ("vocab_size", 32000),
            "hidden_size": ("hidden_size", 4096),
            "num_layers": ("num_hidden_layers", 32),
            "num_heads": ("num_attention_heads", 32),
            "num_kv_heads": ("num_key_value_heads", None),
            "head_size": ("head_dim", None),
            "intermediate_size": ("intermediate_size", 11008),
            "max_positions": ("max_position_embeddings", 2048),
            "rope_theta": ("rope_theta", 10000.0),
            "norm_eps": ("rms_norm_eps", 1e-6),
            "tie_embeddings": ("tie_word_embeddings", False),
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
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        intermediate_size: int | None = None,
        max_positions: int = 2048,
        rope_theta: float = 10000.0,
        rope_scaling: Mapping[str, Any] | None = None,
        attention_bias: str = "none",
        norm_eps: float = 1e-5,
        tie_embeddings: bool = True,
        dropout: float = 0.0,
        initializer_range: float = 0.02,
        fused_loss: bool | None = None,
    ) -> None:
        check_keywords(Llama.__init__, locals())
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if intermediate_size is None:
            intermediate_size = default_intermediate_size(hidden_size)
        rope_scaling = checked_scaling(rope_scaling)
        settings = keywords_of(locals())
        super().__init__()
        _check_settings(settings)
        settings["head_size"] = head_size or hidden_size // num_heads
        self.settings = settings
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.fused_loss = fused_loss
        self.sequence = WholeSequence()
        self.model = Decoder(settings)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.criterion = nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL)
        self.reset_parameters()

    @property
    def body(self) -> Decoder:
        """The stack between the tokens and the head."""
        return self.model

    def reset_parameters(self) -> None:
        """Initializes all weights and ties the head."""
        draw_weights(self, self.settings["initializer_range"])
        if self.settings["tie_embeddings"]:
            # Moving off the meta device makes two parameters of the shared one; this makes them one again.
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def hugging_face_type(self) -> str:
        """The type that was read if it supports this model's biases, otherwise one that does."""
        by_bias = {"qkv": "qwen2", "all": "llama"}.get(self.settings["attention_bias"])
        read = self.hugging_face_config.get("model_type", "llama")
        return by_bias or ("llama" if read == "qwen2" else str(read))

    @classmethod
    def settings_from_hugging_face(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keywords for a config.json of Llama, Qwen 2 or Mistral; missing keys have the usual defaults."""
        kind = config.get("model_type", "llama")
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        for given, supported in ((config, SUPPORTED), (rope, {"partial_rotary_factor": 1.0})):
            reject_other_values(given, supported, model=cls)
        _reject_sliding_window(config)
        settings = super().settings_from_hugging_face(config)
        if "num_key_value_heads" not in config:
            settings["num_kv_heads"] = 8 if kind == "mistral" else settings["num_heads"]
        if "intermediate_size" not in config:
            settings["intermediate_size"] = {"mistral": 14336, "qwen2": 22016}.get(kind, 11008)
        settings["rope_theta"] = rope.get("rope_theta", settings["rope_theta"])
        rope.pop("partial_rotary_factor", None)
        settings["rope_scaling"] = checked_scaling(rope)
        settings["attention_bias"] = "qkv" if kind == "qwen2" else "all" if config.get("attention_bias") else "none"
        return settings

    def to_hugging_face(self) -> dict[str, Any]:
        """Returns the settings under the names of transformers' LlamaConfig, the rotation in its old and new form."""
        theta, rope = self.settings["rope_theta"], self.settings["rope_scaling"]
        has_bias = self.settings["attention_bias"] == "all"
        by_kind: dict[str, Any] = {
            "llama": {"attention_bias": has_bias, "mlp_bias": False},
            "mistral": {"sliding_window": None},
            "qwen2": {"use_sliding_window": False},
        }
        return {
            **super().to_hugging_face(),
            **by_kind[self.hugging_face_type],
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "rope_scaling": rope,
            "rope_parameters": {**(rope or {"rope_type": "default"}), "rope_theta": theta},
        }


class Decoder(DecoderStack):
    """The stack of layers between the token ids [B, S] and the head: returns normalized states [B, S, D]."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size = settings["hidden_size"]
        self.embed_tokens = nn.Embedding(settings["vocab_size"], hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(settings) for _ in range(settings["num_layers"]))
        self.norm = nn.RMSNorm(hidden_size, eps=settings["norm_eps"])
        self.head_size: int = settings["head_size"]
        self.rope_theta: float = settings["rope_theta"]
        self.rope_scaling: Mapping[str, Any] | None = settings["rope_scaling"]
        self.sequence = WholeSequence()

    def begin(self, input_ids: Tensor, position_ids: Tensor | None = None, *, start: int = 0) -> Tensor:
        """Returns the embeddings [B, S, D] of the tokens; positions are rotations, see `positional`."""
        return embed(self.embed_tokens, self.sequence.take(input_ids))

    def positional(
        self, input_ids: Tensor, position_ids: Tensor | None = None, *, start: int = 0
    ) -> tuple[Rotations, ...]:
        """Returns the rotations of queries and keys; without positions the tokens count from `start`."""
        if position_ids is None:
            positions = (self.sequence.positions(input_ids.shape[1], input_ids.device) + start).float()
        else:
            positions = self.sequence.take(position_ids)[:, None].float()  # the dim of size 1 broadcasts over heads
        return (rotary_angles(positions, head_size=self.head_size, theta=self.rope_theta, scaling=self.rope_scaling),)


class DecoderLayer(nn.Module):
    """Attention, then the MLP; each reads a normalized copy of the residual stream [B, S, D] and adds to it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size, norm_eps = settings["hidden_size"], settings["norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.self_attn = Attention(
            hidden_size=hidden_size,
            num_heads=settings["num_heads"],
            num_kv_heads=settings["num_kv_heads"],
            head_size=settings["head_size"],
            bias=settings["attention_bias"],
        )
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.mlp = SwiGLU(hidden_size=hidden_size, intermediate_size=settings["intermediate_size"])
        self.dropout = nn.Dropout(settings["dropout"])

    def forward(
        self, hidden: Tensor, rotations: Rotations, mask: Mask | None, cache: LayerCache | None = None
    ) -> Tensor:
        """Returns the residual stream after this layer; dropout applies to the added outputs."""
        # The added output has no variable, because the tensor would otherwise stay in memory until the end of the
        # layer.
        hidden = hidden + self.dropout(self.self_attn(self.input_layernorm(hidden), rotations, mask, cache))
        output: Tensor = hidden + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))
        return output


class Attention(nn.Module):
    """Causal self-attention in which each of the K key-value heads serves H / K query heads."""

    def __init__(
        self, *, hidden_size: int, num_heads: int, num_kv_heads: int, head_size: int | None = None, bias: str = "none"
    ) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads if head_size is None else head_size
        self.is_grouped = num_kv_heads != num_heads
        self.sequence = WholeSequence()
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_size, bias=bias != "none")
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_size, bias=bias != "none")
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_size, bias=bias != "none")
        self.o_proj = nn.Linear(num_heads * self.head_size, hidden_size, bias=bias == "all")

    def forward(
        self, hidden: Tensor, rotations: Rotations, mask: Mask | None, cache: LayerCache | None = None
    ) -> Tensor:
        """Returns the attention output: [B, S, D] → [B, S, D]. Without a mask, attention is causal over the
        sequence."""
        projected = linears(hidden, self.q_proj, self.k_proj, self.v_proj)
        queries, keys, values = (split_heads(each, self.head_size) for each in projected)  # [B, H or K, S, W]
        queries, keys = rotate(queries, rotations), rotate(keys, rotations)
        mixed = attend_causally(self.sequence, queries, keys, values, mask, cache, enable_gqa=self.is_grouped)
        output: Tensor = self.o_proj(mixed)
        return output


class SwiGLU(nn.Module):
    """The gated MLP: down(silu(gate(x)) × up(x)), for each position."""

    def __init__(self, *, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [B, S, D] to [B, S, D]."""
        gate, up = linears(hidden, self.gate_proj, self.up_proj)
        output: Tensor = self.down_proj(F.silu(gate) * up)
        return output


def default_intermediate_size(hidden_size: int) -> int:
    """Returns 8/3 of the hidden size, rounded up to a multiple of 64, for which matrix units are faster."""
    return -(-8 * hidden_size // (3 * 64)) * 64


def _reject_sliding_window(config: Mapping[str, Any]) -> None:
    """Rejects sliding windows: every layer here attends to all tokens before."""
    kind = config.get("model_type")
    window = config.get("sliding_window", 4096) if kind == "mistral" else None
    if kind == "qwen2" and config.get("use_sliding_window"):
        window = config.get("sliding_window", 4096)
    if window is not None or "sliding_attention" in (config.get("layer_types") or ()):
        raise ConfigError(
            f"config.json has a sliding window of {window or config.get('sliding_window')} tokens, but Llama attends "
            "to all tokens before. Use transformers' class: model.type: transformers:AutoModelForCausalLM."
        )


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Rejects inconsistent sizes before any weight is created."""
    hidden_size, num_heads, num_kv_heads = settings["hidden_size"], settings["num_heads"], settings["num_kv_heads"]
    if settings["head_size"] is None and hidden_size % (2 * num_heads):
        raise ConfigError(
            f"hidden_size {hidden_size} does not split into {num_heads} heads of an even width, which rotary "
            f"positions need. Use a multiple of {2 * num_heads}, another num_heads, or set head_size."
        )
    if settings["head_size"] is not None and settings["head_size"] % 2:
        raise ConfigError(f"head_size is {settings['head_size']}. Rotary positions need an even one.")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}: each key-value head serves the "
            "same number of query heads. Change one of the two."
        )
    if settings["attention_bias"] not in BIASES:
        raise ConfigError(f"attention_bias is {settings['attention_bias']!r}. Use one of: {', '.join(BIASES)}.")
