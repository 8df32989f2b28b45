"""A CUDA GPU: what it does otherwise than a CPU. See backend.py for the contract of each verb."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainwright.backends.backend import Backend


class CudaBackend(Backend):
    """One CUDA device of this process."""

    collectives = "cpu:gloo,cuda:nccl"

    def claim(self) -> None:
        """Makes this device the current one, for NCCL and for kernels that ask for it."""
        torch.cuda.set_device(self.device)

    def seed(self, value: int) -> None:
        """Seeds the CPU's and this device's generators."""
        torch.default_generator.manual_seed(value)
        torch.cuda.default_generators[self.device.index].manual_seed(value)

    def to_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Copies on a stream of its own, one batch ahead, so that the copy of the next overlaps with this one."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        ahead: tuple[Any, torch.cuda.Event] | None = None
        for batch in batches:
            with torch.cuda.stream(stream):
                copied = tree_map_only(torch.Tensor, self._copy, batch)
                arrived = stream.record_event()
            if ahead is not None:
                yield self._hand_over(*ahead)
            ahead = (copied, arrived)
        if ahead is not None:
            yield self._hand_over(*ahead)

    def describe(self) -> str:
        """Names the device and its memory."""
        properties = torch.cuda.get_device_properties(self.device)
        return f"{self.device} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)"

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # Only from pinned memory does a copy not wait; pinning here costs one host copy where a loader did not.
        source = tensor if tensor.is_pinned() or tensor.is_cuda else tensor.pin_memory()
        return source.to(self.device, non_blocking=True)

    def _hand_over(self, batch: Any, arrived: torch.cuda.Event) -> Any:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        # Without this the allocator could reuse a batch's memory on the copy stream while it is still computed on.
        tree_map_only(torch.Tensor, lambda tensor: tensor.record_stream(current), batch)
        return batch
