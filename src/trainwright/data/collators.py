"""From a list of samples to one batch, on the host. The loop moves it to the device.

A collator is any callable from a list of samples to a nest of tensors; one that packs samples into rows
of its own defines `split(batch, n)` too, which returns n micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import default_collate


class Stack:
    """Stacks equal samples: tensors, arrays and numbers become tensors, texts a list, nests are kept.

    >>> batch = Stack()([{"x": torch.zeros(3), "labels": 1}, {"x": torch.ones(3), "labels": 0}])
    >>> tuple(batch["x"].shape), batch["labels"].tolist()
    ((2, 3), [1, 0])
    """

    def __call__(self, samples: list[Any]) -> Any:
        """Returns the batch, on the host."""
        first = samples[0]
        if isinstance(first, Mapping):
            return {name: _stack([sample[name] for sample in samples]) for name in first}
        if type(first) in (tuple, list):
            return type(first)(_stack(list(column)) for column in zip(*samples, strict=True))
        return _stack(samples)


def _stack(values: list[Any]) -> Any:
    # default_collate walks its type tables for every field of every batch; tensors are by far the common case.
    return torch.stack(values) if isinstance(values[0], torch.Tensor) else default_collate(values)
