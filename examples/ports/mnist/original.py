"""The loop that the port replaces: `python original.py`."""

import torch
from images import DigitImages
from model import ConvNet
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader


def train(model, epochs, test_batches=()):
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for batches in epochs:
        model.train()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            yield loss.item(), scheduler.get_last_lr()[0]
        scheduler.step()
        evaluate(model, test_batches)


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    correct, count = 0, 0
    for images, labels in batches:
        correct += (model(images).argmax(1) == labels).sum().item()
        count += len(labels)
    if count:
        print(f"accuracy {correct / count:.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    train_batches = DataLoader(DigitImages(train=True), batch_size=64, shuffle=True)
    test_batches = DataLoader(DigitImages(train=False), batch_size=200)
    list(train(ConvNet(), [train_batches] * 5, test_batches))
