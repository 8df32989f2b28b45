"""Trains a classifier and logs its accuracy, in training and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.events import Mean
from trainwright.loop.outputs import ForwardResult
from trainwright.loop.trainer import Trainer


class ClassificationTrainer(Trainer):
    """Adds `accuracy` where the forward gives `logits` of shape [..., classes] and the batch has `labels`."""

    def run_forward(self, batch: Any) -> ForwardResult:
        """Runs the forward and measures it; nothing leaves the device."""
        result = super().run_forward(batch)
        logits = (result.outputs or {}).get("logits")
        if logits is not None and isinstance(batch, Mapping) and "labels" in batch:
            right = (logits.detach().argmax(-1) == batch["labels"]).sum()
            result.metrics["accuracy"] = Mean(right, batch["labels"].numel())
        return result
