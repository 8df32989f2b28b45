"""AddNoise: a collator with arguments. It converts a list of samples to a batch."""

import torch


class AddNoise:
    """Returns each wave twice: unchanged, and with noise.

    Random numbers may be drawn here and in datasets: they depend on the run's seed and the batch's position, so a
    resumed run draws the same ones.
    """

    def __init__(self, noise=0.5):
        self.noise = noise

    def __call__(self, samples):
        clean = torch.stack([sample["wave"] for sample in samples])
        return {"noisy": clean + self.noise * torch.randn_like(clean), "clean": clean}  # each [batch, length]
