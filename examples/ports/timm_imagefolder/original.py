"""The loop that the port replaces: `python original.py`, after `python make_images.py`."""

import timm
import torch
from balance import balance
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, WeightedRandomSampler
from torchvision.datasets import ImageFolder


def train(model, batches, num_steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=num_steps)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    model.train()
    for images, labels in batches:
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), scheduler.get_last_lr()[0]
        scheduler.step()


def make_data(model, part):
    config = timm.data.resolve_data_config({"input_size": (3, 32, 32), "crop_pct": 1.0}, model=model)
    return ImageFolder(f"images/{part}", transform=timm.data.create_transform(**config))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = timm.create_model("test_convnext", num_classes=10)
    data = make_data(model, "train")
    sampler = WeightedRandomSampler(balance(data), num_samples=300 * 16)
    losses = list(train(model, DataLoader(data, batch_size=16, sampler=sampler, drop_last=True), num_steps=300))
    print(f"loss {losses[0][0]:.3f} → {losses[-1][0]:.3f}")
