"""In what precision a loss is worked out."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Returns the tensor in float32, or in float64 where it is: the log of a sum loses too much in 16 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
