"""CUDA devices: what differs from a CPU, including the capture of CUDA graphs. backend.py has the contract."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainwright.backends.backend import Backend, Recording, Run
from trainwright.backends.host_memory import MemoryFacts
from trainwright.backends.private_torch import tree_map_only
from trainwright.errors import HostReadError

logger = logging.getLogger(__name__)


class CudaGraph:
    """Work that was captured, with the memory that it reads and writes."""

    def __init__(
        self, run: Run, inputs: Sequence[Tensor], stream: torch.cuda.Stream, *, parameters: Sequence[Tensor] = ()
    ) -> None:
        self._inputs = [torch.empty_like(each) for each in inputs]
        self._graph = torch.cuda.CUDAGraph()
        # Threads of the data loading may pin memory meanwhile: only this thread's calls are judged.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._results = _Results(run(list(self._inputs)), stream.device)
        # Each graph writes gradients of its own, and who steps after a replay reads those of the parameters.
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copies the inputs to where the graph reads them, launches it, and copies its results out of its memory."""
        if inputs:
            torch._foreach_copy_(self._inputs, list(inputs))
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._results.copies()


class _Results:
    """The outputs of a graph: those of one element lie in one tensor for each dtype, so that one copy takes all."""

    def __init__(self, outputs: Sequence[Tensor], device: torch.device) -> None:
        self._large: dict[int, Tensor] = {}
        self._small: list[tuple[list[int], Tensor]] = []
        self._shapes = [each.shape for each in outputs]
        kinds: dict[torch.dtype, list[int]] = {}
        for number, output in enumerate(outputs):
            if output.device != device:
                logger.warning(
                    "runtime.mode graph: a metric or loss of shape %s lies on %s, where a graph of %s computes "
                    "nothing: it stays what it was when the step was recorded.",
                    tuple(output.shape),
                    output.device,
                    device,
                )
                self._large[number] = output
            elif output.numel() == 1:
                kinds.setdefault(output.dtype, []).append(number)
            else:
                self._large[number] = output
        for numbers in kinds.values():
            self._small.append((numbers, torch.stack([outputs[number].detach().reshape(()) for number in numbers])))

    def copies(self) -> list[Tensor]:
        """Returns the outputs as the last launch gives them; the next one does not change these."""
        found = {number: output.clone() for number, output in self._large.items()}
        for numbers, together in self._small:
            for number, value in zip(numbers, together.clone().unbind(), strict=True):
                shape = self._shapes[number]
                found[number] = value.reshape(shape) if shape else value
        return [found[number] for number in range(len(self._shapes))]


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
