"""Pair: the generator and its critic, as one module. One checkpoint contains both."""

import torch
from torch import nn


def network(inputs, width, outputs):
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


class Pair(nn.Module):
    def __init__(self, noise=8, width=64):
        super().__init__()
        self.noise = noise
        self.generator, self.critic = network(noise, width, 2), network(2, width, 1)

    def draw(self, like):
        """Draws as many points as there are in `like`; the random numbers depend on the run's seed and the step."""
        return self.generator(torch.randn(len(like), self.noise, device=like.device))
