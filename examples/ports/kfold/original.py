"""The loop that the port replaces: `python original.py`."""

import torch
from model import Perceptron
from table import Fold
from torch import nn
from torch.utils.data import DataLoader


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    model.train()
    for features, labels in batches:
        optimizer.zero_grad()
        loss = criterion(model(features), labels)
        loss.backward()
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def accuracy(model, fold):
    features, labels = next(iter(DataLoader(fold, batch_size=len(fold))))
    return (model.eval()(features).argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    results = []
    for fold in range(5):
        model = Perceptron()
        loader = DataLoader(Fold("trees.csv", fold, "train"), batch_size=16, shuffle=True)
        list(train(model, (batch for _ in range(20) for batch in loader)))
        results.append(accuracy(model, Fold("trees.csv", fold, "valid")))
    print(f"accuracy {sum(results) / len(results):.3f}")
