"""Keeps the model's buffers as they were where an update is held back: running means take part in the forward.

One nan in a batch makes a BatchNorm's running mean nan for good, though no weight moved. Who says that an update is
held back is incidents.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def persistent_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the buffers that belong to the model's state; tables that are computed anew are none of them."""
    found = {
        id(buffer): buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    return list(found.values())


class HeldBuffers:
    """A copy of buffers at a step's beginning, taken and put back in a few kernels for each dtype."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in buffers:
            self._kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def remember(self) -> None:
        """Copies the buffers as they are now."""
        self._copies = [_flat(buffers) for buffers in self._kinds.values()]

    @torch.no_grad()
    def put_back(self, hold: torch.Tensor | bool) -> None:
        """Gives the buffers what was remembered where `hold`, which may be known to the device alone."""
        if hold is False:
            return
        for copy, buffers in zip(self._copies, self._kinds.values(), strict=True):
            kept = torch.where(hold, copy, _flat(buffers)) if isinstance(hold, torch.Tensor) else copy
            pieces = torch.split(kept, [buffer.numel() for buffer in buffers])
            torch._foreach_copy_(
                buffers, [piece.view(buffer.shape) for piece, buffer in zip(pieces, buffers, strict=True)]
            )


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
