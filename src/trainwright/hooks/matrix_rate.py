"""How fast a device multiplies matrices: as measured here, and as its vendor says.

What a training step reaches is compared with both (profile_summary.py). The measured rate is the fair one: it is what
torch gets out of this device, at the clock that its power allows.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from trainwright.backends import reads_at_once

_SMALLEST, _LARGEST = 256, 8192
_ENOUGH_SECONDS = 0.005  # of one product: then the time to launch it is nothing beside it
_MEASURED_SECONDS = 0.3
_LEAST_ROUNDS = 3

_TERA = 1e12


class Peak(NamedTuple):
    """TFLOP/s of a device; None where it has no unit for it, or its vendor gives no figure."""

    half: float | None
    """bf16 and fp16, summed in fp32."""
    tf32: float | None
    """fp32 numbers, of which the products take 10 bits (torch.set_float32_matmul_precision("high"))."""
    single: float | None
    """fp32 in full."""
    has_bf16: bool = True


KNOWN_PEAKS: Mapping[str, Peak] = {
    "GB300": Peak(2500.0, 1250.0, 80.0),
    "GB200": Peak(2500.0, 1250.0, 80.0),
    "B300": Peak(2250.0, 1125.0, 75.0),
    "B200": Peak(2250.0, 1125.0, 75.0),
    "GH200": Peak(989.4, 494.7, 66.9),
    "H200 NVL": Peak(835.5, 417.7, 60.0),
    "H200": Peak(989.4, 494.7, 66.9),
    "H100 NVL": Peak(835.5, 417.7, 60.0),
    "H100 PCIe": Peak(756.4, 378.2, 51.2),
    "H100": Peak(989.4, 494.7, 66.9),
    "A100": Peak(311.8, 155.9, 19.5),
    "A40": Peak(149.7, 74.8, 37.4),
    "A30": Peak(165.0, 82.0, 10.3),
    "A10": Peak(125.0, 62.5, 31.2),
    "L40S": Peak(362.1, 183.0, 91.6),
    "L40": Peak(181.1, 90.5, 90.5),
    "L4": Peak(121.0, 60.0, 30.3),
    "RTX A6000": Peak(154.8, 77.4, 38.7),
    "RTX 6000 Ada": Peak(364.2, 182.1, 91.1),
    "RTX 5090": Peak(209.5, 104.8, 104.8),
    "RTX 4090": Peak(165.2, 82.6, 82.6),
    "RTX 3090": Peak(71.0, 35.6, 35.6),
    "V100": Peak(125.0, None, 15.7, has_bf16=False),
    "T4": Peak(65.1, None, 8.1, has_bf16=False),
    "MI355X": Peak(2516.6, None, 157.3),
    "MI325X": Peak(1307.4, 653.7, 163.4),
    "MI300X": Peak(1307.4, 653.7, 163.4),
}
"""The vendors' dense figures, without sparsity, by a word of the device's name; the first that fits counts."""


class MatrixRate(NamedTuple):
    """What `measure_matrix_rate` found."""

    flops_per_second: float
    size: int
    """The matrices' side."""
    dtype: torch.dtype


def known_peak(device_name: str, dtype: torch.dtype) -> tuple[str, float] | None:
    """Returns the device's word in the table and its FLOP/s in a dtype, under torch's setting for fp32; None: unknown.

    >>> known_peak("cuda:0 (NVIDIA H200, 139 GiB)", torch.bfloat16)
    ('H200', 989400000000000.0)
    """
    word = next((word for word in KNOWN_PEAKS if re.search(rf"\b{word}\b", device_name)), None)
    if word is None:
        return None
    peak = KNOWN_PEAKS[word]
    if dtype == torch.float32:
        teraflops = peak.tf32 if _rounds_float32() else peak.single
    elif dtype == torch.float16 or (dtype == torch.bfloat16 and peak.has_bf16):
        teraflops = peak.half
    else:
        teraflops = None
    return None if teraflops is None else (word, teraflops * _TERA)


def measure_matrix_rate(device: torch.device, dtype: torch.dtype) -> MatrixRate:
    """Multiplies square matrices of random numbers for a third of a second; returns the median rate.

    They grow until one product takes 5 ms, or to 8192, or to what the memory allows. The numbers are drawn from a
    generator of its own, for the run's are not to be disturbed; zeros would need less power and show too high a rate.
    """
    generator = torch.Generator(device).manual_seed(0)
    size, best = _SMALLEST, None
    while True:
        try:
            pair = [torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2)]
            into = torch.empty_like(pair[0])
            _time_products(pair, into, 1)  # chooses a kernel, and warms up
            seconds = _time_products(pair, into, 1)
        except torch.OutOfMemoryError:
            if best is None:
                raise
            size, pair, into, seconds = best
            break
        if seconds >= _ENOUGH_SECONDS or size == _LARGEST:
            break
        best = (size, pair, into, seconds)
        size *= 2
    repeats = max(1, round(2 * _ENOUGH_SECONDS / seconds))
    rounds: list[float] = []
    end = time.perf_counter() + _MEASURED_SECONDS
    while len(rounds) < _LEAST_ROUNDS or time.perf_counter() < end:
        rounds.append(_time_products(pair, into, repeats) / repeats)
    return MatrixRate(2 * size**3 / statistics.median(rounds), size, dtype)


def wait_for(device: torch.device) -> None:
    """Waits until the device has done all that it was asked for."""
    if not reads_at_once(device):
        torch.accelerator.synchronize(device)


@torch.no_grad()
def _time_products(pair: list[torch.Tensor], into: torch.Tensor, repeats: int) -> float:
    wait_for(into.device)
    start = time.perf_counter()
    for _ in range(repeats):
        torch.mm(*pair, out=into)
    wait_for(into.device)
    return time.perf_counter() - start


def _rounds_float32() -> bool:
    """Does torch multiply fp32 matrices as tf32?"""
    try:
        return bool(torch.get_float32_matmul_precision() != "highest")
    except RuntimeError:  # set by torch's other, newer way, which this one refuses to read
        return bool(torch.backends.cuda.matmul.allow_tf32)
