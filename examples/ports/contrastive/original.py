"""The loop that the port replaces: `python original.py`."""

import torch
from model import Encoder
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from views import TwoViews

from trainwright.data.sources.digits import Digits


def train(model, batches, num_steps, temperature=0.2):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    scheduler = CosineAnnealingLR(optimizer, T_max=num_steps)
    model.train()
    for batch in batches:
        views = model(torch.cat([batch["first"], batch["second"]]))
        likeness = views @ views.T / temperature
        likeness.fill_diagonal_(float("-inf"))
        num_images = len(batch["first"])
        other = torch.cat([torch.arange(num_images, 2 * num_images), torch.arange(num_images)])
        loss = cross_entropy(likeness, other)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), scheduler.get_last_lr()[0]
        scheduler.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Digits(), batch_size=64, shuffle=True, drop_last=True, collate_fn=TwoViews())
    batches = (batch for _ in range(10) for batch in loader)
    losses = list(train(Encoder(), batches, num_steps=10 * len(loader)))
    print(f"loss {losses[0][0]:.3f} → {losses[-1][0]:.3f}")
