"""CNN: a small convolutional classifier for images of any size.

Each stage halves the image and changes the number of channels; the channels of the last stage are averaged over all
positions. Shapes in comments: batch B, channels C. Training lives in trainers/classification.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from trainwright.errors import ConfigError, DataError
from trainwright.models.layers.losses import class_criterion, class_loss
from trainwright.models.layers.settings import check_keywords, keywords_of
from trainwright.models.model import Model


class CNN(Model):
    """Classifies images into `num_labels` classes: `labels` [B]; one label means regression.

    `forward` returns `{"loss": ..., "logits": ...}`, logits [B, num_labels]; without labels the loss is None.
    `stage_channels` has the channels of each stage, which consists of `convolutions_per_stage` convolutions with norm
    and relu; every stage except the first begins by halving height and width. The norm is a group norm (of at most
    `num_groups` groups), which unlike a batch norm treats each image independently.
    """

    hugging_face_types = ("trainwright_cnn",)
    hugging_face_architectures = MappingProxyType({"trainwright_cnn": "CNN"})
    has_labels = True
    config_keys = MappingProxyType(
        {
            "num_channels": ("num_channels", 3),
            "stage_channels": ("stage_channels", (32, 64, 128)),
            "convolutions_per_stage": ("convolutions_per_stage", 2),
            "num_groups": ("num_groups", 8),
            "dropout": ("dropout", 0.0),
        }
    )

    def __init__(
        self,
        *,
        num_labels: int,
        num_channels: int = 3,
        stage_channels: Sequence[int] = (32, 64, 128),
        convolutions_per_stage: int = 2,
        num_groups: int = 8,
        dropout: float = 0.0,
    ) -> None:
        check_keywords(CNN.__init__, locals())
        stage_channels = list(stage_channels)
        settings = keywords_of(locals())
        super().__init__()
        self.settings = settings
        if not stage_channels:
            raise ConfigError("stage_channels is empty. Set the channels of each stage, such as [32, 64].")
        for channels in stage_channels:
            if channels % min(num_groups, channels):
                raise ConfigError(
                    f"stage_channels {stage_channels}: {channels} does not split into {num_groups} groups "
                    "(num_groups). Use multiples of it, or fewer groups."
                )
        stages = []
        for number, channels in enumerate(stage_channels):
            before = num_channels if number == 0 else stage_channels[number - 1]
            layers = [Convolution(before, channels, groups=num_groups, stride=2 if number else 1)]
            for _ in range(convolutions_per_stage - 1):
                layers.append(Convolution(channels, channels, groups=num_groups, stride=1))
            stages.append(nn.Sequential(*layers))
        self.stages = nn.ModuleList(stages)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(stage_channels[-1], num_labels)
        self.criterion: nn.Module = class_criterion(num_labels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes all weights; also called for a model created on the meta device."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.GroupNorm):
                module.reset_parameters()
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        """Maps images [B, num_channels, height, width] to logits [B, num_labels] and, given labels, their mean loss."""
        if pixel_values.dim() != 4 or pixel_values.shape[1] != self.settings["num_channels"]:
            raise DataError(
                f"pixel_values have the shape {list(pixel_values.shape)}, but the model takes [batch, "
                f"{self.settings['num_channels']}, height, width]. Change the images, or model.num_channels."
            )
        hidden = pixel_values
        for stage in self.stages:
            hidden = stage(hidden)
        pooled = hidden.mean(dim=(2, 3))  # [B, C]
        logits = self.classifier(self.dropout(pooled))
        return {"loss": class_loss(self.criterion, logits, labels), "logits": logits}


class Convolution(nn.Module):
    """3 × 3 convolution, group norm, relu: [B, C, height, width] → [B, C', height, width] / stride."""

    def __init__(self, in_channels: int, out_channels: int, *, groups: int, stride: int) -> None:
        super().__init__()
        # No bias, because the norm would subtract it.
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm = nn.GroupNorm(min(groups, out_channels), out_channels)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the features for the next layer."""
        return torch.relu(self.norm(self.conv(hidden)))
