"""Bert and BertClassifier: a bidirectional encoder, with a head for masked tokens or a head for whole texts.

Parameters are named as in transformers' BertForMaskedLM and BertForSequenceClassification.
Shapes in comments: batch B, sequence S, hidden width D. Training lives in trainers/.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import ConfigError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.layers.annotations import name_tensor
from trainwright.models.layers.attention import WholeSequence, attend, unpadded_keys
from trainwright.models.layers.losses import (
    at_least_float32,
    class_criterion,
    class_loss,
    fuses_loss,
    head_loss,
)
from trainwright.models.layers.settings import (
    ENCODER_KEYS,
    check_heads,
    check_ids,
    check_keywords,
    check_length,
    draw_weights,
    embed,
    keywords_of,
)
from trainwright.models.layers.settings import activation as find_activation
from trainwright.models.model import KeyRule, Model

# The files of the first BERT name the weights of norms gamma and beta. These are only read; the rules above define what
# is written.
NORM_RULES = (
    KeyRule("**.LayerNorm.weight", "**.LayerNorm.weight"),
    KeyRule("**.LayerNorm.bias", "**.LayerNorm.bias"),
    KeyRule("**.LayerNorm.weight", "**.LayerNorm.gamma"),
    KeyRule("**.LayerNorm.bias", "**.LayerNorm.beta"),
)


class BertModel(Model):
    """The encoder and its forward pass; a subclass adds a head, in `finish`."""

    hugging_face_types = ("bert",)
    hugging_face_prefix = "bert"
    transformers_class = "AutoModelForMaskedLM, or AutoModelForSequenceClassification"
    key_rules = NORM_RULES
    blocks = "bert.encoder.layer"
    parts_before_blocks = ("bert.embeddings",)
    fixed_config = MappingProxyType(
        {
            "is_decoder": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
            "position_embedding_type": "absolute",
        }
    )
    config_keys = MappingProxyType(
        {
            **ENCODER_KEYS,
            "vocab_size": ("vocab_size", 30522),
            "max_positions": ("max_position_embeddings", 512),
            "num_token_types": ("type_vocab_size", 2),
            "dropout": ("hidden_dropout_prob", 0.1),
            "attention_dropout": ("attention_probs_dropout_prob", 0.1),
            "pad_token_id": ("pad_token_id", 0),
        }
    )

    bert: Body
    sequence: WholeSequence
    max_positions: int

    def reset_parameters(self) -> None:
        """Initializes all weights."""
        draw_weights(self, self.settings["initializer_range"])

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        """Maps tokens [B, S] to logits and, given labels, their mean loss.

        `attention_mask` [B, S] is 0 at padding; `token_type_ids` [B, S] are the index of the text in a pair.
        """
        check_ids(input_ids)
        check_length(input_ids.shape[1], self.max_positions)
        return self.finish(self.bert(input_ids, attention_mask, token_type_ids, position_ids), labels=labels)

    def begin(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Embeds the tokens [B, S]: returns the states [B, S, D] for the first layer."""
        check_ids(input_ids)
        check_length(input_ids.shape[1], self.max_positions)
        return self.bert.begin(input_ids, token_type_ids, position_ids)

    def hidden_shape(self, input_ids: Tensor, **_: Any) -> tuple[int, ...]:
        """Returns [B, S, D] of the states."""
        return (*self.sequence.take(input_ids).shape, self.settings["hidden_size"])

    def beside(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor | None]:
        """Returns the mask for all layers."""
        return (self.bert.mask(input_ids, attention_mask),)


class Bert(BertModel):
    """Predicts masked tokens: `labels` [B, S] contain them, and -100 at all other positions.

    `forward` returns `{"loss": ..., "logits": ...}`, logits [B, S, vocabulary]; without labels the loss is None.
    `dropout` applies to the embeddings and to the outputs of each part, `attention_dropout` to the attention weights.
    The embedding of `pad_token_id` gets no gradient; None treats it like any other. `fused_loss` computes head and loss
    in chunks in training, so the logits of all tokens are never in memory and `logits` is None. None enables it on a
    GPU if the model has its original head and criterion.
    """

    hugging_face_architectures = MappingProxyType({"bert": "BertForMaskedLM"})
    # Keys that are computed, or that belong to other tasks.
    ignored_keys = ("bert.embeddings.position_ids", "bert.pooler.**", "cls.seq_relationship.**")

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        intermediate_size: int | None = None,
        max_positions: int = 512,
        num_token_types: int = 2,
        activation: str = "gelu",
        norm_eps: float = 1e-12,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        pad_token_id: int | None = 0,
        initializer_range: float = 0.02,
        fused_loss: bool | None = None,
    ) -> None:
        check_keywords(Bert.__init__, locals())
        intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        settings = keywords_of(locals())
        super().__init__()
        self.settings = settings
        self.max_positions = max_positions
        self.fused_loss = fused_loss
        self.sequence = WholeSequence()
        self.bert = Body(settings, with_pooler=False)
        self.cls = nn.ModuleDict({"predictions": TokenHead(hidden_size, vocab_size, activation, norm_eps)})
        self.criterion: nn.Module = nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes all weights and ties the head."""
        super().reset_parameters()
        head: Any = self.cls["predictions"]
        # Moving off the meta device creates two parameters from a shared one; this ties them again.
        head.decoder.weight = self.bert.embeddings.word_embeddings.weight
        head.bias = head.decoder.bias

    def finish(self, hidden: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor | None]:
        """Returns the loss and the logits of the last layer's states [B, S, D]."""
        head: Any = self.cls["predictions"]
        if labels is None:
            return {"loss": None, "logits": self.sequence.whole(head(hidden))}
        targets = self.sequence.take(labels, fill=IGNORED_LABEL)
        if fuses_loss(self.fused_loss, head.decoder, self.criterion, hidden, training=self.training):
            loss = head_loss(head.decoder, head.before_decoder(hidden), targets)
            return {"loss": self.sequence.mean(loss, targets), "logits": None}
        logits = head(hidden)
        loss = self.criterion(at_least_float32(logits.flatten(0, 1)), targets.flatten())
        return {"loss": self.sequence.mean(loss, targets), "logits": self.sequence.beside_loss(logits)}


class BertClassifier(BertModel):
    """Classifies texts, or pairs of texts, into `num_labels` classes: `labels` [B]; one label means regression.

    `forward` returns `{"loss": ..., "logits": ...}`, logits [B, num_labels]; without labels the loss is None. It also
    reads the folder of a plain encoder with `strict=False`: the classifier (and a missing pooler) is then initialized.
    `classifier_dropout` applies to the pooled text and defaults to `dropout`.
    """

    hugging_face_architectures = MappingProxyType({"bert": "BertForSequenceClassification"})
    ignored_keys = ("bert.embeddings.position_ids", "cls.**")
    has_labels = True
    config_keys = MappingProxyType({**BertModel.config_keys, "classifier_dropout": ("classifier_dropout", None)})

    def __init__(
        self,
        *,
        vocab_size: int,
        num_labels: int = 2,
        hidden_size: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        intermediate_size: int | None = None,
        max_positions: int = 512,
        num_token_types: int = 2,
        activation: str = "gelu",
        norm_eps: float = 1e-12,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        classifier_dropout: float | None = None,
        pad_token_id: int | None = 0,
        initializer_range: float = 0.02,
    ) -> None:
        check_keywords(BertClassifier.__init__, locals())
        intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        classifier_dropout = dropout if classifier_dropout is None else classifier_dropout
        settings = keywords_of(locals())
        super().__init__()
        self.settings = settings
        self.max_positions = max_positions
        self.sequence = WholeSequence()
        self.bert = Body(settings, with_pooler=True)
        self.dropout = nn.Dropout(classifier_dropout)
        self.classifier = nn.Linear(hidden_size, num_labels)
        self.criterion: nn.Module = class_criterion(num_labels)
        self.reset_parameters()

    def finish(self, hidden: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor | None]:
        """Returns the loss and the logits of the last layer's states [B, S, D]."""
        # The first token is on only one rank; every rank scores the whole text.
        logits = self.classifier(self.dropout(self.bert.pooler(self.sequence.whole(hidden))))
        return {"loss": class_loss(self.criterion, logits, labels), "logits": logits}


class Body(nn.Module):
    """The body of both models: tokens [B, S] → states [B, S, D]; the head calls the pooler, if there is one."""

    def __init__(self, settings: Mapping[str, Any], *, with_pooler: bool) -> None:
        super().__init__()
        check_heads(settings["hidden_size"], settings["num_heads"])
        if (settings["pad_token_id"] or 0) >= settings["vocab_size"]:
            raise ConfigError(
                f"pad_token_id is {settings['pad_token_id']}, but the largest id of vocab_size "
                f"{settings['vocab_size']} is {settings['vocab_size'] - 1}. Use a smaller id, or null for no padding."
            )
        self.embeddings = Embeddings(settings)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(settings) for _ in range(settings["num_layers"]))})
        self.pooler: Any = Pooler(settings["hidden_size"]) if with_pooler else None
        self.sequence = WholeSequence()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Runs every layer with the same mask, which is computed once."""
        hidden = self.begin(input_ids, token_type_ids, position_ids)
        mask = self.mask(input_ids, attention_mask)
        layers: Any = self.encoder["layer"]
        for layer in layers:
            hidden = layer(name_tensor(hidden, "encoder_input"), mask)
        return hidden

    def begin(self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """Returns the embeddings [B, S, D] of the tokens."""
        hidden: Tensor = self.embeddings(input_ids, token_type_ids, position_ids)
        return hidden

    def mask(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """Returns the mask of visible keys; None if all are visible."""
        bounds = self.sequence.bounds(input_ids.shape[1], input_ids.device)
        return bounds if attention_mask is None else unpadded_keys(attention_mask)


class Embeddings(nn.Module):
    """Adds the embeddings of the token, its position and the text that it belongs to."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size = settings["hidden_size"]
        pad_token_id = settings["pad_token_id"]
        self.word_embeddings = nn.Embedding(settings["vocab_size"], hidden_size, padding_idx=pad_token_id)
        self.position_embeddings = nn.Embedding(settings["max_positions"], hidden_size)
        self.token_type_embeddings = nn.Embedding(settings["num_token_types"], hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=settings["norm_eps"])
        self.dropout = nn.Dropout(settings["dropout"])
        self.sequence = WholeSequence()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """Returns [B, S, D]; without types, all tokens belong to the first text; without positions, they count from
        0."""
        if position_ids is None:
            positions = self.sequence.positions(input_ids.shape[1], input_ids.device)
        else:
            positions = self.sequence.take(position_ids)
        if token_type_ids is None:
            types = self.token_type_embeddings.weight[0]  # [D], for all tokens alike
        else:
            types = embed(self.token_type_embeddings, self.sequence.take(token_type_ids), name="token_type_ids")
        words = embed(self.word_embeddings, self.sequence.take(input_ids))
        summed = words + types + self.position_embeddings(positions)
        embedded: Tensor = self.dropout(self.LayerNorm(summed))
        return embedded


class Layer(nn.Module):
    """Attention, then the MLP; each output is added to the residual stream [B, S, D], and the sum is normalized."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size, intermediate_size = settings["hidden_size"], settings["intermediate_size"]
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(settings), "output": AddAndNormalize(hidden_size, settings)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden_size, intermediate_size)})
        self.output = AddAndNormalize(intermediate_size, settings)
        self.activation = find_activation(settings["activation"])

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the residual stream after this layer."""
        hidden = self.attention["output"](self.attention["self"](hidden, mask), hidden)
        widened = self.activation(self.intermediate["dense"](hidden))
        output: Tensor = self.output(widened, hidden)
        return output


class SelfAttention(nn.Module):
    """Attention in both directions."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size = settings["hidden_size"]
        self.head_size = hidden_size // settings["num_heads"]
        self.dropout = settings["attention_dropout"]
        self.sequence = WholeSequence()
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Self-attention: [B, S, D] → [B, S, D]; the next module has the output projection."""
        return attend(
            self.query(hidden),
            self.key(hidden),
            self.value(hidden),
            head_size=self.head_size,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            sequence=self.sequence,
        )


class AddAndNormalize(nn.Module):
    """Projects [B, S, any] to [B, S, D], adds the residual stream and normalizes the sum."""

    def __init__(self, input_size: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.dense = nn.Linear(input_size, settings["hidden_size"])
        self.LayerNorm = nn.LayerNorm(settings["hidden_size"], eps=settings["norm_eps"])
        self.dropout = nn.Dropout(settings["dropout"])

    def forward(self, addition: Tensor, hidden: Tensor) -> Tensor:
        """Returns the residual stream; dropout applies to the added output."""
        output: Tensor = self.LayerNorm(self.dropout(self.dense(addition)) + hidden)
        return output


class Pooler(nn.Module):
    """Computes one vector [B, D] per text from the state of its first token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [B, S, D] to [B, D]."""
        return torch.tanh(self.dense(hidden[:, 0]))


class TokenHead(nn.Module):
    """Maps states [B, S, D] to logits [B, S, vocabulary] with the embedding table, which is the decoder's matrix."""

    def __init__(self, hidden_size: int, vocab_size: int, activation: str, norm_eps: float) -> None:
        super().__init__()
        norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.transform = nn.ModuleDict({"dense": nn.Linear(hidden_size, hidden_size), "LayerNorm": norm})
        self.decoder = nn.Linear(hidden_size, vocab_size)
        self.bias = self.decoder.bias  # the name in files
        self.activation = find_activation(activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.decoder(self.before_decoder(hidden))
        return logits

    def before_decoder(self, hidden: Tensor) -> Tensor:
        """Returns the states [B, S, D] for the decoder's matrix."""
        transformed: Tensor = self.transform["LayerNorm"](self.activation(self.transform["dense"](hidden)))
        return transformed
