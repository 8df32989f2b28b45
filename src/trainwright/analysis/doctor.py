"""`trainwright doctor`: facts about a machine, short measurements, and what is likely to make training slow.

Writes and removes one file, and changes nothing else. backends/checkup.py examines devices.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainwright.backends.backend import pick_backend
from trainwright.backends.checkup import DeviceFacts, device_facts, device_problems
from trainwright.cpu import num_cores
from trainwright.hooks.flops import known_peak, measure_matrix_rate
from trainwright.progress import progress

MAX_SECONDS = 10.0
"""A measurement does not begin after this time."""

EXTRAS: Mapping[str, str] = {
    "datasets": "datasets of the Hugging Face Hub and of its library",
    "digits": "the dataset digits, for first runs",
    "fsspec": "data and checkpoints at http:// and other addresses",
    "gcs": "data and checkpoints at gs://",
    "huggingface_hub": "downloads of pretrained models, uploads of exports",
    "lm_eval": "tasks of lm-eval, in `trainwright evaluate --tasks`",
    "metrics": "metrics of torchmetrics",
    "mlflow": "the writer mlflow",
    "parquet": "Parquet files, cached results of data.process",
    "peft": "adapters of PEFT",
    "plot": "plots with matplotlib",
    "s3": "data and checkpoints at s3://",
    "sweep": "`trainwright sweep`, with Optuna",
    "tensorboard": "the writer tensorboard",
    "timm": "models and transforms of timm",
    "tpu": "TPUs",
    "trackio": "the writer trackio",
    "transformers": "models and tokenizers of transformers",
    "wandb": "the writer wandb",
}
"""The features that each extra of the package adds."""

_NOT_FEATURES = ("all", "dev", "docs", "benchmarks")
_DISK_BYTES = 64 * 2**20
_SECONDS = 0.6  # of each measurement of throughput
_SLOW_DISK = 100e6
_SMALL_SHARED_MEMORY = 2**30
_LEAST_SHARE_OF_PEAK = 0.5
_MEMORY_INFO, _MOUNTS = Path("/proc/meminfo"), Path("/proc/mounts")
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p")


@dataclass(frozen=True)
class Extra:
    """An extra of the package."""

    name: str
    adds: str
    missing: tuple[str, ...]
    """Its packages that are not installed; empty if the extra can be used."""


@dataclass(frozen=True)
class Advice:
    """A probable cause of slowness or failure, with advice."""

    problem: str
    advice: str


@dataclass
class MachineReport:
    """The output of `trainwright doctor`."""

    facts: dict[str, str]
    extras: list[Extra]
    measurements: dict[str, str] = field(default_factory=dict)
    advice: list[Advice] = field(default_factory=list)


def examine(folder: Path, *, measures: bool = True) -> MachineReport:
    """Returns the facts of this machine, and of the disk below `folder`, with measurements of about ten seconds."""
    devices = device_facts()
    existing = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir()), Path.cwd())
    report = MachineReport(_facts(devices, existing), find_extras())
    report.advice += [Advice(*each) for each in device_problems(devices)]
    report.advice += [*_processor_advice(devices), *_memory_advice(), *_disk_advice(existing), *_program_advice()]
    if measures:
        start = time.monotonic()
        measurements: list[Callable[[MachineReport], None]] = [
            *(lambda report, dtype=dtype: _measure_products(report, dtype) for dtype in devices.dtypes),
            lambda report: _measure_disk(report, existing),
            _measure_loader,
            _measure_tokenizer,
        ]
        for measure in measurements:
            if time.monotonic() - start > MAX_SECONDS:
                report.measurements["left out"] = f"more than {MAX_SECONDS:.0f} s have passed"
                break
            measure(report)
    return report


def find_extras() -> list[Extra]:
    """Returns the package's extras from its metadata, each with its packages that are not installed."""
    packages: dict[str, list[str]] = {}
    for requirement in metadata("trainwright").get_all("Requires-Dist") or ():
        found = re.match(r"([A-Za-z0-9._-]+)[^;]*;.*extra == ['\"]([\w-]+)['\"]", requirement)
        if found is not None:
            packages.setdefault(found[2].replace("-", "_"), []).append(found[1])
    return [
        Extra(name, EXTRAS.get(name, ""), tuple(each for each in names if not _is_installed(each)))
        for name, names in sorted(packages.items())
        if name not in _NOT_FEATURES
    ]


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _facts(devices: DeviceFacts, folder: Path) -> dict[str, str]:
    disk = shutil.disk_usage(folder)
    memory = _memory_info()
    shared = _shared_memory()
    facts = {
        "trainwright": version("trainwright"),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "torch": f"{torch.__version__} ({devices.toolkit or 'CPU only'})",
        "device": devices.device,
        "devices": f"{len(devices.names)}: {', '.join(devices.names)}" if len(devices.names) > 1 else "",
        "driver": devices.driver or "none",
        "cores": f"{num_cores()} of {os.cpu_count()}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", f"not set; torch uses {torch.get_num_threads()} threads"),
        "memory": f"{_gigabytes(memory.get('MemAvailable'))} of {_gigabytes(memory.get('MemTotal'))} available",
        "/dev/shm": "" if shared is None else _gigabytes(shared),
        "disk": f"{_gigabytes(disk.free)} of {_gigabytes(disk.total)} free, {_file_system(folder)}, at {folder}",
    }
    return {name: value for name, value in facts.items() if value}


def _processor_advice(devices: DeviceFacts) -> Iterator[Advice]:
    cores, given = num_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > cores:
        yield Advice(
            f"OMP_NUM_THREADS is {given}, but this process may use {cores} cores.",
            f"Set it to {cores}, or to {cores} / the number of processes.",
        )
    elif not devices.names and torch.get_num_threads() < cores:
        yield Advice(
            f"torch uses {torch.get_num_threads()} of {cores} cores, and the CPU is the device.",
            f"Unset OMP_NUM_THREADS, or set it to {cores} for a run of one process.",
        )
    elif not given and len(devices.names) > 1:
        yield Advice(
            f"OMP_NUM_THREADS is not set: each process of a launcher other than `--nproc` uses {cores} threads.",
            f"Set it to {max(1, cores // len(devices.names))}. `trainwright train --nproc` sets it to 1.",
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield Advice("CUDA_LAUNCH_BLOCKING is set: the host waits for each kernel.", "Unset it, except for debugging.")


def _memory_advice() -> Iterator[Advice]:
    memory, shared = _memory_info(), _shared_memory()
    used_swap = memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)
    if used_swap > 0.05 * memory.get("MemTotal", 0):
        yield Advice(
            f"{_gigabytes(used_swap)} of memory is swapped out to disk.",
            "End other programs, or lower data.num_workers and data.loader.prefetch_factor.",
        )
    if shared is not None and shared < _SMALL_SHARED_MEMORY:
        yield Advice(
            f"/dev/shm has {shared / 2**20:.0f} MiB, and data workers pass batches through it.",
            "Start the container with --shm-size=8g, or use data.num_workers: 0.",
        )


def _disk_advice(folder: Path) -> Iterator[Advice]:
    free, file_system = shutil.disk_usage(folder).free, _file_system(folder)
    if free < 10e9:
        yield Advice(f"{folder} has {_gigabytes(free)} left.", "Free some, or set output_dir to another disk.")
    if file_system in _NETWORK_FILE_SYSTEMS:
        yield Advice(
            f"{folder} is on a network ({file_system}).",
            "Set cache_dir or XDG_CACHE_HOME to a local disk, so that caches of data are not read over the network.",
        )


def _program_advice() -> Iterator[Advice]:
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++", "gcc", "clang")):
        yield Advice("There is no C++ compiler.", "runtime.mode: compile needs one: install g++ or clang.")
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("0", "false", "no", "off", "n", "f"):
        yield Advice("TOKENIZERS_PARALLELISM turns off the threads of tokenizers.", "Unset it.")


@contextmanager
def _measuring(report: MachineReport, name: str) -> Iterator[None]:
    """Shows what is measured; a measurement that fails is a line of the report."""
    with progress(f"Measuring {name}"):
        try:
            yield
        except Exception as error:
            report.measurements[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"


def _measure_products(report: MachineReport, dtype: torch.dtype) -> None:
    name = f"matmul {str(dtype).removeprefix('torch.')}"
    with _measuring(report, name):
        backend = pick_backend("auto")
        rate = measure_matrix_rate(backend.device, dtype)
        peak = known_peak(backend.describe(), dtype)
        text = f"{rate.flops_per_second / 1e12:.3g} TFLOP/s ({rate.size} × {rate.size})"
        if peak is not None:
            share = rate.flops_per_second / peak[1]
            text += f", {share:.0%} of the {peak[1] / 1e12:.3g} of a {peak[0]}"
            if share < _LEAST_SHARE_OF_PEAK:
                advice = "Check with nvidia-smi that no other process uses it, its clocks, temperature and power limit."
                report.advice.append(Advice(f"The device multiplies {dtype} at {share:.0%} of its peak.", advice))
        report.measurements[name] = text


def _measure_disk(report: MachineReport, folder: Path) -> None:
    path = folder / f".trainwright-doctor-{secrets.token_hex(4)}"
    with _measuring(report, "disk"):
        if shutil.disk_usage(folder).free < 4 * _DISK_BYTES:
            report.measurements["disk"] = "not measured: too little space"
            return
        content = os.urandom(_DISK_BYTES)  # not zeros, because some disks do not store them
        try:
            start = time.perf_counter()
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                written = time.perf_counter() - start
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read from the disk, not from memory
            start = time.perf_counter()
            path.read_bytes()
            read = time.perf_counter() - start
        finally:
            path.unlink(missing_ok=True)
        write_rate, read_rate = _DISK_BYTES / written, _DISK_BYTES / read
        report.measurements["disk"] = f"write {write_rate / 1e6:,.0f} MB/s, read {read_rate / 1e6:,.0f} MB/s"
        if write_rate < _SLOW_DISK:
            report.advice.append(
                Advice(
                    f"The disk of {folder} writes {write_rate / 1e6:.0f} MB/s.",
                    "Set output_dir to a faster one, or save less often; saving does not stop the training.",
                )
            )


class _Images(Dataset[torch.Tensor]):
    """Samples that take about as long as decoding a small image."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        pixels = torch.arange(3 * 128 * 128, dtype=torch.float32).view(3, 128, 128)
        return ((pixels + index) % 255 / 255.0).flip(-1).contiguous()


def _measure_loader(report: MachineReport) -> None:
    with _measuring(report, "data loader"):
        rates = {num_workers: _loader_rate(num_workers) for num_workers in (0, 1, 2)}
        shown = ", ".join(f"{number} worker{'' if number == 1 else 's'} {rate:,.0f}" for number, rate in rates.items())
        report.measurements["data loader"] = f"samples/s: {shown}"
        if num_cores() > 2 and rates[2] < rates[0]:
            advice = "Look at /dev/shm and at other programs on this machine; `data.num_workers: 0` may be faster here."
            report.advice.append(Advice("Two data workers are slower than none.", advice))


def _loader_rate(num_workers: int) -> float:
    """Returns samples per second after the first batch, which includes the start of the workers."""
    batches = iter(DataLoader(_Images(), batch_size=16, num_workers=num_workers))
    next(batches)
    start, num_samples = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < _SECONDS:
        num_samples += len(next(batches))
    return num_samples / passed


def _measure_tokenizer(report: MachineReport) -> None:
    with _measuring(report, "tokenizer"):
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokenizer = Tokenizer(models.WordLevel({"word": 0, "unknown": 1}, unk_token="unknown"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        texts = ["word other " * 50] * 256
        before = os.environ.get("TOKENIZERS_PARALLELISM")
        rates = []
        try:
            for setting in ("false", "true"):
                os.environ["TOKENIZERS_PARALLELISM"] = setting
                rates.append(_tokenizer_rate(tokenizer, texts))
        finally:
            if before is None:
                del os.environ["TOKENIZERS_PARALLELISM"]
            else:
                os.environ["TOKENIZERS_PARALLELISM"] = before
        alone, together = rates
        report.measurements["tokenizer"] = (
            f"{alone / 1e6:.2f} M words/s with one thread, {together / 1e6:.2f} with all ({together / alone:.1f} times)"
        )


def _tokenizer_rate(tokenizer: Any, texts: list[str]) -> float:
    start, num_words = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < _SECONDS / 2:
        num_words += sum(len(each.ids) for each in tokenizer.encode_batch(texts))
    return num_words / passed


def _memory_info() -> dict[str, int]:
    """Returns the bytes in /proc/meminfo by name; empty if it does not exist."""
    with suppress(OSError):
        lines = _MEMORY_INFO.read_text(encoding="ascii").splitlines()
        return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return {}


def _shared_memory() -> int | None:
    with suppress(OSError):
        return shutil.disk_usage("/dev/shm").total
    return None


def _file_system(folder: Path) -> str:
    """Returns the kind of the file system that contains a folder, such as ext4."""
    kind, longest = "unknown file system", -1
    with suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            _, point, found, *_ = line.split(" ")
            if folder.is_relative_to(point.replace("\\040", " ")) and len(point) >= longest:
                kind, longest = found, len(point)
    return kind


def _gigabytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e9:,.1f} GB"
