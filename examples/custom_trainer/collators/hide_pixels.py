"""HidePixels: converts a list of samples to a batch on the CPU; trainwright moves it to the device."""

import torch


class HidePixels:
    def __init__(self, share=0.3):
        self.share = share

    def __call__(self, samples):
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        # The random numbers depend on the run's seed and the batch's position, so a resumed run hides the same pixels.
        return {"pixels": pixels, "is_hidden": torch.rand_like(pixels) < self.share}
