"""Contrastive: among all views of the batch, each view should be closest to the other view of its image."""

import torch
from torch.nn.functional import cross_entropy

from trainwright import Trainer


class Contrastive(Trainer):
    def forward(self, first, second):
        views = self.model(torch.cat([first, second]))
        likeness = views @ views.T / self.config.trainer.temperature
        likeness = likeness.masked_fill(torch.eye(len(views), dtype=torch.bool, device=views.device), -torch.inf)
        other = torch.arange(len(views), device=views.device).roll(len(first))
        return cross_entropy(likeness, other), {"found": (likeness.argmax(1) == other).float().mean()}
