"""Keeps the model's buffers as they were where an update is held back: running means take part in the forward.

One nan in a batch makes a BatchNorm's running mean nan for good, though no weight moved. Who says that an update is
held back is incidents.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.parallel.local import local

BufferPlace = tuple[torch.nn.Module, str]
"""Where a buffer lies: a forward may put another tensor there."""


def persistent_buffers(model: torch.nn.Module) -> list[BufferPlace]:
    """Returns the places of the buffers that belong to the model's state; tables that are computed anew do not."""
    found = {
        id(buffer): (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    return list(found.values())


class HeldBuffers:
    """A copy of buffers at a step's beginning, taken in one kernel for each dtype."""

    def __init__(self, places: Sequence[BufferPlace]) -> None:
        self._places = list(places)
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def remember(self) -> None:
        """Copies the buffers as they are now."""
        now = [read_buffer(place) for place in self._places]
        # The same memory in every step, which a recorded step has to find again.
        if [_kind(each) for each in self._copies] != [_kind(each) for each in now]:
            self._copies = [torch.empty_like(each) for each in now]
        pairs: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for copy, buffer in zip(self._copies, now, strict=True):
            copies, buffers = pairs.setdefault(buffer.dtype, ([], []))
            copies.append(copy)
            buffers.append(buffer)
        for copies, buffers in pairs.values():
            torch._foreach_copy_(copies, buffers)

    @torch.no_grad()
    def put_back(self, hold: torch.Tensor | bool) -> None:
        """Gives the buffers what was remembered where `hold`, which may be known to the device alone."""
        if hold is False:
            return
        for place, copy in zip(self._places, self._copies, strict=True):
            buffer = read_buffer(place)
            buffer.copy_(torch.where(hold, copy, buffer) if isinstance(hold, torch.Tensor) else copy)


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def read_buffer(place: BufferPlace) -> torch.Tensor:
    """Returns the tensor that lies there now, or this rank's part of it."""
    module, name = place
    buffer = module._buffers[name]
    assert buffer is not None
    return local(buffer)
