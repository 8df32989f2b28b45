"""Dropout on a rank's part of the sequence: other numbers on every rank, though the ranks of a group share theirs.

The ranks along context are seeded alike, so that all that is drawn before the sequence is cut is equal on them. Drawn
from the same numbers, though, the tokens of one rank would lose the same features as those of the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def own_random_numbers(device: torch.device, rank: int) -> Iterator[None]:
    """Draws differently on every rank inside, and leaves the ranks' generators equal to each other.

    The seed is drawn from the host's generator, so that no device is waited for.
    """
    seed = int(torch.randint(2**62, (), device="cpu")) ^ (rank * 0x9E3779B97F4A7C15 % 2**62)
    indices = [] if device.index is None else [device.index]
    with torch.random.fork_rng(devices=indices, device_type=device.type):
        torch.default_generator.manual_seed(seed)
        if indices:
            torch.get_device_module(device).manual_seed(seed)
        yield


class PartDropout(nn.Dropout):
    """nn.Dropout that draws for itself on states [B, S, D]; what has fewer dims is no part, and equal on all ranks."""

    def __init__(self, replaced: nn.Dropout, *, rank: int) -> None:
        super().__init__(replaced.p, replaced.inplace)
        self.training = replaced.training
        self.rank = rank

    def forward(self, input: Tensor) -> Tensor:
        """Drops features; a compiled graph draws from the shared numbers, for it cannot change generators."""
        draws = self.training and self.p > 0 and input.dim() > 2 and not torch.compiler.is_compiling()
        if not draws:
            return super().forward(input)
        with own_random_numbers(input.device, self.rank):
            return super().forward(input)


def replace_dropouts(model: nn.Module, *, rank: int) -> None:
    """Puts a PartDropout in place of every nn.Dropout of the model, one that has several names once."""
    replacements: dict[nn.Module, PartDropout] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children leaves out second names
            if type(child) is nn.Dropout:
                if child not in replacements:
                    replacements[child] = PartDropout(child, rank=rank)
                setattr(parent, name, replacements[child])
