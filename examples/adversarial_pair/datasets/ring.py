"""Ring: points near a circle of radius 1."""

import torch


class Ring(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        angle = 2 * torch.pi * torch.rand(size, generator=generator)
        radius = 1 + 0.05 * torch.randn(size, generator=generator)
        self.points = radius.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"points": self.points[index]}
