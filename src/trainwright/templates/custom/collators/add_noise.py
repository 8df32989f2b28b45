"""AddNoise: a collator with arguments. It makes one batch of a list of samples."""

import torch


class AddNoise:
    """Gives each wave twice: as it is, and with noise.

    Random numbers may be drawn here and in datasets: they follow from the run's seed and the batch's place in it,
    so a resumed run draws the same ones.
    """

    def __init__(self, noise=0.5):
        self.noise = noise

    def __call__(self, samples):
        clean = torch.stack([sample["wave"] for sample in samples])
        return {"noisy": clean + self.noise * torch.randn_like(clean), "clean": clean}  # each [batch, length]
