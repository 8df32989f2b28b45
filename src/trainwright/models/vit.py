"""ViT: an encoder over image patches, with a classifier.

Files use the names of transformers' ViTForImageClassification; the modules here have shorter ones, mapped by rules.
Shapes in comments: batch B, patches and the class token S, hidden width D.
Training lives in trainers/classification.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import ConfigError, DataError
from trainwright.models.layers.annotations import name_tensor
from trainwright.models.layers.attention import attend
from trainwright.models.layers.losses import class_criterion, class_loss
from trainwright.models.layers.settings import ENCODER_KEYS, check_heads, check_keywords, keywords_of
from trainwright.models.layers.settings import activation as find_activation
from trainwright.models.model import KeyRule, Model


class ViT(Model):
    """Sorts images into `num_labels` classes: `labels` [B]; one label means a number to predict.

    `forward` returns `{"loss": ..., "logits": ...}`, logits [B, num_labels]; without labels the loss is None.
    `image_size` and `patch_size` are the pixels of a side, or [height, width]; incomplete patches are omitted.
    """

    hugging_face_types = ("vit",)
    hugging_face_architectures = MappingProxyType({"vit": "ViTForImageClassification"})
    hugging_face_prefix = "vit"
    ignored_keys = ("vit.pooler.**", "vit.embeddings.mask_token")  # heads of other tasks
    blocks = "vit.layers"
    parts_before_blocks = ("vit.patch_projection", "vit.cls_token", "vit.position_embeddings", "vit.dropout")
    has_labels = True
    config_keys = MappingProxyType(
        {
            **ENCODER_KEYS,
            "image_size": ("image_size", 224),
            "patch_size": ("patch_size", 16),
            "num_channels": ("num_channels", 3),
            "qkv_bias": ("qkv_bias", True),
            "dropout": ("hidden_dropout_prob", 0.0),
            "attention_dropout": ("attention_probs_dropout_prob", 0.0),
        }
    )
    key_rules = (
        KeyRule("vit.layers.*.attention.q_proj.*", "vit.encoder.layer.*.attention.attention.query.*"),
        KeyRule("vit.layers.*.attention.k_proj.*", "vit.encoder.layer.*.attention.attention.key.*"),
        KeyRule("vit.layers.*.attention.v_proj.*", "vit.encoder.layer.*.attention.attention.value.*"),
        KeyRule("vit.layers.*.attention.o_proj.*", "vit.encoder.layer.*.attention.output.dense.*"),
        KeyRule("vit.layers.*.mlp.fc1.*", "vit.encoder.layer.*.intermediate.dense.*"),
        KeyRule("vit.layers.*.mlp.fc2.*", "vit.encoder.layer.*.output.dense.*"),
        KeyRule("vit.layers.**", "vit.encoder.layer.**"),
        KeyRule("vit.patch_projection.*", "vit.embeddings.patch_embeddings.projection.*"),
        KeyRule("vit.cls_token", "vit.embeddings.cls_token"),
        KeyRule("vit.position_embeddings", "vit.embeddings.position_embeddings"),
    )

    def __init__(
        self,
        *,
        num_labels: int,
        image_size: int | Sequence[int] = 224,
        patch_size: int | Sequence[int] = 16,
        num_channels: int = 3,
        hidden_size: int = 192,
        num_layers: int = 4,
        num_heads: int = 4,
        intermediate_size: int | None = None,
        qkv_bias: bool = True,
        activation: str = "gelu",
        norm_eps: float = 1e-12,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        initializer_range: float = 0.02,
    ) -> None:
        check_keywords(ViT.__init__, locals())
        intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        image_size = image_size if isinstance(image_size, int) else list(image_size)
        patch_size = patch_size if isinstance(patch_size, int) else list(patch_size)
        settings = keywords_of(locals())
        super().__init__()
        self.settings = settings
        check_heads(hidden_size, num_heads)
        self.vit = Body(settings)
        self.classifier = nn.Linear(hidden_size, num_labels)
        self.criterion: nn.Module = class_criterion(num_labels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes all weights; also called for a model created on the meta device."""
        spread = self.settings["initializer_range"]
        # torch 2.11 divides by the deviation.
        draw = partial(nn.init.trunc_normal_, std=spread) if spread else nn.init.zeros_
        draw(self.vit.cls_token)
        draw(self.vit.position_embeddings)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                draw(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        """Maps images [B, channels, height, width] to logits [B, num_labels] and, given labels, their mean loss."""
        return self._score(self.vit(pixel_values), labels)

    def begin(self, pixel_values: Tensor, **_: Any) -> Tensor:
        """Divides the images into patches and embeds them: returns the states [B, S, D] for the first layer."""
        return self.vit.begin(pixel_values)

    def hidden_shape(self, pixel_values: Tensor, **_: Any) -> tuple[int, ...]:
        """Returns [B, S, D] of the states."""
        return (len(pixel_values), *self.vit.states_shape)

    def beside(self, **_: Any) -> tuple[()]:
        """Returns no arguments, because a layer only needs the states."""
        return ()

    def finish(self, hidden: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor | None]:
        """Returns the loss and the logits of the last layer's states."""
        return self._score(self.vit.layernorm(hidden), labels)

    def _score(self, hidden: Tensor, labels: Tensor | None) -> dict[str, Tensor | None]:
        """Maps normalized states [B, S, D], the class token's first, to the logits and, given labels, their loss."""
        logits = self.classifier(hidden[:, 0])
        return {"loss": class_loss(self.criterion, logits, labels), "logits": logits}


class Body(nn.Module):
    """Images [B, channels, height, width] → normalized states [B, S, D], the class token's first."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size = settings["hidden_size"]
        self.image_shape = (settings["num_channels"], *pair("image_size", settings["image_size"]))
        patch = pair("patch_size", settings["patch_size"])
        num_patches = (self.image_shape[1] // patch[0]) * (self.image_shape[2] // patch[1])
        if num_patches == 0:
            raise ConfigError(
                f"patch_size {patch[0]} × {patch[1]} is larger than image_size {self.image_shape[1]} × "
                f"{self.image_shape[2]}: there is not one patch. Use smaller patches."
            )
        self.patch_projection = nn.Conv2d(settings["num_channels"], hidden_size, kernel_size=patch, stride=patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, hidden_size))
        self.states_shape = (num_patches + 1, hidden_size)
        self.position_embeddings = nn.Parameter(torch.empty(1, *self.states_shape))
        self.dropout = nn.Dropout(settings["dropout"])
        self.layers = nn.ModuleList(Layer(settings) for _ in range(settings["num_layers"]))
        self.layernorm = nn.LayerNorm(hidden_size, eps=settings["norm_eps"])

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Divides the images into patches, embeds and encodes them."""
        hidden = self.begin(pixel_values)
        for layer in self.layers:
            hidden = layer(name_tensor(hidden, "encoder_input"))
        normalized: Tensor = self.layernorm(hidden)
        return normalized

    def begin(self, pixel_values: Tensor) -> Tensor:
        """Divides the images into patches and embeds them; the images must have the size of the position embeddings."""
        if pixel_values.shape[1:] != self.image_shape:
            raise DataError(
                f"pixel_values have the shape {list(pixel_values.shape)}, but the model takes images of "
                f"{list(self.image_shape)} (num_channels, image_size). Resize them, or change the model's settings."
            )
        patches = self.patch_projection(pixel_values).flatten(2).transpose(1, 2)  # [B, S - 1, D]
        first = self.cls_token.expand(len(patches), -1, -1)
        hidden: Tensor = self.dropout(torch.cat((first, patches), dim=1) + self.position_embeddings)
        return hidden


class Layer(nn.Module):
    """Attention, then the MLP; each reads a normalized copy of the residual stream [B, S, D] and adds to it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.layernorm_before = nn.LayerNorm(settings["hidden_size"], eps=settings["norm_eps"])
        self.attention = Attention(settings)
        self.layernorm_after = nn.LayerNorm(settings["hidden_size"], eps=settings["norm_eps"])
        self.mlp = MLP(settings)
        self.dropout = nn.Dropout(settings["dropout"])

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the residual stream after this layer."""
        attended: Tensor = self.dropout(self.attention(self.layernorm_before(hidden)))
        hidden = hidden + attended
        transformed: Tensor = self.dropout(self.mlp(self.layernorm_after(hidden)))
        return hidden + transformed


class Attention(nn.Module):
    """Self-attention over all patches: [B, S, D] → [B, S, D]."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size, bias = settings["hidden_size"], settings["qkv_bias"]
        self.head_size = hidden_size // settings["num_heads"]
        self.dropout = settings["attention_dropout"]
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns what is added to the residual stream."""
        dropout = self.dropout if self.training else 0.0
        queries, keys, values = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        output: Tensor = self.o_proj(attend(queries, keys, values, head_size=self.head_size, dropout=dropout))
        return output


class MLP(nn.Module):
    """The MLP: [B, S, D] → [B, S, D]."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.fc1 = nn.Linear(settings["hidden_size"], settings["intermediate_size"])
        self.fc2 = nn.Linear(settings["intermediate_size"], settings["hidden_size"])
        self.activation = find_activation(settings["activation"])

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns what is added to the residual stream."""
        output: Tensor = self.fc2(self.activation(self.fc1(hidden)))
        return output


def pair(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    """Returns (height, width) of a side or a pair of sides."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2:
        raise ConfigError(f"{name} is {size}. Use a whole number of pixels, or [height, width].")
    return sides[0], sides[1]
