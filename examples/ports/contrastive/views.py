"""TwoViews: two random views of each image, shifted and with noise."""

import torch


class TwoViews:
    def __init__(self, noise=0.1):
        self.noise = noise

    def __call__(self, samples):
        images = torch.stack([sample["pixel_values"] for sample in samples])
        return {"first": self.change(images), "second": self.change(images)}

    def change(self, images):
        shifts = torch.randint(-1, 2, (len(images), 2)).tolist()
        shifted = torch.stack([image.roll(shift, dims=(-2, -1)) for image, shift in zip(images, shifts, strict=True)])
        return shifted + self.noise * torch.randn_like(shifted)
