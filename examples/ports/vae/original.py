"""The loop that the port replaces: `python original.py`."""

import torch
from model import VAE
from torch.nn import functional as F
from torch.utils.data import DataLoader

from trainwright.data.sources.digits import Digits


def train(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for batch in batches:
        pixels = batch["pixel_values"]
        optimizer.zero_grad()
        drawn, mean, log_variance = model(pixels)
        loss = F.binary_cross_entropy(drawn, pixels, reduction="sum")
        loss = loss - 0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
        loss.backward()
        optimizer.step()
        yield loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    losses = list(train(VAE(), DataLoader(Digits(flat=True), batch_size=64, shuffle=True)))
    print(f"loss {losses[0]:.1f} → {losses[-1]:.1f}")
