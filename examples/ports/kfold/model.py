"""Perceptron: the scores of three species."""

from torch import nn


class Perceptron(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, features):
        return self.layers(features)
