"""Facts about the devices of this machine, from torch and the driver, for `trainwright doctor`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainwright.backends.backend import pick_backend
from trainwright.safe_text import safe

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_AMD_DRIVER = Path("/sys/module/amdgpu/version")


@dataclass(frozen=True)
class DeviceFacts:
    """The devices of a machine."""

    device: str
    """The device that `runtime.device: auto` selects."""
    names: tuple[str, ...]
    """All accelerators that torch sees."""
    driver: str | None
    """The driver of NVIDIA's or AMD's GPUs, even if torch cannot use it."""
    toolkit: str | None
    """The toolkit that torch was built with, such as CUDA 13.0; None for the CPU only."""
    dtypes: tuple[torch.dtype, ...]
    """The probable dtypes of matrix products on this device."""
    memory_in_use_by_others: int
    """Bytes of the selected device that other processes use."""


def device_facts() -> DeviceFacts:
    """Returns the devices and the driver."""
    backend = pick_backend("auto")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = tuple(pick_backend(f"cuda:{number}").describe() for number in range(count))
    toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else None
    if toolkit is None and torch.version.hip:
        toolkit = f"ROCm {torch.version.hip}"
    dtypes = [torch.float32]
    if names:
        dtypes += [torch.bfloat16 if backend.supports_precision("bf16") else torch.float16]
    elif backend.choose_precision() == "bf16":
        dtypes += [torch.bfloat16]
    in_use = 0
    if names:
        free, total = torch.cuda.mem_get_info(backend.device)
        in_use = total - free - torch.cuda.memory_reserved(backend.device)
    return DeviceFacts(backend.describe(), names, _driver(), toolkit, tuple(dtypes), in_use)


def device_problems(facts: DeviceFacts) -> Sequence[tuple[str, str]]:
    """Returns the problems with the devices, each with advice."""
    problems = []
    if facts.driver is not None and not facts.names:
        if facts.toolkit is None:
            problems.append(
                (
                    f"This torch ({torch.__version__}) is built for the CPU only, but there is a GPU driver "
                    f"({facts.driver}).",
                    "Install a torch for it: see https://pytorch.org/get-started.",
                )
            )
        else:
            problems.append(
                (
                    f"torch is built with {facts.toolkit} and sees no GPU, but there is a driver ({facts.driver}).",
                    "Check CUDA_VISIBLE_DEVICES, the container's access to devices, and that the driver is not older "
                    "than torch needs.",
                )
            )
    if facts.memory_in_use_by_others > 2**30:
        size = facts.memory_in_use_by_others / 2**30
        problems.append((f"Other processes use {size:.1f} GiB of the device.", "nvidia-smi lists them."))
    return problems


def _driver() -> str | None:
    """Returns the kind and version of a GPU driver that is loaded; None without one."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)*", _NVIDIA_DRIVER.read_text(encoding="utf-8"))
        return f"NVIDIA {found[0]}" if found else "NVIDIA"
    except OSError:
        pass
    try:
        return f"AMD {safe(_AMD_DRIVER.read_text(encoding='utf-8').strip())}"
    except OSError:
        return None
