"""Trains a masked language model on the mean loss per masked token, exactly for any batches."""

from __future__ import annotations

import torch

from trainwright.events.mean import IGNORED_LABEL
from trainwright.trainers.language_model import LanguageModelTrainer


class MaskedLanguageModelTrainer(LanguageModelTrainer):
    """Weights each micro-batch by its masked tokens; adds `perplexity`, that of the masked tokens.

    Expects `labels` as transformers does: the original token where one is to be predicted, −100 elsewhere. The
    collator of the same name makes them.
    """

    def count_targets(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the number of tokens to predict; labels are not shifted."""
        return (labels != IGNORED_LABEL).sum()
