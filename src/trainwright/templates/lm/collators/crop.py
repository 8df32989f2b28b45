"""Crop: converts a list of samples to a batch. The place to pad, mask or shorten."""

import torch


class Crop:
    """Stacks the samples' tokens, truncated to `max_length`; shorter blocks make faster steps.

    The batch's keys are the arguments that Trainer.forward gets. It is used in training and in evaluation.
    """

    def __init__(self, max_length):
        self.max_length = max_length

    def __call__(self, samples):
        tokens = torch.stack([sample["input_ids"][: self.max_length] for sample in samples])
        return {"input_ids": tokens}  # [batch, length]
