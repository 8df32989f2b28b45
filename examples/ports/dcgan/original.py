"""The loop that the port replaces: `python original.py`."""

import torch
from model import Networks
from torch import nn
from torch.utils.data import DataLoader

from trainwright.data.sources.digits import Digits


def train(model, batches):
    generator, discriminator, criterion = model.generator, model.discriminator, nn.BCELoss()
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    model.train()
    for batch in batches:
        images = 2 * batch["pixel_values"] - 1
        real, fake = torch.ones(len(images)), torch.zeros(len(images))

        discriminator.zero_grad()
        real_loss = criterion(discriminator(images), real)
        real_loss.backward()
        drawn = generator(model.draw_noise(images))
        fake_loss = criterion(discriminator(drawn.detach()), fake)
        fake_loss.backward()
        discriminator_optimizer.step()

        generator.zero_grad()
        generator_loss = criterion(discriminator(drawn), real)
        generator_loss.backward()
        generator_optimizer.step()
        yield generator_loss.item(), (real_loss + fake_loss).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Digits(), batch_size=64, shuffle=True, drop_last=True)
    losses = list(train(Networks(), (batch for _ in range(20) for batch in loader)))
    print("generator {:.3f}, discriminator {:.3f}".format(*losses[-1]))
