"""VAE: an encoder to a normal distribution, a sample of it, and a decoder. The model of original.py, unchanged."""

import torch
from torch import nn


class VAE(nn.Module):
    def __init__(self, num_pixels=64, width=128, num_latents=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(num_pixels, width), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(width, num_latents), nn.Linear(width, num_latents)
        self.decoder = nn.Sequential(nn.Linear(num_latents, width), nn.ReLU(), nn.Linear(width, num_pixels))

    def forward(self, pixels):
        hidden = self.encoder(pixels)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        latents = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(latents).sigmoid(), mean, log_variance
