"""The contract of a device backend, with the implementation for CPUs, and the choice of a backend.

Everything that differs between devices is a method here. Graph mode asks a backend to `record` a function: on a GPU
the recording is a CUDA graph (cuda.py); a CPU runs the function again under the same guards.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainwright.backends import host_memory as main_memory
from trainwright.backends.host_memory import MemoryFacts
from trainwright.backends.private_torch import TorchDispatchMode
from trainwright.errors import ConfigError, HostReadError

# Methods that copy values to the host without dispatching an operation.
_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})

Run = Callable[[list[Tensor]], list[Tensor]]


class Recording(Protocol):
    """A function that ran once and can be repeated."""

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Repeats it with inputs of the same shapes; returns a new tensor for each output.

        Afterwards the parameters that it was recorded with have the gradients of this repetition.
        """


class Capture:
    """Tells whether a step is being captured, in which case its Python code runs once and replays repeat its
    kernels."""

    def __init__(self) -> None:
        self.is_active = False


class EagerRecording:
    """Repeats a function by calling it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Calls the function."""
        return self._run(list(inputs))


def run_guarded(run: Run, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Runs a function; raises HostReadError if a CUDA graph could not capture it.

    Compiled code in it, such as that of `model.compile_repeated_blocks`, runs eagerly, because torch does not compile
    under the modes that guard the run.
    """
    has_compiled = "torch._dynamo" in sys.modules  # slow to import, and without it nothing is compiled
    stance = torch.compiler.set_stance("force_eager") if has_compiled else nullcontext()
    with stance, _NoConversions(), _NoDataDependence():
        return run(list(inputs))


class _NoConversions(TorchFunctionMode):
    """Rejects methods that copy values to the host below the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Called for every function of torch, with the mode off."""
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise HostReadError(f"The values of a tensor are read by the host, by {name}.")
        return func(*args, **(kwargs or {}))


class _NoDataDependence(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Rejects operations whose host result or shape depends on values, and operations after a seeding."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = torch.default_generator.initial_seed()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Called for every operation that reaches a kernel."""
        if torch.default_generator.initial_seed() != self._seed:
            raise HostReadError("Before this line torch's generator is seeded, which a replay does not repeat.")
        if torch.Tag.data_dependent_output in func.tags:
            raise HostReadError("The value of a tensor is read by the host.")
        if torch.Tag.dynamic_output_shape in func.tags and not _has_known_shape(func, args):
            raise HostReadError(f"The shape of the result of {func.overloadpacket.__name__} depends on values.")
        return func(*args, **(kwargs or {}))


def _has_known_shape(operation: Any, args: tuple[Any, ...]) -> bool:
    """Returns True for indexing by integers, whose shape follows from the indices; a mask counts its values."""
    if operation is not torch.ops.aten.index.Tensor:
        return False
    return all(each is None or each.dtype not in (torch.bool, torch.uint8) for each in args[1])


# Device types for which every supported torch version has a fused AdamW kernel.
_FUSED_OPTIMIZERS = frozenset({"cpu", "cuda"})
# Device types for which torch accepts `capturable`; torch_tpu adds the device tpu.
_CAPTURABLE_OPTIMIZERS = frozenset({"cuda", "xpu", "hpu", "tpu"})

# Memory bandwidth limits a copy: a few threads reach it. A chunk is large enough for another thread.
_MAX_COPY_THREADS = 8
_CHUNK_BYTES = 16 * 2**20

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""By precision; with fp8 everything except the products of linear layers is in bf16."""


class Backend:
    """The contract of every device, implemented for a CPU."""

    collectives = "gloo"
    """The torch.distributed backend for tensors on this device."""
    num_warm_ups = 2
    """The number of updates before one is recorded: they create the optimizers' state and load the kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def claim(self) -> None:
        """Makes this process use its device. Called once, before anything is built."""

    def repeat_bits(self) -> None:
        """Restricts torch to deterministic kernels. Called once, before the device is used."""
        torch.use_deterministic_algorithms(True)

    def seed(self, value: int) -> None:
        """Seeds torch's generators. `torch.manual_seed` visits every device type and costs 200 times more."""
        torch.default_generator.manual_seed(value)

    def choose_precision(self) -> str:
        """Returns the precision that `runtime.precision: auto` selects on this device."""
        return "fp32"

    def supports_precision(self, precision: str) -> bool:
        """Returns True if a forward of this precision runs on this device without emulation."""
        return precision in ("fp32", *AUTOCAST_DTYPES)

    def autocast(self, precision: str, *, keeps_casts: bool = True) -> AbstractContextManager[Any]:
        """Returns the context in which a forward of this precision runs.

        `keeps_casts` caches a copy of every weight in that precision until the end of the context, for weights that are
        used twice. If weights are gathered for each use, the cache would be a copy of the whole model.
        """
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST_DTYPES[precision], cache_enabled=keeps_casts)

    def float32_products(self, *, tf32: bool) -> AbstractContextManager[None]:
        """Returns a context in which fp32 products use TF32 or full fp32, if the device has both."""
        return nullcontext()

    def missing_fp8(self, setting: str) -> str | None:
        """Returns why a run with this `runtime.device` cannot use fp8; None if it can.

        A CPU emulates fp8 with the same rounding, but slowly. It must be requested by `runtime.device: cpu`, as tests
        and `trainwright check` do.
        """
        return None if setting == "cpu" else f"this run is on {self.describe()}"

    def to_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the batches on the device; if copies can overlap with computation, one batch ahead."""
        return batches

    def warming_up(self) -> AbstractContextManager[Any]:
        """Returns the context for work that is recorded later."""
        return nullcontext()

    def record(
        self, run: Run, inputs: Sequence[torch.Tensor], *, parameters: Sequence[torch.Tensor] = ()
    ) -> tuple[Recording, list[torch.Tensor]]:
        """Runs `run` once under guards; returns a recording that repeats it, and the result of the run.

        After each replay, the parameters have the gradients of that replay, or None if the run left no gradient.
        """
        return EagerRecording(run), run_guarded(run, inputs)

    def limited_memory(self, share: float) -> AbstractContextManager[None]:
        """Returns a context that limits this process to a share of the device's free memory; more raises out-of-memory.

        Host memory has no such limit; see `memory_room`.
        """
        return nullcontext()

    def memory_room(self) -> int | None:
        """Returns how many bytes are left before the system kills this process.

        None if unknown, and on devices that raise out-of-memory instead.
        """
        return main_memory.room()

    def begin_peak(self) -> None:
        """Resets `memory().peak`, if the system supports it."""
        main_memory.begin_peak()

    def memory(self) -> MemoryFacts:
        """Returns the memory of this process on the device, without waiting."""
        return main_memory.facts()

    def utilization(self) -> float | None:
        """Returns the share of time in which the device was recently busy, from 0 to 1; None if unknown."""
        return None

    def release_memory(self) -> None:
        """Frees unreferenced memory; takes some milliseconds."""
        gc.collect()

    def write_memory_snapshot(self, folder: Path) -> Path | None:
        """Writes a snapshot for torch's viewer (pytorch.org/memory_viz); returns None if there is none."""
        return None

    def describe(self) -> str:
        """Returns the name of the device for the log."""
        number = torch.get_num_threads()
        return f"cpu ({number} thread{'s' if number > 1 else ''})"


def has_fused_optimizers(device: torch.device) -> bool:
    """Returns True if torch has fused optimizer kernels for this device."""
    return device.type in _FUSED_OPTIMIZERS


def has_capturable_optimizers(device: torch.device) -> bool:
    """Returns True if torch's `capturable` optimizers support this device."""
    return device.type in _CAPTURABLE_OPTIMIZERS


def waits_for_memory(device: torch.device) -> bool:
    """Returns True if passes over memory, not arithmetic, limit this device, so that fused kernels are faster."""
    return device.type == "cuda"


def scales_rows(device: torch.device) -> bool:
    """Returns True if torch multiplies fp8 tensors with a scale for each row; torch 2.11 does so only on a GPU."""
    return device.type == "cuda"


def host_buffers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns uninitialized host memory for a copy of each tensor, pinned for those on a GPU."""
    buffers: dict[int, torch.Tensor] = {}
    on_gpu = [number for number, tensor in enumerate(tensors) if tensor.device.type == "cuda"]
    if on_gpu:
        from trainwright.backends.cuda import pinned_buffers

        buffers = dict(zip(on_gpu, pinned_buffers([tensors[number] for number in on_gpu]), strict=True))
    return [
        buffers[number] if number in buffers else torch.empty(tensor.shape, dtype=tensor.dtype)
        for number, tensor in enumerate(tensors)
    ]


def copy_to_host(tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
    """Copies every contiguous tensor into its buffer (of `host_buffers`) and waits once, for all of them."""
    pairs = list(zip(tensors, buffers, strict=True))
    on_devices = [pair for pair in pairs if pair[0].device.type != "cpu"]
    if on_devices:
        # One call for hundreds of tensors, without waiting for any of them.
        sources, targets = zip(*on_devices, strict=True)
        torch._foreach_copy_(targets, sources, non_blocking=True)
    _copy_within_host([pair for pair in pairs if pair[0].device.type == "cpu"])
    for device in {tensor.device for tensor, _ in on_devices}:
        torch.accelerator.current_stream(device).synchronize()


def begin_copy_to_host(
    tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], *, waits: bool = False
) -> Callable[[], None]:
    """Like `copy_to_host`, but without waiting; the tensors may change when this returns. Returns a function that waits
    for it.

    A GPU with memory for a second copy of the tensors makes that copy, and moves it to the host during the next steps.
    Otherwise, or with `waits`, this waits.
    """
    pairs = list(zip(tensors, buffers, strict=True))
    on_gpu = [pair for pair in pairs if pair[0].device.type == "cuda"]
    if on_gpu and not waits and len({tensor.device for tensor, _ in pairs if tensor.device.type != "cpu"}) == 1:
        from trainwright.backends.cuda import begin_copies

        wait = begin_copies(*zip(*on_gpu, strict=True))
        if wait is not None:
            _copy_within_host([pair for pair in pairs if pair[0].device.type == "cpu"])
            return wait
    copy_to_host(tensors, buffers)
    return lambda: None


def _copy_within_host(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies with as many threads as torch uses, joined once at the end.

    torch joins its threads after every tensor: with other processes on the cores that took 10 to 20 times as long.
    """
    chunks = []
    for source, target in pairs:
        bytes_from, bytes_to = (each.reshape(-1).view(torch.uint8).numpy() for each in (source, target))
        for start in range(0, len(bytes_from), _CHUNK_BYTES):
            span = slice(start, start + _CHUNK_BYTES)
            chunks.append((bytes_to[span], bytes_from[span]))
    if sum(source.nbytes for source, _ in pairs) < _CHUNK_BYTES:
        for chunk in chunks:
            np.copyto(*chunk)
        return
    with ThreadPoolExecutor(min(_MAX_COPY_THREADS, torch.get_num_threads()), thread_name_prefix="copy") as threads:
        deque(threads.map(np.copyto, *zip(*chunks, strict=True)), maxlen=0)  # raises the exception of a thread


def reads_at_once(device: torch.device) -> bool:
    """Returns True if reading a value does not wait for earlier work on this device."""
    return device.type == "cpu"


def memory_in_use() -> int:
    """Returns the bytes that this process uses, on its GPU if it has one and otherwise in host memory; 0 if unknown."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def checked_device(device: torch.device | str) -> torch.device:
    """Returns a torch.device; rejects one that torch does not know, or that is not available."""
    if str(device) == "tpu":  # unknown to torch if torch_tpu is not installed
        _reject_absent_tpu("device")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: no device {device!r}. Use cpu, cuda, cuda:N or tpu.") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: {str(found)!r}, but torch sees no GPU here. Use cpu.")
    return found


def pick_backend(setting: str, *, local_rank: int = 0, where: object | None = None) -> Backend:
    """Returns the backend for `runtime.device`: auto, cpu, cuda, cuda:1 or tpu."""
    if setting == "auto":
        from trainwright.backends.tpu import has_tpu

        setting = "cuda" if torch.cuda.is_available() else "tpu" if has_tpu() else "cpu"
    kind, _, index = setting.partition(":")
    if kind == "cpu":
        return Backend(torch.device("cpu"))
    if setting == "tpu":
        _reject_absent_tpu("runtime.device", where=where)
        from trainwright.backends.tpu import TpuBackend

        return TpuBackend(torch.device("tpu"))
    if setting != "cuda" and not (kind == "cuda" and index.isdecimal()):
        raise ConfigError(f"runtime.device: no device {setting!r}. Use auto, cpu, cuda, cuda:N or tpu.", where=where)
    if not torch.cuda.is_available():
        raise ConfigError(f"runtime.device: {setting!r}, but torch sees no GPU here. Use auto or cpu.", where=where)
    number, count = int(index) if index else local_rank, torch.cuda.device_count()
    if number >= count:
        raise ConfigError(
            f"runtime.device: {setting!r} is cuda:{number} in this process, but torch finds {count} GPU(s). Start one "
            "process per GPU (--nproc), and check CUDA_VISIBLE_DEVICES.",
            where=where,
        )
    from trainwright.backends.cuda import CudaBackend

    return CudaBackend(torch.device("cuda", number))


def expected_precision(setting: str) -> str:
    """Returns what `runtime.precision: auto` selects for a `runtime.device`; bf16 if the device is not available."""
    try:
        return pick_backend(setting).choose_precision()
    except ConfigError:
        return "bf16"


def _reject_absent_tpu(label: str, *, where: object | None = None) -> None:
    from trainwright.backends.tpu import reject_absent_tpu

    reject_absent_tpu(label, where=where)
