"""Encoder: features, and the projection that the loss compares."""

from torch import nn


class Encoder(nn.Module):
    def __init__(self, width=64, num_dims=32):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))
        self.projection = nn.Sequential(nn.ReLU(), nn.Linear(width, num_dims))

    def forward(self, images):
        return nn.functional.normalize(self.projection(self.features(images)), dim=1)
