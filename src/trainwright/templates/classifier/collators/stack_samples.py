"""StackSamples: converts a list of samples to a batch. The place to pad, crop or tokenize."""

import torch


class StackSamples:
    """Stacks each field. The built-in `stack` does the same; write your own when samples differ in length.

    The batch's keys are the arguments of Trainer.forward. It is used in training and in evaluation.
    """

    def __call__(self, samples):
        return {
            "features": torch.stack([sample["features"] for sample in samples]),  # [batch, features]
            "labels": torch.stack([sample["labels"] for sample in samples]),  # [batch]
        }
