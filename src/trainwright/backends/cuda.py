"""The backend of CUDA devices, including the capture of CUDA graphs. backend.py has the contract."""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from trainwright.backends.backend import Backend, Recording, Run
from trainwright.backends.host_memory import MemoryFacts
from trainwright.backends.private_torch import tree_map_only
from trainwright.errors import HostReadError

logger = logging.getLogger(__name__)


class CudaGraph:
    """A captured function, with the memory that it reads and writes."""

    def __init__(
        self,
        run: Run,
        inputs: Sequence[Tensor],
        stream: torch.cuda.Stream,
        *,
        parameters: Sequence[Tensor] = (),
        shares_with: CudaGraph | None = None,
    ) -> None:
        """Captures `run`; its temporary tensors use the memory pool of `shares_with`.

        Graphs of one pool overwrite each other's temporary tensors. This is safe because replays run one after the
        other: the tensors that outlive a replay, outputs and gradients, are referenced here, and the pool does not
        reuse referenced memory.
        """
        self._is_repeated = [is_repeated(each) for each in inputs]
        self._inputs = [torch.empty_like(each) for each in self._without_repeats(inputs)]
        given = zip(self._inputs, inputs, self._is_repeated, strict=True)
        views = [own.expand(each.shape) if repeats else own for own, each, repeats in given]
        self._graph = torch.cuda.CUDAGraph()
        pool = None if shares_with is None else shares_with._graph.pool()
        generator = torch.cuda.default_generators[stream.device.index]
        before = generator.clone_state()
        try:
            # Data threads may pin memory at the same time, so only calls of this thread are checked.
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outputs = [each.detach() for each in run(views)]
                self._packed = pack_scalars(outputs)
        except BaseException:
            # A failed capture leaves the generator in capture mode, in which it draws no numbers outside of a graph.
            generator.graphsafe_set_state(before)
            del self._graph  # the traceback references this object, and NCCL cannot close a group that a graph uses
            raise
        warn_of_constants(outputs, stream.device)
        # Each graph writes its own gradients, and the optimizers after a replay read those of the parameters.
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copies the inputs into the graph's memory, launches it, and copies its outputs out of that memory."""
        if inputs:
            torch._foreach_copy_(self._inputs, self._without_repeats(inputs))
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return copy_packed(self._packed)

    def _without_repeats(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(inputs, self._is_repeated, strict=True)
        return [each[(0,) * each.dim()] if repeats else each for each, repeats in pairs]


def pack_scalars(tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """Returns the tensors with their indices; 0-dim ones are stacked by dtype, because each copy costs several µs."""
    groups: dict[Any, list[int]] = {}
    for index, each in enumerate(tensors):
        groups.setdefault(index if each.dim() else (each.dtype, each.device), []).append(index)
    return [
        (torch.stack([tensors[index] for index in indices]) if len(indices) > 1 else tensors[indices[0]], indices)
        for indices in groups.values()
    ]


def copy_packed(packed: Sequence[tuple[Tensor, list[int]]]) -> list[Tensor]:
    """Returns copies of the tensors that were passed to `pack_scalars`, with the values that they have now."""
    copies: dict[int, Tensor] = {}
    for tensor, indices in packed:
        copy = tensor.clone()
        copies.update(zip(indices, copy.unbind() if len(indices) > 1 else (copy,), strict=True))
    return [copies[index] for index in range(len(copies))]


def is_repeated(tensor: Tensor) -> bool:
    """Returns True for one element that is expanded to all positions, such as the mask of full rows."""
    return tensor.dim() > 0 and tensor.numel() > 0 and not any(tensor.stride())


def warn_of_constants(outputs: Sequence[Tensor], device: torch.device) -> None:
    """Warns about outputs on another device, which replays do not update."""
    for output in outputs:
        if output.device != device:
            logger.warning(
                "runtime.mode graph: a metric or loss of shape %s is on %s, which a graph of %s does not update: it "
                "keeps its value of the captured step.",
                *(tuple(output.shape), output.device, device),
            )


_LEAST_CAPABILITIES = {"bf16": (8, 0), "fp8": (8, 9)}

# torch rounds pinned memory up to a power of two, which would waste a third if each tensor were pinned alone.
_PINNED_BLOCK_BYTES = 2**30
_PINNED_ALIGNMENT = 64
_POLL_SECONDS = 0.001
_RESERVED_BYTES = 2**29  # left free in addition to a copy of the state, because allocations are rounded up


class CudaBackend(Backend):
    """One CUDA device of this process."""

    collectives = "cpu:gloo,cuda:nccl"
    num_warm_ups = 3

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._capture_stream: torch.cuda.Stream | None = None
        self._graphs: WeakSet[CudaGraph] = WeakSet()
        """The graphs that share a memory pool; torch cannot reuse the pool of deleted graphs."""

    def claim(self) -> None:
        """Makes this device the current one, for NCCL and for kernels that use the current device."""
        torch.cuda.set_device(self.device)
        if not torch.are_deterministic_algorithms_enabled():
            activate_flash(torch.cuda.get_device_capability(self.device)[0])

    def repeat_bits(self) -> None:
        """Also sets the workspace with which matrix products have a fixed order of summation."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        super().repeat_bits()

    def seed(self, value: int) -> None:
        """Seeds the generators of the CPU and of this device."""
        torch.default_generator.manual_seed(value)
        torch.cuda.default_generators[self.device.index].manual_seed(value)

    def choose_precision(self) -> str:
        """Returns bf16 if the device multiplies in it, otherwise fp32; never fp16, which needs a loss scale."""
        return "bf16" if self.supports_precision("bf16") else "fp32"

    def supports_precision(self, precision: str) -> bool:
        """Returns False for a precision that the GPU only emulates, such as bf16 before compute capability 8.0."""
        if torch.version.hip is not None:
            return precision != "fp8"
        return torch.cuda.get_device_capability(self.device) >= _LEAST_CAPABILITIES.get(precision, (0, 0))

    @contextmanager
    def float32_products(self, *, tf32: bool) -> Iterator[None]:
        """Sets torch's precision of fp32 matrix products and convolutions, and restores it afterwards.

        Uses torch's older functions, which also set the newer `fp32_precision`. After the newer ones alone, code that
        reads the older ones, such as torch's compiler, would raise.
        """
        cudnn, newer = torch.backends.cudnn, _float32_settings()
        with _without_tf32_warnings():
            before = [each.fp32_precision for each in newer]
            older = _read(torch.get_float32_matmul_precision, "highest"), _read(lambda: cudnn.allow_tf32, True)
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            cudnn.allow_tf32 = tf32
        try:
            yield
        finally:
            with _without_tf32_warnings():
                torch.set_float32_matmul_precision(older[0])
                cudnn.allow_tf32 = older[1]
                for each, value in zip(newer, before, strict=True):
                    each.fp32_precision = value

    def missing_fp8(self, setting: str) -> str | None:
        """Returns None for Ada, Hopper and later."""
        if self.supports_precision("fp8"):
            return None
        if torch.version.hip is not None:  # its fp8 formats differ between generations and are untested
            return f"{self.describe()} is an AMD GPU"
        major, minor = torch.cuda.get_device_capability(self.device)
        return f"{self.describe()} has {major}.{minor}"

    def to_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Copies on a separate stream, one batch ahead, so that the copy overlaps with computation."""
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
        """Runs on the capture stream: objects that remember their stream must not wait for another one later."""
        stream, current = self._make_capture_stream(), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def record(
        self, run: Run, inputs: Sequence[torch.Tensor], *, parameters: Sequence[torch.Tensor] = ()
    ) -> tuple[Recording, list[torch.Tensor]]:
        """Captures a CUDA graph and launches it, because capturing alone computes nothing."""
        stream, shares_with = self._make_capture_stream(), next(iter(self._graphs), None)
        try:
            graph = CudaGraph(run, inputs, stream, parameters=parameters, shares_with=shares_with)
        except BaseException as error:
            self._graphs.clear()  # torch may still be recording into their pool, so the next graph begins another
            if not isinstance(error, RuntimeError) or "captur" not in str(error):
                raise
            reason = str(error).strip().splitlines()[0]
            raise HostReadError(f"A line waits for the device ({reason}).") from error
        self._graphs.add(graph)
        return graph, graph.replay(inputs)

    def _make_capture_stream(self) -> torch.cuda.Stream:
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._capture_stream

    @contextmanager
    def limited_memory(self, share: float) -> Iterator[None]:
        """Limits torch's allocator to a share of the memory that other processes leave free."""
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
        """Returns None: the device raises out-of-memory."""
        return None

    def begin_peak(self) -> None:
        """Resets the allocator's peak."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def memory(self) -> MemoryFacts:
        """Returns the figures of torch's allocator."""
        return MemoryFacts(
            in_use=torch.cuda.memory_allocated(self.device),
            peak=torch.cuda.max_memory_allocated(self.device),
            reserved=torch.cuda.memory_reserved(self.device),
            total=torch.cuda.get_device_properties(self.device).total_memory,
        )

    def utilization(self) -> float | None:
        """Returns the driver's figure; None without the package nvidia-ml-py."""
        with suppress(Exception):  # a missing package, or a driver that does not answer
            return torch.cuda.utilization(self.device) / 100
        return None

    def release_memory(self) -> None:
        """Waits for the device and frees the allocator's unused blocks."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def write_memory_snapshot(self, folder: Path) -> Path | None:
        """Writes all blocks of the allocator, with stacks if the user records them."""
        path = folder / "memory_snapshot.pickle"
        # The public memory_snapshot() lacks the settings and traces that the viewer reads.
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        return path

    def describe(self) -> str:
        """Returns the name of the device and its memory."""
        properties = torch.cuda.get_device_properties(self.device)
        return f"{self.device} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)"

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_repeated(tensor):
            return self._copy(tensor[(0,) * tensor.dim()]).expand(tensor.shape)
        # Only copies from pinned memory are asynchronous; pinning here takes a host copy if the loader did not pin.
        source = tensor if tensor.is_cuda else tensor.pin_memory()  # the same tensor if it is pinned
        return source.to(self.device, non_blocking=True)

    def _hand_over(self, batch: Any, arrived: torch.cuda.Event) -> Any:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        # Otherwise the allocator could reuse a batch's memory on the copy stream while it is still in use.
        _map_tensors(lambda tensor: tensor.record_stream(current), batch)
        return batch


def _float32_settings() -> list[Any]:
    """Returns the objects whose `fp32_precision` torch's older functions change too."""
    backends: Any = torch.backends
    return [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]


def _read(read: Callable[[], Any], default: Any) -> Any:
    """Returns an older setting, or its default if the user has set the newer one, after which torch raises."""
    try:
        return read()
    except RuntimeError:
        return default


@contextmanager
def _without_tf32_warnings() -> Iterator[None]:
    """Silences the warning of some versions of torch that its older functions will be removed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings", category=UserWarning)
        yield


FLASH_PACKAGES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
"""The modules from which torch loads newer versions of FlashAttention; it contains version 2."""
FLASH_OF_CAPABILITY = {9: ("FA3", "FA4"), 10: ("FA4",)}
"""The versions for Hopper and Blackwell, the faster one first."""


def activate_flash(capability: int) -> str | None:
    """Activates FlashAttention 3 or 4 for torch's flash kernel if its package is installed; returns which.

    This affects the whole process. A version that the user has activated is kept.
    """
    from torch.nn import attention

    activate = getattr(attention, "activate_flash_attention_impl", None)  # not in every torch
    if activate is None:
        return None
    active = attention.current_flash_attention_impl()
    if active is not None:
        return active
    for version in FLASH_OF_CAPABILITY.get(capability, ()):
        module = FLASH_PACKAGES[version]
        try:
            if not _is_installed(module):
                continue
            activate(version)
        except Exception as error:  # a package for another torch or CUDA fails in many ways
            logger.warning("%s is installed, but FlashAttention cannot be used: %s", module, error)
        else:
            logger.info("Attention uses FlashAttention %s (%s).", version.removeprefix("FA"), module)
            return version
    return None


def _is_installed(module: str) -> bool:
    """Returns True if a module can be found; does not import its package, which may take seconds."""
    package, *inner = module.split(".")
    spec = find_spec(package)
    if spec is None or not inner:
        return spec is not None
    return any(Path(folder, inner[0]).is_dir() for folder in spec.submodule_search_locations or ())


def _map_tensors(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """Maps the tensors of a batch; for a plain dict 15 times faster than torch's tree_map."""
    if type(batch) is dict and all(type(value) is torch.Tensor for value in batch.values()):
        return {name: function(value) for name, value in batch.items()}
    return tree_map_only(torch.Tensor, function, batch)


def begin_copies(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Begins to copy contiguous tensors of one GPU into pinned memory; returns a function that waits for the targets.

    The sources may change when this returns: they are copied on the GPU first. Returns None, and copies nothing, if the
    memory left above the peak of the process is too small for that.
    """
    device = sources[0].device
    if not _has_room(device, sum(tensor.nbytes for tensor in sources)):
        return None
    copies = [torch.empty_like(tensor) for tensor in sources]
    torch._foreach_copy_(copies, list(sources))
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch._foreach_copy_(list(targets), copies, non_blocking=True)
    for copy in copies:
        copy.record_stream(stream)  # keeps its memory from being reused before the copy is complete

    def wait() -> None:
        # Not synchronize(): torch's debug mode for steps that wait would reject it, although no step does.
        while not stream.query():
            time.sleep(_POLL_SECONDS)
        copies.clear()

    return wait


def _has_room(device: torch.device, num_bytes: int) -> bool:
    """Returns True if the GPU has memory for `num_bytes` in addition to the peak of this process so far."""
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    available = min(free + torch.cuda.memory_reserved(device), limit)
    return available - torch.cuda.max_memory_allocated(device) > 1.1 * num_bytes + _RESERVED_BYTES


def pinned_buffers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns pinned host memory like each tensor, in blocks of up to 1 GiB: pinning many tensors takes seconds."""
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
