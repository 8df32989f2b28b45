"""The verbs that differ between devices, as a CPU does them, and the choice of a backend.

The CPU's way is the plain way, so it is the contract; cuda.py overrides what a GPU does otherwise.
An `if device ==` anywhere else is a missing verb here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from trainwright.errors import ConfigError

# Where torch's fused AdamW kernel exists in every torch version that we support.
_FUSED_OPTIMIZERS = frozenset({"cpu", "cuda"})

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Backend:
    """A CPU, and the contract of every device."""

    collectives = "gloo"
    """torch.distributed's backend for tensors on this device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def claim(self) -> None:
        """Makes this process use its device. Called once, before anything is built."""

    def seed(self, value: int) -> None:
        """Seeds torch's generators. `torch.manual_seed` visits every device type and costs 200 times more."""
        torch.default_generator.manual_seed(value)

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """Returns the context in which a forward of this precision runs."""
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST_DTYPES[precision])

    def to_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the batches on the device; where copies can overlap with work, one batch ahead."""
        return batches

    def describe(self) -> str:
        """Names the device for the log."""
        return f"cpu ({torch.get_num_threads()} threads)"


def has_fused_optimizers(device: torch.device) -> bool:
    """Has torch one kernel for a whole optimizer step on this device?"""
    return device.type in _FUSED_OPTIMIZERS


def waits_for_memory(device: torch.device) -> bool:
    """Is arithmetic so fast on this device that passes over memory are what costs? Then fused forms pay."""
    return device.type == "cuda"


def memory_in_use() -> int:
    """Returns the bytes that this process holds: on its GPU where it uses one, else in main memory; 0 if unknown."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def pick_backend(setting: str, *, local_rank: int = 0, where: object | None = None) -> Backend:
    """Returns the backend for `runtime.device`: auto, cpu, cuda or cuda:1."""
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = setting.partition(":")
    if kind == "cpu":
        return Backend(torch.device("cpu"))
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"runtime.device: {setting!r}, but torch sees no GPU here. Use auto or cpu.", where=where)
        from trainwright.backends.cuda import CudaBackend

        return CudaBackend(torch.device("cuda", int(index) if index else local_rank))
    raise ConfigError(f"runtime.device: no device {setting!r}. Use auto, cpu, cuda or cuda:N.", where=where)
