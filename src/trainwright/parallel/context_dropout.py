"""Dropout on a rank's part of the sequence: other numbers on every rank, though the ranks of a group share theirs.

The ranks along context are seeded alike, so that all that is drawn before the sequence is cut is equal on them. Drawn
from the same numbers, though, the tokens of one rank would lose the same features as those of the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainwright.backends.private_torch import FakeTensor


@contextmanager
def own_random_numbers(device: torch.device, rank: int) -> Iterator[None]:
    """Draws differently on every rank inside, and leaves the ranks' generators equal to each other.

    The seed is drawn from the host's generator, so that no device is waited for.
    """
    drawn = torch.randint(2**62, (), device="cpu")
    if isinstance(drawn, FakeTensor):  # a plan of a run, in which nothing is worked out
        yield
        return
    seed = int(drawn) ^ (rank * 0x9E3779B97F4A7C15 % 2**62)  # bits that differ all over
    indices = [] if device.index is None else [device.index]
    with torch.random.fork_rng(devices=indices, **({"device_type": device.type} if indices else {})):
        torch.default_generator.manual_seed(seed)
        if indices:
            torch.get_device_module(device).manual_seed(seed)
        yield


class PartDropout(nn.Dropout):
    """nn.Dropout that draws for itself on states [B, S, D]; what has fewer dims is no part, and equal on all ranks."""

    rank: int

    def forward(self, input: Tensor) -> Tensor:
        """Drops features; a compiled graph draws from the shared numbers, for it cannot change generators."""
        draws = self.training and self.p > 0 and input.dim() > 2 and not torch.compiler.is_compiling()
        if not draws:
            return super().forward(input)
        with own_random_numbers(input.device, self.rank):
            return super().forward(input)


def draw_apart(model: nn.Module, *, rank: int) -> None:
    """Makes a PartDropout of every nn.Dropout of the model, in place: hooks on it stay."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = PartDropout
            module.rank = rank  # type: ignore[assignment]  # no module either
