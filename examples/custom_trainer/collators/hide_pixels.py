"""HidePixels: makes one batch of a list of samples, on the CPU; trainwright moves it to the device."""

import torch


class HidePixels:
    def __init__(self, share=0.3):
        self.share = share

    def __call__(self, samples):
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        # Drawn from the run's seed and the batch's place in it: a resumed run hides the same pixels.
        return {"pixels": pixels, "is_hidden": torch.rand_like(pixels) < self.share}
