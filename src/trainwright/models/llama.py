"""Llama: a decoder-only transformer with rotary positions, grouped-query attention and a SwiGLU MLP.

The same file is Qwen 2 (biases on queries, keys and values) and Mistral (heads of a width of their own).
Parameters are named as in transformers' LlamaForCausalLM, so its weights load as they are.
Shapes in comments: batch B, sequence S, hidden width D, query heads H, key-value heads K, head width W.
Training lives in trainers/language_model.py; splitting over devices lives in parallel/.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import ConfigError, DataError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.generation import KeyValueCache, LayerCache, append_tokens
from trainwright.models.layers.annotations import name_tensor
from trainwright.models.layers.attention import Mask, WholeSequence, decoder_mask, next_tokens
from trainwright.models.layers.losses import at_least_float32, fuses_loss, head_loss
from trainwright.models.layers.rotary import Rotations, checked_scaling, rotary_angles, rotate
from trainwright.models.layers.settings import (
    check_ids,
    check_keywords,
    check_length,
    embed,
    keywords_of,
    reject_other_values,
)
from trainwright.models.model import Model

BIASES = ("none", "qkv", "all")
"""Which projections of the attention have a bias: none (Llama), those of queries, keys and values (Qwen 2), or all."""

# What config.json must say, if anything, of things that this file does in one way only.
SUPPORTED = {"hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0.0, "partial_rotary_factor": 1.0}


class Llama(Model):
    """Predicts the next token at every position.

    `forward` returns `{"loss": ..., "logits": ...}`; the loss is `criterion` over all tokens with a label, or None
    without labels. `intermediate_size` defaults to 8/3 of the hidden size, rounded up to a multiple of 64: three
    matrices of that width hold as many weights as the two of a classic MLP that is four times as wide as the model.
    `head_size` defaults to an equal share of the hidden size, `num_kv_heads` to `num_heads`. `rope_scaling` is
    `{rope_type: linear, factor: 2.0}` or Llama 3's (layers/rotary.py); `attention_bias` is one of BIASES.
    `fused_loss` takes head and loss in one while training, which never holds the logits of all tokens: `logits` is
    then None. Left at None it is so on a GPU, with the head and the criterion that the model was made with.
    """

    hugging_face_types = ("llama", "qwen2", "mistral")
    hugging_face_architectures = MappingProxyType(
        {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}
    )
    hugging_face_prefix = "model"
    ignored_keys = ("model.layers.*.self_attn.rotary_emb.inv_freq",)  # computed; old files hold it
    blocks = "model.layers"
    parts_before_blocks = ("model.embed_tokens",)

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
        head_size = settings["head_size"] = head_size or hidden_size // num_heads
        self.settings = settings
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.tie_embeddings = tie_embeddings
        self.initializer_range = initializer_range
        self.fused_loss = fused_loss
        self.sequence = WholeSequence()
        self.model = Decoder(
            embed_tokens=nn.Embedding(vocab_size, hidden_size),
            layers=[DecoderLayer(settings) for _ in range(num_layers)],
            norm=nn.RMSNorm(hidden_size, eps=norm_eps),
            settings=settings,
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.criterion: nn.Module = nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights anew and ties the head again, for a model that was made on the meta device."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.initializer_range)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        if self.tie_embeddings:
            # Moving off the meta device makes two parameters out of the shared one; this makes them one again.
            self.lm_head.weight = self.model.embed_tokens.weight

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
        so that position i is scored on token i + 1. `attention_mask` [B, S] is 0 at padding. With padding on the
        right it is not needed, since no token sees a later one; without it attention takes its fastest kernel.
        As [B, 1, S, S] it is bool and taken as it is: True where a query may see a key.

        Rows that hold several documents (data/pack.py) come with `position_ids` [B, S], each token's place in its
        own document, and `document_ids` [B, S], which are equal for tokens that may see each other (-1: padding).

        While training with labels, `logits` may be None: see `fused_loss`.

        With a `cache` (generation.py) the tokens go on from those that it holds, and are added to it.
        """
        self._check_tokens(input_ids, cache)
        if cache is not None and not (attention_mask is None and position_ids is None and document_ids is None):
            raise DataError("A cache goes with whole rows: leave out attention_mask, position_ids and document_ids.")
        return self._score(self.model(input_ids, attention_mask, position_ids, document_ids, cache), labels)

    def begin(self, input_ids: Tensor, **_: Any) -> Tensor:
        """Embeds the tokens [B, S]: the states [B, S, D] that the first layer gets."""
        self._check_tokens(input_ids)
        return self.model.begin(input_ids)

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
    ) -> tuple[Rotations, Mask | None]:
        """Returns the rotations and the mask that all layers get."""
        rotations = self.model.rotations(input_ids, position_ids)
        return rotations, decoder_mask(attention_mask, document_ids, is_whole=self.sequence.is_whole)

    def finish(self, hidden: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor | None]:
        """Returns the loss and the logits of the last layer's states."""
        return self._score(self.model.norm(hidden), labels)

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

    @property
    def hugging_face_type(self) -> str:
        """The type that was read, where it can have this model's biases; else the one that can."""
        by_bias = {"qkv": "qwen2", "all": "llama"}.get(self.settings["attention_bias"])
        read = self.hugging_face_config.get("model_type", "llama")
        return by_bias or ("llama" if read == "qwen2" else str(read))

    @classmethod
    def settings_from_hugging_face(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keywords for a config.json of Llama, Qwen 2 or Mistral; what it lacks has the usual defaults."""
        kind = config.get("model_type", "llama")
        reject_other_values(config, SUPPORTED, model="Llama")
        _reject_sliding_window(config)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        reject_other_values(rope, {"partial_rotary_factor": 1.0}, model="Llama")
        num_heads = config.get("num_attention_heads", 32)
        biases = "qkv" if kind == "qwen2" else "all" if config.get("attention_bias") else "none"
        return {
            "vocab_size": config.get("vocab_size", 32000),
            "hidden_size": config.get("hidden_size", 4096),
            "num_layers": config.get("num_hidden_layers", 32),
            "num_heads": num_heads,
            "num_kv_heads": config.get("num_key_value_heads", 8 if kind == "mistral" else num_heads),
            "head_size": config.get("head_dim"),
            "intermediate_size": config.get("intermediate_size", {"mistral": 14336, "qwen2": 22016}.get(kind, 11008)),
            "max_positions": config.get("max_position_embeddings", 2048),
            "rope_theta": theta,
            "rope_scaling": checked_scaling({key: rope[key] for key in rope if key != "partial_rotary_factor"}),
            "attention_bias": biases,
            "norm_eps": config.get("rms_norm_eps", 1e-6),
            "tie_embeddings": config.get("tie_word_embeddings", False),
            "initializer_range": config.get("initializer_range", 0.02),
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """Returns what transformers' LlamaConfig calls these settings, with the rotation in its old and new words."""
        own = self.settings
        kind = self.hugging_face_type
        rope = own["rope_scaling"]
        by_kind: dict[str, Any] = {"llama": {"attention_bias": own["attention_bias"] == "all", "mlp_bias": False}}
        by_kind |= {"mistral": {"sliding_window": None}, "qwen2": {"use_sliding_window": False}}
        return {
            **by_kind[kind],
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "vocab_size": own["vocab_size"],
            "hidden_size": own["hidden_size"],
            "num_hidden_layers": own["num_layers"],
            "num_attention_heads": own["num_heads"],
            "num_key_value_heads": own["num_kv_heads"],
            "head_dim": own["head_size"],
            "intermediate_size": own["intermediate_size"],
            "max_position_embeddings": own["max_positions"],
            "rope_theta": own["rope_theta"],
            "rope_scaling": rope,
            "rope_parameters": {**(rope or {"rope_type": "default"}), "rope_theta": own["rope_theta"]},
            "rms_norm_eps": own["norm_eps"],
            "tie_word_embeddings": own["tie_embeddings"],
            "initializer_range": own["initializer_range"],
        }


class Decoder(nn.Module):
    """The stack of layers between the token ids [B, S] and the head: returns normalised states [B, S, D]."""

    def __init__(
        self,
        *,
        embed_tokens: nn.Embedding,
        layers: list[DecoderLayer],
        norm: nn.RMSNorm,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head_size: int = settings["head_size"]
        self.rope_theta: float = settings["rope_theta"]
        self.rope_scaling: Mapping[str, Any] | None = settings["rope_scaling"]
        self.sequence = WholeSequence()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Runs every layer with the same rotations and mask, which are made once."""
        hidden = self.begin(input_ids)
        rotations = self.rotations(input_ids, position_ids, start=0 if cache is None else cache.length)
        if cache is None:
            mask = decoder_mask(attention_mask, document_ids, is_whole=self.sequence.is_whole)
            for layer in self.layers:
                hidden = layer(name_tensor(hidden, "decoder_input"), rotations, mask)
        else:
            mask = cache.visible_keys(input_ids)
            for number, layer in enumerate(self.layers):
                hidden = layer(hidden, rotations, mask, cache.layer(number))
            cache.advance(input_ids.shape[1])
        normalised: Tensor = self.norm(hidden)
        return normalised

    def begin(self, input_ids: Tensor) -> Tensor:
        """Returns the embeddings [B, S, D] of the tokens."""
        return embed(self.embed_tokens, self.sequence.take(input_ids))

    def rotations(self, input_ids: Tensor, position_ids: Tensor | None = None, *, start: int = 0) -> Rotations:
        """Returns the angles by which queries and keys turn; without positions the tokens count from `start`."""
        if position_ids is None:
            positions = (self.sequence.positions(input_ids.shape[1], input_ids.device) + start).float()
        else:
            positions = self.sequence.take(position_ids)[:, None].float()  # the dim of size 1 stands for the heads
        return rotary_angles(positions, head_size=self.head_size, theta=self.rope_theta, scaling=self.rope_scaling)


class DecoderLayer(nn.Module):
    """Attention, then the MLP; each reads a normalised copy of the residual stream [B, S, D] and adds to it."""

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
        """Returns the residual stream after this layer; dropout falls on what is added, never on the stream."""
        attended: Tensor = self.dropout(self.self_attn(self.input_layernorm(hidden), rotations, mask, cache))
        hidden = hidden + attended
        transformed: Tensor = self.dropout(self.mlp(self.post_attention_layernorm(hidden)))
        return hidden + transformed


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
        """Mixes positions: [B, S, D] → [B, S, D]. Without a mask attention is causal over the whole sequence."""
        queries = rotate(self._split_heads(self.q_proj(hidden)), rotations)  # [B, H, S, W]
        keys = rotate(self._split_heads(self.k_proj(hidden)), rotations)  # [B, K, S, W]
        values = self._split_heads(self.v_proj(hidden))  # [B, K, S, W]
        is_causal = mask is None
        if cache is not None:
            is_causal = is_causal and not cache.length  # a single token sees all that came before
            keys, values = cache.extend(keys, values)
        mixed = self.sequence.attend(queries, keys, values, mask=mask, is_causal=is_causal, enable_gqa=self.is_grouped)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _split_heads(self, projected: Tensor) -> Tensor:
        # The number of heads is read off the tensor: under tensor parallelism a rank holds only some of them.
        return projected.view(*projected.shape[:-1], -1, self.head_size).transpose(1, 2)


class SwiGLU(nn.Module):
    """The gated MLP: down(silu(gate(x)) × up(x)), position by position."""

    def __init__(self, *, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [B, S, D] to [B, S, D]."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


def default_intermediate_size(hidden_size: int) -> int:
    """Returns 8/3 of the hidden size, rounded up to a multiple of 64 for the matrix units' sake."""
    return -(-8 * hidden_size // (3 * 64)) * 64


def _reject_sliding_window(config: Mapping[str, Any]) -> None:
    """Rejects what sees only the last tokens: every layer here sees all tokens before."""
    kind = config.get("model_type")
    window = config.get("sliding_window", 4096) if kind == "mistral" else None
    if kind == "qwen2" and config.get("use_sliding_window"):
        window = config.get("sliding_window", 4096)
    if window is not None or "sliding_attention" in (config.get("layer_types") or ()):
        raise ConfigError(
            f"config.json asks for a sliding window of {window or config.get('sliding_window')} tokens, but Llama "
            "attends to all tokens before. Train this model by transformers' own class: "
            "model.type: transformers:AutoModelForCausalLM."
        )


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Rejects sizes that cannot make a model, before any weight is made."""
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
            f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}: each key-value head serves "
            "equally many query heads. Change one of the two."
        )
    if settings["attention_bias"] not in BIASES:
        raise ConfigError(f"attention_bias is {settings['attention_bias']!r}. Use one of: {', '.join(BIASES)}.")
