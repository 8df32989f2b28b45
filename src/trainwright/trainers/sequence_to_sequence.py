"""Trains models whose labels are not shifted, on the mean loss per label token, exactly for any batches."""

from __future__ import annotations

import torch

from trainwright.events.mean import IGNORED_LABEL
from trainwright.trainers.language_model import LanguageModelTrainer


class SequenceToSequenceTrainer(LanguageModelTrainer):
    """Weights each micro-batch by its label tokens, so padding changes no gradient; adds `perplexity`.

    Expects `labels` as in transformers: the target tokens at the positions where they are predicted, not shifted; the
    model (or the collator) derives the decoder's inputs from them.
    """

    def count_targets(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the number of label tokens of a batch."""
        return (labels != IGNORED_LABEL).sum()


class MaskedLanguageModelTrainer(SequenceToSequenceTrainer):
    """Weights each micro-batch by its masked tokens; adds `perplexity`, that of the masked tokens.

    Expects `labels` as in transformers: the original token at each predicted position, −100 elsewhere. The
    collator of the same name makes them.
    """
