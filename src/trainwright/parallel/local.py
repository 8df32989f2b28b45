"""What of a tensor lies on this rank: sharded parameters and their gradients are DTensors, all others themselves."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part, which shares memory with the tensor; outside of autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
