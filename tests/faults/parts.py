"""The parts of tests/project, and some that hurt: a batch whose loss is nan or far too large, by its place."""

import torch
from tests.project.parts import Documents, DocumentStream, Net, Points, PointStream, ShardedPoints
from torch.utils.data import Dataset, IterableDataset

__all__ = ["DocumentStream", "Documents", "HurtNet", "HurtPoints", "HurtStream", "Net", "PointStream", "Points"]
__all__ += ["ShardedPoints"]


class HurtPoints(Dataset):
    """Points in batches of eight: each batch that `hurt` names, counted from 1, has its loss multiplied by `by`.

    `without` names batches that are not there at all.
    """

    def __init__(self, hurt=(), by=float("nan"), without=(), num_batches=16):
        self.points = Points(8 * num_batches)
        self.batches = [number for number in range(1, num_batches + 1) if number not in without]
        self.hurt, self.by = set(hurt), by

    def __len__(self):
        return 8 * len(self.batches)

    def __getitem__(self, index):
        batch = self.batches[index // 8]
        sample = self.points[8 * (batch - 1) + index % 8]
        return {**sample, "factor": torch.tensor(self.by if batch in self.hurt else 1.0)}


class HurtStream(IterableDataset):
    """The same points as a stream."""

    def __init__(self, **arguments):
        self.points = HurtPoints(**arguments)

    def __iter__(self):
        return (self.points[index] for index in range(len(self.points)))


class HurtNet(Net):
    """A net whose loss is multiplied by what the batch says; normalisation gives it buffers."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__(width, dropout)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x, factor, labels=None):
        outputs = super().forward(self.norm(x), labels)
        return {**outputs, "loss": outputs["loss"] * factor.mean()}
