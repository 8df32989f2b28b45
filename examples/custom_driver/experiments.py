"""The experiments of driver.py and `trainwright train --experiment NAME`: a sine, learned from noisy points."""

import torch
from torch import nn

from trainwright import Component, experiment


class Points(torch.utils.data.Dataset):
    def __init__(self, size, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = 6 * torch.rand(size, 1, generator=generator) - 3
        self.y = torch.sin(self.x) + 0.05 * torch.randn(size, 1, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class Curve(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))
        self.criterion = nn.MSELoss()

    def forward(self, x):
        return {"logits": self.layers(x)}


@experiment("sine")
def sine():
    return {
        "model": Component(Curve, width=32),
        "data": {"train": Component(Points, size=2000), "eval": {"valid": Component(Points, size=200, seed=1)}},
        "trainer": {"max_steps": 400, "global_batch_size": 64, "optimizer": {"type": "adamw", "lr": 1e-2}},
        "runtime": {"device": "cpu"},
    }
