"""Waves: sums of three sines. Any object with a length and items by index is a dataset."""

import math

import torch
from torch.utils.data import Dataset


class Waves(Dataset):
    """Each sample is {"wave": a tensor [length]}; the same arguments always give the same waves."""

    def __init__(self, part="train", num_samples=2000, length=64):
        generator = torch.Generator().manual_seed({"train": 0, "valid": 1}[part])
        time = torch.linspace(0, 2 * math.pi, length)
        frequency = torch.randint(1, 6, (num_samples, 3, 1), generator=generator)
        phase = 2 * math.pi * torch.rand(num_samples, 3, 1, generator=generator)
        self.waves = (frequency * time + phase).sin().mean(dim=1)  # [num_samples, length]

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        return {"wave": self.waves[index]}
