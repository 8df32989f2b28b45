"""DigitImages: pairs of an image and its label, as torchvision's datasets return them."""

import torch
from sklearn.datasets import load_digits


class DigitImages(torch.utils.data.Dataset):
    def __init__(self, train):
        images, labels = load_digits(return_X_y=True)
        images = (torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) - 4.9) / 6.0
        pairs = list(zip(images, labels.tolist(), strict=True))
        self.pairs = pairs[:1500] if train else pairs[1500:]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]
