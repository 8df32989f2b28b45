"""T5: an encoder-decoder transformer with relative position biases in attention.

Parameters are named as in transformers' T5ForConditionalGeneration, so there are no rules.
Shapes in comments: batch B, sequence S (of the input), T (of the target), hidden width D, heads H.
Training is in trainers/sequence_to_sequence.py, sharding in parallel/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import ConfigError, DataError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.key_map import KeyMap
from trainwright.models.layers.annotations import name_tensor
from trainwright.models.layers.attention import WholeSequence, attend, unpadded_keys, visible_keys
from trainwright.models.layers.losses import score_tokens
from trainwright.models.layers.settings import activation, check_heads, check_ids, check_keywords, embed, keywords_of
from trainwright.models.model import Model


class T5(Model):
    """Predicts each token of the target from the input and the previous target tokens.

    `forward` returns `{"loss": ..., "logits": ...}`; the loss is `criterion` over all labels, or None without labels.
    `num_layers` is the encoder's depth and, by default, the decoder's. `feed_forward` is `relu` as in the first T5, or
    gated such as `gated-gelu`, as in version 1.1. `scale_outputs` divides the states before the head by √D; it belongs
    to a tied head and follows `tie_embeddings` by default. Distances of `max_distance` tokens and more share one
    bucket; smaller ones share the other buckets. `fused_loss` computes head and loss in chunks in training, so the
    logits of all tokens are never in memory and `logits` is None. Left at None it is so on a GPU, with the head and the
    criterion that the model was made with.
    """

    hugging_face_types = ("t5",)
    hugging_face_architectures = MappingProxyType({"t5": "T5ForConditionalGeneration"})
    config_keys = MappingProxyType(
        {
            "vocab_size": ("vocab_size", 32128),
            "hidden_size": ("d_model", 512),
            "num_layers": ("num_layers", 6),
            "num_decoder_layers": ("num_decoder_layers", None),
            "num_heads": ("num_heads", 8),
            "head_size": ("d_kv", 64),
            "intermediate_size": ("d_ff", 2048),
            "feed_forward": ("feed_forward_proj", "relu"),
            "num_buckets": ("relative_attention_num_buckets", 32),
            "max_distance": ("relative_attention_max_distance", 128),
            "norm_eps": ("layer_norm_epsilon", 1e-6),
            "tie_embeddings": ("tie_word_embeddings", True),
            "scale_outputs": ("scale_decoder_outputs", None),
            "dropout": ("dropout_rate", 0.1),
            "pad_token_id": ("pad_token_id", 0),
            "decoder_start_token_id": ("decoder_start_token_id", None),
            "initializer_factor": ("initializer_factor", 1.0),
        }
    )
    ignored_keys = (
        "encoder.embed_tokens.weight",  # copies of `shared`
        "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",  # in old files, but unused
    )

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int = 256,
        num_layers: int = 4,
        num_decoder_layers: int | None = None,
        num_heads: int = 4,
        head_size: int | None = None,
        intermediate_size: int | None = None,
        feed_forward: str = "relu",
        num_buckets: int = 32,
        max_distance: int = 128,
        norm_eps: float = 1e-6,
        tie_embeddings: bool = True,
        scale_outputs: bool | None = None,
        dropout: float = 0.0,
        pad_token_id: int = 0,
        decoder_start_token_id: int = 0,
        initializer_factor: float = 1.0,
        fused_loss: bool | None = None,
    ) -> None:
        check_keywords(T5.__init__, locals())
        if head_size is None:
            check_heads(hidden_size, num_heads)
            head_size = hidden_size // num_heads
        num_decoder_layers = num_layers if num_decoder_layers is None else num_decoder_layers
        intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        scale_outputs = tie_embeddings if scale_outputs is None else scale_outputs
        settings = keywords_of(locals())
        super().__init__()
        self.settings = settings
        self.fused_loss = fused_loss
        check_buckets(num_buckets, max_distance)
        self.shared = nn.Embedding(vocab_size, hidden_size)
        self.encoder = Stack(settings, depth=num_layers, is_decoder=False)
        self.decoder = Stack(settings, depth=num_decoder_layers, is_decoder=True)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.criterion: nn.Module = nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes all weights and ties the head; also called for a model created on the meta device."""
        factor = self.settings["initializer_factor"]
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                # Attention does not divide its scores by the root of the head's width, so the initial query weights are
                # smaller.
                fan_in = module.in_features * (self.settings["head_size"] if name.endswith("Attention.q") else 1)
                nn.init.normal_(module.weight, std=factor * fan_in**-0.5)
            elif isinstance(module, nn.Embedding):
                spread = 1.0 if module is self.shared else self.settings["hidden_size"] ** -0.5
                nn.init.normal_(module.weight, std=factor * spread)
            elif isinstance(module, nn.RMSNorm):
                nn.init.constant_(module.weight, factor)
        if self.settings["tie_embeddings"]:
            # Moving off the meta device creates two parameters from the shared one; this ties them again.
            self.lm_head.weight = self.shared.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        """Maps inputs [B, S] and targets [B, T] to logits [B, T, vocabulary] and, given labels, their mean loss.

        `labels` [B, T] are the target's tokens, with -100 at ignored positions. The decoder reads
        `decoder_input_ids` [B, T], by default the labels shifted to the right. Both masks are 0 at padding; with
        padding on the right the decoder needs none.
        """
        check_ids(input_ids)
        if decoder_input_ids is None:
            decoder_input_ids = self.shift_right(labels)
        check_ids(decoder_input_ids, name="decoder_input_ids")
        unpadded = unpadded_keys(attention_mask)
        states = self.encoder(embed(self.shared, input_ids), unpadded)
        visible = visible_keys(decoder_attention_mask, None)
        if visible is None:
            length = decoder_input_ids.shape[1]
            visible = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        written = self.decoder(
            embed(self.shared, decoder_input_ids, name="decoder_input_ids"), visible, states, unpadded
        )
        if self.settings["scale_outputs"]:
            written = written * self.settings["hidden_size"] ** -0.5
        return score_tokens(self, written, labels, WholeSequence())

    def shift_right(self, labels: Tensor | None) -> Tensor:
        """Returns the decoder's input for the labels [B, T]: the start token, then all labels except the last."""
        if labels is None:
            raise DataError("T5 received neither labels nor decoder_input_ids, so its decoder has no input.")
        shifted = F.pad(labels[:, :-1], (1, 0), value=self.settings["decoder_start_token_id"])
        return shifted.masked_fill(shifted == IGNORED_LABEL, self.settings["pad_token_id"])

    @classmethod
    def key_map(cls) -> KeyMap:
        """Returns the names in files, with the exception described in HeadKeyMap."""
        return HeadKeyMap(cls.key_rules, ignored=cls.ignored_keys, prefix=cls.hugging_face_prefix)

    @classmethod
    def settings_from_hugging_face(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keywords for a config.json of T5; missing keys have transformers' defaults.

        `tie_word_embeddings: false` has always meant an untied head and outputs that are not scaled. Newer files have
        true for every model, and `scale_decoder_outputs` for the difference.
        """
        settings = super().settings_from_hugging_face(config)
        scale_outputs = config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
        if settings["decoder_start_token_id"] is None:
            settings["decoder_start_token_id"] = settings["pad_token_id"]
        return settings | {
            "feed_forward": feed_forward_of(config),
            "tie_embeddings": scale_outputs and settings["tie_embeddings"],
            "scale_outputs": scale_outputs,
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """Returns the settings under the names of transformers' T5Config."""
        kind = self.settings["feed_forward"]
        gated = {"is_gated_act": kind.startswith("gated-"), "dense_act_fn": _activation_of(kind)}
        return {**super().to_hugging_face(), **gated, "is_encoder_decoder": True}

    def unwritten(self) -> tuple[str, ...]:
        """Omits a separate head that equals the embeddings, as in transformers; HeadKeyMap restores it."""
        head, embeddings = self.lm_head.weight, self.shared.weight
        is_copy = head is not embeddings and not head.is_meta and torch.equal(head, embeddings)
        return (*super().unwritten(), "lm_head") if is_copy else super().unwritten()


class HeadKeyMap(KeyMap):
    """Reads the head from the embeddings if a file has no separate head, for a model whose head is not tied.

    transformers ties such heads if both weights are equal, and stores them once.
    """

    def ours_in(self, keys: Sequence[str]) -> dict[str, tuple[str, bool]]:
        """Maps our names to keys of a file."""
        found = super().ours_in(keys)
        if "shared.weight" in found:
            found.setdefault("lm_head.weight", found["shared.weight"])
        return found


class Stack(nn.Module):
    """The encoder, or the decoder, which also attends to the encoder's states; both map [B, S, D] to [B, S, D]."""

    def __init__(self, settings: Mapping[str, Any], *, depth: int, is_decoder: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            Block(settings, is_decoder=is_decoder, has_bias=number == 0) for number in range(depth)
        )
        self.final_layer_norm = nn.RMSNorm(settings["hidden_size"], eps=settings["norm_eps"])
        self.dropout = nn.Dropout(settings["dropout"])

    def forward(
        self,
        hidden: Tensor,
        visible: Tensor | None,
        states: Tensor | None = None,
        visible_states: Tensor | None = None,
    ) -> Tensor:
        """Runs every block with the biases that the first one computes.

        `visible` is the mask of keys, `states` [B, S, D] are those of the encoder, and `visible_states` is their mask.
        """
        hidden = self.dropout(hidden)
        bias, name = None, "encoder_input" if states is None else "decoder_input"
        for block in self.block:
            hidden, bias = block(name_tensor(hidden, name), bias, visible, states, visible_states)
        normalized: Tensor = self.dropout(self.final_layer_norm(hidden))
        return normalized


class Block(nn.Module):
    """Self-attention, in the decoder attention to the encoder's states, then the MLP."""

    def __init__(self, settings: Mapping[str, Any], *, is_decoder: bool, has_bias: bool) -> None:
        super().__init__()
        attention = Attention(settings, is_decoder=is_decoder, has_bias=has_bias)
        parts = [SubLayer(settings, SelfAttention=attention)]
        if is_decoder:
            parts.append(SubLayer(settings, EncDecAttention=Attention(settings, is_decoder=True, has_bias=False)))
        parts.append(SubLayer(settings, DenseReluDense=FeedForward(settings)))
        self.layer = nn.ModuleList(parts)

    def forward(
        self,
        hidden: Tensor,
        bias: Tensor | None,
        visible: Tensor | None,
        states: Tensor | None,
        visible_states: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream after this block, and the biases [B or 1, H, S, S] for the following blocks."""
        parts: list[Any] = list(self.layer)
        read, *crossing, think = parts
        if bias is None:
            # Inside the block, because its weights may be gathered only while it runs.
            bias = read.SelfAttention.position_bias(hidden, visible)
        hidden = read.add(hidden, read.SelfAttention(read.layer_norm(hidden), mask=bias))
        for cross in crossing:
            hidden = cross.add(hidden, cross.EncDecAttention(cross.layer_norm(hidden), states, mask=visible_states))
        return think.add(hidden, think.DenseReluDense(think.layer_norm(hidden))), bias


class SubLayer(nn.Module):
    """A norm, a module with its name in files, and the dropout of its output."""

    def __init__(self, settings: Mapping[str, Any], **module: nn.Module) -> None:
        super().__init__()
        for name, one in module.items():
            self.add_module(name, one)
        self.layer_norm = nn.RMSNorm(settings["hidden_size"], eps=settings["norm_eps"])
        self.dropout = nn.Dropout(settings["dropout"])

    def add(self, hidden: Tensor, addition: Tensor) -> Tensor:
        """Returns the residual stream with the output added."""
        dropped: Tensor = self.dropout(addition)
        return hidden + dropped


class Attention(nn.Module):
    """Attention whose scores are not scaled; the first of a stack has the table of biases by distance."""

    def __init__(self, settings: Mapping[str, Any], *, is_decoder: bool, has_bias: bool) -> None:
        super().__init__()
        hidden_size, self.head_size = settings["hidden_size"], settings["head_size"]
        inner_size = settings["num_heads"] * self.head_size
        self.dropout = settings["dropout"]
        self.is_decoder = is_decoder
        self.max_distance = settings["max_distance"]
        self.q = nn.Linear(hidden_size, inner_size, bias=False)
        self.k = nn.Linear(hidden_size, inner_size, bias=False)
        self.v = nn.Linear(hidden_size, inner_size, bias=False)
        self.o = nn.Linear(inner_size, hidden_size, bias=False)
        if has_bias:
            self.relative_attention_bias = nn.Embedding(settings["num_buckets"], settings["num_heads"])

    def forward(self, hidden: Tensor, states: Tensor | None = None, *, mask: Tensor | None) -> Tensor:
        """Attention over the residual stream itself or the encoder's states: [B, S, D] → [B, S, D]."""
        source = hidden if states is None else states
        dropout = self.dropout if self.training else 0.0
        queries, keys, values = self.q(hidden), self.k(source), self.v(source)
        mixed = attend(queries, keys, values, head_size=self.head_size, mask=mask, dropout=dropout, scale=1.0)
        output: Tensor = self.o(mixed)
        return output

    def position_bias(self, hidden: Tensor, visible: Tensor | None) -> Tensor:
        """Returns the values that are added to the scores, [B or 1, H, S, S]: a bias by distance, and a very low number
        where masked."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        table = self.relative_attention_bias
        buckets = distance_buckets(
            positions[None, :] - positions[:, None],
            num_buckets=table.num_embeddings,
            max_distance=self.max_distance,
            both_ways=not self.is_decoder,
        )
        bias: Tensor = table(buckets).permute(2, 0, 1)[None]
        # The lowest number instead of -inf, so a query without visible keys has uniform weights instead of nan.
        return bias if visible is None else bias.masked_fill(~visible, torch.finfo(bias.dtype).min)


class FeedForward(nn.Module):
    """The MLP, gated or not."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size, intermediate_size = settings["hidden_size"], settings["intermediate_size"]
        kind = settings["feed_forward"]
        self.is_gated = kind.startswith("gated-")
        if self.is_gated:
            self.wi_0 = nn.Linear(hidden_size, intermediate_size, bias=False)
            self.wi_1 = nn.Linear(hidden_size, intermediate_size, bias=False)
        else:
            self.wi = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.wo = nn.Linear(intermediate_size, hidden_size, bias=False)
        name = _activation_of(kind)
        self.activation = activation(name, setting="feed_forward (less gated-)" if self.is_gated else "feed_forward")
        self.dropout = nn.Dropout(settings["dropout"])

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [B, S, D] to [B, S, D]."""
        if self.is_gated:
            widened = self.activation(self.wi_0(hidden)) * self.wi_1(hidden)
        else:
            widened = self.activation(self.wi(hidden))
        output: Tensor = self.wo(self.dropout(widened))
        return output


def distance_buckets(distances: Tensor, *, num_buckets: int, max_distance: int, both_ways: bool) -> Tensor:
    """Returns the bucket of each distance (the key's position minus the query's), of any shape.

    Half of the buckets have one distance each; the others are uniform on a log scale up to `max_distance`. An encoder
    is bidirectional and has the same number of buckets for each direction; in a decoder, later keys are in the bucket
    of distance 0.
    """
    offset = torch.zeros_like(distances)
    if both_ways:
        num_buckets //= 2
        offset = (distances > 0) * num_buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    num_exact = num_buckets // 2
    on_log_scale = torch.log(distances.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    far = (num_exact + (on_log_scale * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distances < num_exact, distances, far)


def feed_forward_of(config: Mapping[str, Any]) -> str:
    """Returns the `feed_forward` of a config.json; `dense_act_fn` and `is_gated_act` take precedence if they are set.

    Files contain the same information twice, and transformers uses these two keys.
    """
    told = str(config.get("feed_forward_proj", "relu"))
    is_gated = bool(config.get("is_gated_act", told.startswith("gated-")))
    name = str(config.get("dense_act_fn", _activation_of(told)))
    if (is_gated, name) == (told.startswith("gated-"), _activation_of(told)):
        return told
    found = f"gated-{name}" if is_gated else name
    if _activation_of(found) != name:
        raise ConfigError(
            f"feed_forward_proj is {told!r} and dense_act_fn {name!r}, a gated MLP that has no name here: gated-gelu "
            "is the approximation by tanh (gelu_new). Use transformers' own class: type: "
            "transformers:T5ForConditionalGeneration."
        )
    return found


def _activation_of(feed_forward: str) -> str:
    """The name of the function in a `feed_forward`: "gated-gelu" has always been the approximation by tanh."""
    return "gelu_new" if feed_forward == "gated-gelu" else feed_forward.removeprefix("gated-")


def check_buckets(num_buckets: int, max_distance: int) -> None:
    """Rejects a table of distances without a bucket for each kind, or whose last buckets begin beyond the end."""
    if num_buckets < 4 or max_distance <= num_buckets // 2:
        raise ConfigError(
            f"num_buckets is {num_buckets} and max_distance {max_distance}. Use at least 4 buckets, and a max_distance "
            "of more than half of them."
        )
