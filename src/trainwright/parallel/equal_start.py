"""Gives every rank the same model to begin with.

All ranks build it from one seed, so it is equal already, unless a constructor draws from elsewhere: then the first
rank's values are everybody's.
"""

from __future__ import annotations

import logging

import torch

from trainwright.parallel.collectives import Ranks

logger = logging.getLogger(__name__)


@torch.no_grad()
def make_equal(model: torch.nn.Module, ranks: Ranks) -> None:
    """Compares the ranks' models and, where they differ, copies the first rank's; before the model is split."""
    tensors = [*model.parameters(), *model.buffers()]
    if ranks.size == 1 or any(tensor.is_meta for tensor in tensors):
        return
    on_host = [tensor.detach().to("cpu") for tensor in tensors]
    everybodys = ranks.gather([_checksum(each) for each in on_host])
    if all(each == everybodys[0] for each in everybodys):
        return
    logger.info("The ranks have built different models, though from one seed: the first rank's weights are used.")
    for tensor, copy in zip(tensors, on_host, strict=True):
        ranks.copy_from_first_(copy)
        tensor.copy_(copy)


def _checksum(tensor: torch.Tensor) -> int:
    """A sum of the bits: fast, and different for other draws, which is all that is asked."""
    values = tensor.contiguous().reshape(-1)
    wide = torch.int32 if values.element_size() >= 4 else torch.uint8
    return int(values.view(wide).sum(dtype=torch.int64))
