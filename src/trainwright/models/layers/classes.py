"""The loss of a classifier: over classes, or on one number where there is a single output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from trainwright.labels import IGNORED_LABEL
from trainwright.models.layers.precision import at_least_float32


def class_criterion(num_labels: int) -> nn.Module:
    """Returns the cross entropy over classes or, as transformers does, the squared error for a single output."""
    return nn.MSELoss() if num_labels == 1 else nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL)


def class_loss(criterion: nn.Module, logits: Tensor, labels: Tensor | None) -> Tensor | None:
    """Returns the loss of logits [B, classes] on labels [B], or None without labels.

    A single output is a number, not a class: it is compared with float labels as [B].
    """
    if labels is None:
        return None
    scores = at_least_float32(logits)
    if scores.shape[-1] == 1:
        scores, labels = scores.squeeze(-1), labels.reshape(scores.shape[:-1]).to(scores.dtype)
    loss: Tensor = criterion(scores, labels)
    return loss


def num_labels_of(config: Mapping[str, Any]) -> int:
    """Returns how many classes a config.json names; Hugging Face writes their names alone, and none for two."""
    if config.get("id2label"):
        return len(config["id2label"])
    return int(config.get("num_labels") or 2)


def label_names(num_labels: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the classes' names as config.json keeps them: numbers, unless as many names were read with the model."""
    if config.get("id2label") and len(config["id2label"]) == num_labels:
        return {}  # the config that was read is kept
    names = [f"LABEL_{number}" for number in range(num_labels)]
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
