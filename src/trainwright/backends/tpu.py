"""The backend of TPUs, with torch_tpu. backend.py has the contract.

torch_tpu adds the torch device `tpu`, with eager execution, DTensor and FSDP2; a process has one. No
other file depends on it. docs/launching.md says what was tested.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from trainwright.backends.backend import Backend
from trainwright.backends.host_memory import MemoryFacts
from trainwright.backends.private_torch import tree_map_only
from trainwright.errors import ConfigError


class TpuBackend(Backend):
    """The TPU of this process."""

    # Objects and flags are exchanged on the CPU.
    collectives = "cpu:gloo,tpu:tpu_dist"

    def claim(self) -> None:
        """Uses full float32: by default a TPU rounds the factors of a matrix product to bfloat16.

        The launcher's environment variables decide which TPU a process has.
        """
        torch.set_float32_matmul_precision("highest")

    def seed(self, value: int) -> None:
        """Seeds the CPU's and the TPU's generators."""
        torch.default_generator.manual_seed(value)
        _module().manual_seed(value)

    def choose_precision(self) -> str:
        """Returns bf16, in which a TPU multiplies."""
        return "bf16"

    def supports_precision(self, precision: str) -> bool:
        """Returns False for fp16 and fp8."""
        return precision not in ("fp16", "fp8")

    def autocast(self, precision: str, *, keeps_casts: bool = True) -> AbstractContextManager[Any]:
        """Returns the context of a forward; rejects fp16, because a TPU computes in bfloat16."""
        if precision == "fp16":
            raise ConfigError(
                "runtime.precision: a TPU does not support fp16, because it multiplies in bfloat16. Use bf16."
            )
        return super().autocast(precision, keeps_casts=keeps_casts)

    def to_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Copies one batch ahead. Copies and steps share a queue: the next copy is queued before the step."""
        ahead: list[Any] = []
        for batch in batches:
            ahead.append(tree_map_only(torch.Tensor, self._copy, batch))
            if len(ahead) == 2:
                yield ahead.pop(0)
        yield from ahead

    def memory_room(self) -> int | None:
        """Returns None: the device raises out-of-memory."""
        return None

    def begin_peak(self) -> None:
        """Does nothing: torch_tpu keeps no peak."""

    def memory(self) -> MemoryFacts:
        """Returns the total memory; torch_tpu 0.2 does not report the usage."""
        return MemoryFacts(in_use=None, peak=None, total=_total_memory())

    def release_memory(self) -> None:
        """Waits for the device, after which unreferenced memory is free."""
        gc.collect()
        torch.accelerator.synchronize()

    def describe(self) -> str:
        """Returns the name of the device and its memory."""
        total = _total_memory()
        size = "" if total is None else f", {total / 2**30:.0f} GiB"
        return f"{self.device} ({_module().get_device_name()}{size})"

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)


def has_tpu() -> bool:
    """Returns True if torch finds a TPU. Importing torch loads torch_tpu, which makes `tpu` the accelerator."""
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == "tpu"


def reject_absent_tpu(label: str, *, where: object | None = None) -> None:
    """Raises an error with the missing requirement if torch finds no TPU."""
    if has_tpu():
        return
    if importlib.util.find_spec("torch_tpu") is None:
        raise ConfigError(
            f"{label}: 'tpu' needs the package torch_tpu, which is not installed. "
            "Run pip install 'trainwright[tpu]', or use auto or cpu.",
            where=where,
        )
    raise ConfigError(f"{label}: 'tpu', but torch_tpu finds no TPU. Use auto or cpu.", where=where)


def _module() -> Any:
    """Returns torch_tpu's own functions, which torch does not have for every device."""
    return torch.get_device_module("tpu")


def _total_memory() -> int | None:
    try:
        return int(_module().get_device_properties().total_memory)
    except RuntimeError:  # a TPU newer than torch_tpu
        return None
