"""Small parts that tests train with: a dataset that draws random numbers, a net with dropout, and the like."""

import copy
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset


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


class PointStream(IterableDataset):
    """The same points as a stream that can only be iterated."""

    def __init__(self, size=100, seed=0, noise=0.0):
        self.points = Points(size, seed, noise)

    def __iter__(self):
        return (self.points[index] for index in range(len(self.points)))


class ShardedPoints(PointStream):
    """The same points as a stream of four shards, which goes on from a state."""

    num_shards = 4

    def __init__(self, size=100, seed=0, noise=0.0):
        super().__init__(size, seed, noise)
        self.indices = list(range(size))
        self.start = self.next = 0

    def shard(self, num_shards, index):
        part = copy.copy(self)
        part.indices = self.indices[index::num_shards]
        return part

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.start = state["next"]

    def __iter__(self):
        self.next, self.start = self.start, 0
        while self.next < len(self.indices):
            self.next += 1
            yield self.points[self.indices[self.next - 1]]


class Documents(Dataset):
    """Documents of 1 to 30 tokens."""

    def __init__(self, size=120):
        lengths = np.random.default_rng(0).integers(1, 31, size)
        self.documents = [[(7 * number + place) % 50 for place in range(n)] for number, n in enumerate(lengths)]

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        return {"input_ids": self.documents[index]}


class DocumentStream(ShardedPoints):
    """The same documents as a stream."""

    def __init__(self, size=120):
        super().__init__(size)
        self.points = Documents(size)


def halve_rate(step):
    """A factor for torch's LambdaLR."""
    return 0.5**step


class Sharpness(torch.optim.SGD):
    """Steps with the gradient at the weights moved along it, as sharpness-aware minimization does."""

    needs_closure = True
    num_evaluations = 0

    def step(self, closure=None):
        weights = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=0.05)
        closure()
        self.num_evaluations += 1
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
        super().step()
