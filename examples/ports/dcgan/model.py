"""Networks: the generator and the discriminator, as one module for one checkpoint."""

import torch
from torch import nn


def generator(noise, width):
    return nn.Sequential(
        nn.ConvTranspose2d(noise, 2 * width, 2, bias=False),  # 2 × 2
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),  # 4 × 4
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1, bias=False),  # 8 × 8
        nn.Tanh(),
    )


def discriminator(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 2, bias=False),
        nn.Flatten(0),
        nn.Sigmoid(),
    )


def init_weights(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


class Networks(nn.Module):
    def __init__(self, noise=16, width=16):
        super().__init__()
        self.noise = noise
        self.generator, self.discriminator = generator(noise, width), discriminator(width)
        self.apply(init_weights)

    def draw_noise(self, images):
        return torch.randn(len(images), self.noise, 1, 1, device=images.device)
