"""Trains an encoder–decoder on the mean loss per target token, exactly for any batches."""

from __future__ import annotations

import torch

from trainwright.events.mean import IGNORED_LABEL
<<<<<<< HEAD
from trainwright.loop.trainer import Trainer
=======
from trainwright.trainers.language_model import LanguageModelTrainer
>>>>>>> pass-hooks


class SequenceToSequenceTrainer(LanguageModelTrainer):
    """Weights each micro-batch by its label tokens, so padding changes no gradient; adds `perplexity`.

    Expects `labels` as transformers does: the target tokens at the positions where they are predicted, not shifted;
    the model (or the collator) derives the decoder's inputs from them.
    """

<<<<<<< HEAD
    def forward(self, **batch: Any) -> Any:
        """Returns the task's outputs with the loss as a Mean over label tokens."""
        return self.read_outputs(self.task.forward(self.model, batch), batch)

    def read_outputs(self, outputs: Any, batch: Any) -> Any:
        """Weights the loss by its tokens."""
        if "labels" not in batch or not isinstance(outputs, Mapping) or outputs.get("loss") is None:
            given = f"a mapping of {', '.join(outputs)}" if isinstance(outputs, Mapping) else type(outputs).__name__
            raise TrainwrightError(
                "The sequence_to_sequence trainer needs `labels` in the batch and a mapping with `loss` from the "
                f"model; the batch has {', '.join(batch)} and the model gave {given}. Change them, or use another "
                "trainer."
            )
        loss = outputs["loss"]
        count = (batch["labels"] != IGNORED_LABEL).sum()
        if isinstance(loss, torch.Tensor):
            # A batch without a label token has a NaN mean; as a total of none it adds nothing.
            loss = Mean(torch.where(count > 0, loss * count, torch.zeros_like(loss)), count)
        return {**outputs, "loss": loss}

    def eval_end(self, aggregated: Any) -> dict[str, Any]:
        """Adds the perplexity, exp(loss)."""
        logs = super().eval_end(aggregated)
        if "loss" in logs:
            logs["perplexity"] = math.exp(min(logs["loss"], 700.0))  # beyond that a float overflows
        return logs
=======
    def count_targets(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the number of label tokens of a batch."""
        return (labels != IGNORED_LABEL).sum()
>>>>>>> pass-hooks
