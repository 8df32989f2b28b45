"""A mean that knows its weight, so that means of unequal batches add up exactly.

The loop sums totals and counts over micro-batches, ranks and steps, and divides once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """The mean `total / count`, kept apart.

    `total` is a sum (a tensor, with a gradient where it is a loss, or a number) and `count` how many
    things were summed (tokens, samples): a number, or a tensor where only the device knows it.

    >>> Mean(6.0, 3).value
    2.0
    """

    total: torch.Tensor | float
    count: torch.Tensor | float

    @property
    def value(self) -> torch.Tensor | float:
        """The mean itself; an empty one is 0, not NaN, so that a rank without samples adds nothing."""
        if isinstance(self.count, torch.Tensor):
            # Not clamped to something tiny: in 16 bits that is 0 again.
            return self.total / torch.where(self.count == 0, 1, self.count)
        return self.total / self.count if self.count else self.total * 0.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def detach(self) -> Mean:
        """Returns a copy that keeps no graph alive and does not change when the originals do."""
        return Mean(_settle(self.total), _settle(self.count))


def _settle(value: torch.Tensor | float) -> torch.Tensor | float:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
