"""Bumps: points of a curve."""

import torch


class Bumps(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        self.x = 6 * torch.rand(size, 1, generator=torch.Generator().manual_seed(seed)) - 3

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index].sin()}
