"""Trains a causal language model on the mean loss per predicted token, exactly for any batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from trainwright.errors import TrainwrightError
from trainwright.events import Mean
from trainwright.events.mean import IGNORED_LABEL
from trainwright.loop.trainer import Trainer


class LanguageModelTrainer(Trainer):
    """Weights each micro-batch by its predicted tokens, so padding changes no gradient; adds `perplexity`.

    Expects `labels` as in transformers: the same tokens as `input_ids`, shifted by the model.
    """

    known_eval_names: ClassVar[tuple[str, ...]] = ("loss", "perplexity")

    def count_targets(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the number of predicted tokens of a batch; the model does not predict the first one of a row."""
        return (labels[..., 1:] != IGNORED_LABEL).sum()

    def read_outputs(self, outputs: Any, batch: Any) -> Any:
        """Returns the outputs with the loss as a Mean over its tokens."""
        if "labels" not in batch or not isinstance(outputs, Mapping) or outputs.get("loss") is None:
            given = f"a mapping of {', '.join(outputs)}" if isinstance(outputs, Mapping) else type(outputs).__name__
            raise TrainwrightError(
                f"{type(self).__name__} needs `labels` in the batch and a mapping with `loss` from the model, but the "
                f"batch has {', '.join(batch)} and the model returned {given}. Change them, or use another "
                "trainer."
            )
        loss = outputs["loss"]
        if isinstance(loss, torch.Tensor):
            count = self._count_of_model(batch["labels"])
            # A batch without a predicted token has a mean of NaN; as a total of 0, it adds nothing.
            loss = Mean(torch.where(count > 0, loss * count, torch.zeros_like(loss)), count)
        return {**outputs, "loss": loss}

    def _count_of_model(self, labels: torch.Tensor) -> torch.Tensor:
        # The virtual tokens of peft's prompt learning predict the first label too.
        own = getattr(self.model, "count_targets", None) if hasattr(self.model, "peft_config") else None
        return self.count_targets(labels) if own is None else own(labels)

    def eval_end(self, aggregated: Any) -> dict[str, Any]:
        """Adds the perplexity, exp(loss)."""
        logs = super().eval_end(aggregated)
        if "loss" in logs:
            logs["perplexity"] = math.exp(min(logs["loss"], 700.0))  # beyond that a float overflows
        return logs
