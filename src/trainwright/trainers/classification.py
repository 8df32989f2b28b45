"""Trains a classifier and logs its accuracy, in training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from trainwright.events import Mean
from trainwright.events.mean import IGNORED_LABEL
from trainwright.loop.outputs import ForwardResult
from trainwright.loop.trainer import Trainer


class ClassificationTrainer(Trainer):
    """Adds `accuracy` if the forward returns `logits` [..., classes], or only scores, and the batch has `labels` [...].

    Samples may be pairs: the first element is the model's first parameter, the second one the label.

    Labels of −100 are ignored, as in the loss. There is no accuracy for labels of another shape (soft labels, one score
    per sample).
    """

    known_eval_names: ClassVar[tuple[str, ...]] = ("loss", "accuracy")

    def add_metrics(self, result: ForwardResult, batch: Any) -> None:
        """Adds the accuracy, without leaving the device."""
        outputs = result.outputs or {}
        logits: Any = outputs.get("logits", next(iter(outputs.values())) if len(outputs) == 1 else None)
        labels: Any = batch.get("labels") if isinstance(batch, Mapping) else None
        if _are_classes(logits, labels):
            correct = (logits.detach().argmax(-1) == labels).sum()
            result.metrics["accuracy"] = Mean(correct, (labels != IGNORED_LABEL).sum())


def _are_classes(logits: Any, labels: Any) -> bool:
    if not (isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor)):
        return False
    return logits.shape[:-1] == labels.shape and logits.ndim > 0 and logits.shape[-1] > 1
