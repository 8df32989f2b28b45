"""SimpleModel and its data, in plain PyTorch: this file imports neither trainwright nor transformers."""

import torch
from sklearn.datasets import load_digits
from torch import nn


class SimpleModel(nn.Module):
    """The constructor loads no weights and moves nothing to a device; the trainer does."""

    def __init__(self, input_dim, output_dim, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(input_dim, width), nn.ReLU(), nn.Linear(width, output_dim))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, inputs, labels=None, **kwargs):
        """Returns the outputs, and the loss if there are labels; the arguments are the keys of a sample."""
        logits = self.layers(inputs)
        return {"loss": None if labels is None else self.criterion(logits, labels), "logits": logits}


class Handwriting(torch.utils.data.Dataset):
    """scikit-learn's digits, by index and by iteration; every fifth sample belongs to the part `valid`."""

    def __init__(self, part="train"):
        images, labels = load_digits(return_X_y=True)
        chosen = [number for number in range(len(labels)) if (number % 5 == 0) == (part == "valid")]
        self.images = torch.tensor(images[chosen] / 16.0, dtype=torch.float32)
        self.labels = torch.tensor(labels[chosen])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"inputs": self.images[index], "labels": self.labels[index]}

    def __iter__(self):
        return (self[index] for index in range(len(self)))
