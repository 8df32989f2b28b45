"""Small parts that tests train with: a dataset that draws random numbers, a net with dropout, and the like."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    """Points whose label is the sign of their sum. With `noise` each fetch draws from all three generators."""

    def __init__(self, size=100, seed=0, noise=0.0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 4, generator=generator)
        self.y = (self.x.sum(1) > 0).long()
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        if self.noise:
            x = x + self.noise * (torch.randn(4) + random.random() + float(np.random.rand()))
        return {"x": x, "labels": self.y[index]}


class Net(nn.Module):
    """Two layers with dropout; the loss as a mean over the batch."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 2))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": None if labels is None else self.criterion(logits, labels), "logits": logits}
