"""Copies of a device's tensors in host memory, made and brought back beside the computation.

Both ways go over a stream of their own. Bringing one back begins with the one that was copied before it, for backward
goes through them in the opposite order. On a CPU tensors are on the host already: nothing is copied.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from trainwright.backends import host_buffers, reads_at_once
from trainwright.backends.private_torch import version_of
from trainwright.errors import TrainwrightError
from trainwright.parallel.local import is_split, local


class HostCopies:
    """The copies of one forward pass, in their order."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._last: HostCopy | None = None

    def of(self, tensor: Tensor) -> HostCopy:
        """Begins a copy of all that the tensor's storage holds."""
        stays = tensor.is_meta or reads_at_once(tensor.device)
        if not stays and self._stream is None:
            self._stream = torch.Stream(tensor.device)
        self._last = HostCopy(tensor.detach(), None if stays else self._stream, self._last)
        return self._last


class HostCopy:
    """The bytes of one storage, on the host."""

    def __init__(self, tensor: Tensor, stream: Any, previous: HostCopy | None) -> None:
        """Copies over a stream; without one the tensor's own memory is the copy."""
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._device = tensor.device
        self._stream = stream
        self._previous = previous
        self._arriving: Tensor | None = None
        self._arrived: ref[Tensor] | None = None
        if stream is None:
            self._host, self._shared, self._version = data, tensor, version_of(tensor)
            return
        [self._host] = host_buffers([data])
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            self._host.copy_(data, non_blocking=True)
        # Else the allocator could give the memory away while it is being copied.
        data.record_stream(stream)

    def data(self) -> Tensor:
        """Returns the bytes on the device; who holds them decides how long they stay there."""
        if self._stream is None:
            refuse_changed(self._shared, self._version)
            return self._host
        arrived = None if self._arrived is None else self._arrived()
        if arrived is None:
            self.begin_return()
            arrived, self._arriving = self._arriving, None
            assert arrived is not None
            current = torch.accelerator.current_stream(self._device)
            current.wait_stream(self._stream)
            arrived.record_stream(current)
            self._arrived = ref(arrived)
            if self._previous is not None:
                self._previous.begin_return()
        return arrived

    def begin_return(self) -> None:
        """Begins to copy the bytes back to the device, without waiting."""
        if self._stream is not None and self._arriving is None:
            with self._stream:
                self._arriving = self._host.to(self._device, non_blocking=True)


class Piece:
    """A tensor that lies, whole or in part, in a storage that was copied."""

    def __init__(self, copy: HostCopy, tensor: Tensor) -> None:
        own = local(tensor)
        self._copy = copy
        self._dtype = own.dtype
        self._place = (own.storage_offset(), own.shape, own.stride())
        self._layout: tuple[Any, ...] | None = None
        if is_split(tensor):
            self._layout = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())  # type: ignore[attr-defined]

    def tensor(self) -> Tensor:
        """Returns the tensor as it was, bit for bit."""
        data = self._copy.data()
        own = torch.empty(0, dtype=self._dtype, device=data.device).set_(data.untyped_storage(), *self._place)
        if self._layout is None:
            return own
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = self._layout
        return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


def refuse_changed(tensor: Tensor, version: int) -> None:
    """Refuses a saved tensor that was written to since: with hooks on saved tensors, torch leaves this to the hooks."""
    if version_of(tensor) != version:
        raise TrainwrightError(
            f"A tensor of shape {tuple(tensor.shape)} was changed in place between forward and backward, which needs "
            "it as it was. Use an operation that is not in place (no trailing underscore, no +=)."
        )
