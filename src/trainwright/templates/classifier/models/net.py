"""Net: a small network with two hidden layers. Any torch module works; this file is independent of the training."""

from torch import nn


class Net(nn.Module):
    """Its arguments come from the `model` section of run.yaml."""

    def __init__(self, num_features, num_classes, width=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_features, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, num_classes),
        )

    def forward(self, features):
        return self.layers(features)  # [batch, classes]
