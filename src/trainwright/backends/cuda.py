"""A CUDA GPU: what it does otherwise than a CPU. See backend.py for the contract of each verb."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainwright.backends.backend import Backend
from trainwright.backends.cuda_graphs import CudaGraph
from trainwright.backends.main_memory import MemoryFacts
from trainwright.backends.private_torch import tree_map_only
from trainwright.backends.recording import Recording, Run
from trainwright.errors import HostReadError

# torch rounds pinned memory up to a power of two, which for each tensor alone would waste a third.
_PINNED_BLOCK_BYTES = 2**30
_PINNED_ALIGNMENT = 64


class CudaBackend(Backend):
    """One CUDA device of this process."""

    collectives = "cpu:gloo,cuda:nccl"
    num_warm_ups = 3

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._capture_stream: torch.cuda.Stream | None = None

    def claim(self) -> None:
        """Makes this device the current one, for NCCL and for kernels that ask for it."""
        torch.cuda.set_device(self.device)

    def repeat_bits(self) -> None:
        """Also gives matrix products the workspace that they need to add up in a fixed order."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        super().repeat_bits()

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
                copied = _map_tensors(self._copy, batch)
                arrived = stream.record_event()
            if ahead is not None:
                yield self._hand_over(*ahead)
            ahead = (copied, arrived)
        if ahead is not None:
            yield self._hand_over(*ahead)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Works on the stream that captures: what remembers its stream must not wait for another one then."""
        stream, current = self._stream_of_captures(), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def record(
        self, run: Run, inputs: Sequence[torch.Tensor], *, parameters: Sequence[torch.Tensor] = ()
    ) -> tuple[Recording, list[torch.Tensor]]:
        """Captures a CUDA graph, which does nothing yet, and launches it."""
        try:
            graph = CudaGraph(run, inputs, self._stream_of_captures(), parameters=parameters)
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            reason = str(error).strip().splitlines()[0]
            raise HostReadError(f"A line waits for the device ({reason}).") from error
        return graph, graph.replay(inputs)

    def _stream_of_captures(self) -> torch.cuda.Stream:
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._capture_stream

    @contextmanager
    def limited_memory(self, share: float) -> Iterator[None]:
        """Limits torch's allocator to a share of what other processes have left free of this device."""
        self.release_memory()
        free, total = torch.cuda.mem_get_info(self.device)
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        own = torch.cuda.memory_reserved(self.device)
        torch.cuda.set_per_process_memory_fraction(share * min((free + own) / total, before), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    def memory_room(self) -> int | None:
        """Returns None: who asks for too much is told."""
        return None

    def begin_peak(self) -> None:
        """Lets the allocator's peak count from here on."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def memory(self) -> MemoryFacts:
        """Returns what torch's allocator holds."""
        return MemoryFacts(
            in_use=torch.cuda.memory_allocated(self.device),
            peak=torch.cuda.max_memory_allocated(self.device),
            reserved=torch.cuda.memory_reserved(self.device),
            total=torch.cuda.get_device_properties(self.device).total_memory,
        )

    def release_memory(self) -> None:
        """Waits for the device, and gives the allocator's unused blocks back to it."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def write_memory_snapshot(self, folder: Path) -> Path | None:
        """Writes every block that the allocator holds; with stacks where the user has it record them."""
        path = folder / "memory_snapshot.pickle"
        # The public memory_snapshot() lacks the settings and traces that the viewer reads.
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        return path

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
        _map_tensors(lambda tensor: tensor.record_stream(current), batch)
        return batch


def _map_tensors(act: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """Replaces the tensors of a batch; of a plain dict, which most are, fifteen times faster than torch's way."""
    if type(batch) is dict and all(type(value) is torch.Tensor for value in batch.values()):
        return {name: act(value) for name, value in batch.items()}
    return tree_map_only(torch.Tensor, act, batch)


def pinned_buffers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns pinned host memory like each tensor, cut from blocks of up to a GiB; pinning takes seconds for many."""
    sizes = [-(-tensor.nbytes // _PINNED_ALIGNMENT) * _PINNED_ALIGNMENT for tensor in tensors]
    block = torch.empty(0, dtype=torch.uint8)
    used, left = 0, sum(sizes)
    buffers = []
    for tensor, size in zip(tensors, sizes, strict=True):
        if size > block.numel() - used:
            wanted = max(size, min(_PINNED_BLOCK_BYTES, left))
            block, used = torch.empty(wanted, dtype=torch.uint8, pin_memory=True), 0
        buffers.append(block[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        used += size
        left -= size
    return buffers
