"""Spirals: points on intertwined spirals, one class per arm. Replace it with your own dataset."""

import math

import torch
from torch.utils.data import Dataset


class Spirals(Dataset):
    """Any object with a length and items by index works. Each item is one sample, here a dict."""

    def __init__(self, part="train", num_samples=3000, num_classes=3, noise=0.3):
        # Each part has its own seed, so that no point is in both; the same arguments always give the same points.
        generator = torch.Generator().manual_seed({"train": 0, "valid": 1}[part])
        self.labels = torch.arange(num_samples) % num_classes
        radius = torch.rand(num_samples, generator=generator)
        angle = 2 * math.pi * (radius + self.labels / num_classes)
        angle = angle + noise * torch.randn(num_samples, generator=generator)
        self.features = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"features": self.features[index], "labels": self.labels[index]}
