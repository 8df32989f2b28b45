"""Policy: the scores of the two actions."""

from torch import nn


class Policy(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.6), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, observation):
        return self.layers(observation)
