"""Inpainter: two hidden layers. A model is any nn.Module; its arguments are next to its type in run.yaml."""

import torch
from torch import nn


class Inpainter(nn.Module):
    def __init__(self, width=128, num_pixels=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2 * num_pixels, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, num_pixels),
        )

    def forward(self, pixels, is_hidden):
        return self.layers(torch.cat([pixels, is_hidden.float()], dim=-1))
