"""The floating-point operations of a step, and the rate of matrix products on the device: the two factors of MFU."""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainwright.backends import reads_at_once
from trainwright.backends.backend import AUTOCAST_DTYPES
from trainwright.backends.private_torch import FakeTensorMode, tree_map_only
from trainwright.checkpoint.contents import generator_state, restore_generators
from trainwright.events import Mean
from trainwright.loop.task import overrides
from trainwright.loop.trainer import Trainer
from trainwright.models.layers.fp8_linear import scaled_product
from trainwright.models.quantize import count_weights
from trainwright.parallel.collectives import Ranks

logger = logging.getLogger(__name__)

_SMALLEST, _LARGEST = 256, 8192
_ENOUGH_SECONDS = 0.005  # of one product, much longer than its launch
_MEASURED_SECONDS = 0.3
_LEAST_ROUNDS = 3

_TERA = 1e12

FP8 = torch.float8_e4m3fn


class Peak(NamedTuple):
    """TFLOP/s of a device; None if it does not support the dtype or its vendor publishes no figure."""

    half: float | None
    """bf16 and fp16, accumulated in fp32."""
    tf32: float | None
    """fp32 with 10 bits in products (torch.set_float32_matmul_precision("high"))."""
    single: float | None
    """Full fp32."""
    has_bf16: bool = True
    fp8: float | None = None
    """fp8, accumulated in fp32."""


KNOWN_PEAKS: Mapping[str, Peak] = {
    "GB300": Peak(2500.0, 1250.0, 80.0, fp8=5000.0),
    "GB200": Peak(2500.0, 1250.0, 80.0, fp8=5000.0),
    "B300": Peak(2250.0, 1125.0, 75.0, fp8=4500.0),
    "B200": Peak(2250.0, 1125.0, 75.0, fp8=4500.0),
    "GH200": Peak(989.4, 494.7, 66.9, fp8=1978.9),
    "H200 NVL": Peak(835.5, 417.7, 60.0, fp8=1671.0),
    "H200": Peak(989.4, 494.7, 66.9, fp8=1978.9),
    "H100 NVL": Peak(835.5, 417.7, 60.0, fp8=1671.0),
    "H100 PCIe": Peak(756.4, 378.2, 51.2, fp8=1512.8),
    "H100": Peak(989.4, 494.7, 66.9, fp8=1978.9),
    "A100": Peak(311.8, 155.9, 19.5),
    "A40": Peak(149.7, 74.8, 37.4),
    "A30": Peak(165.0, 82.0, 10.3),
    "A10": Peak(125.0, 62.5, 31.2),
    "L40S": Peak(362.1, 183.0, 91.6, fp8=733.0),
    "L40": Peak(181.1, 90.5, 90.5, fp8=362.0),
    "L4": Peak(121.0, 60.0, 30.3, fp8=242.5),
    "RTX A6000": Peak(154.8, 77.4, 38.7),
    "RTX 6000 Ada": Peak(364.2, 182.1, 91.1, fp8=728.5),
    "RTX 5090": Peak(209.5, 104.8, 104.8, fp8=419.0),
    "RTX 4090": Peak(165.2, 82.6, 82.6, fp8=330.3),
    "RTX 3090": Peak(71.0, 35.6, 35.6),
    "V100": Peak(125.0, None, 15.7, has_bf16=False),
    "T4": Peak(65.1, None, 8.1, has_bf16=False),
    "MI355X": Peak(2516.6, None, 157.3),
    "MI325X": Peak(1307.4, 653.7, 163.4),
    "MI300X": Peak(1307.4, 653.7, 163.4),
}
"""The vendors' figures without sparsity, by a word of the device's name; the first match counts."""


class MatrixRate(NamedTuple):
    """The result of `measure_matrix_rate`."""

    flops_per_second: float
    size: int
    """The number of rows and columns."""
    dtype: torch.dtype


def known_peak(device_name: str, dtype: torch.dtype) -> tuple[str, float] | None:
    """Returns the device's word in the table and its FLOP/s in a dtype, with torch's setting for fp32; None if unknown.

    >>> known_peak("cuda:0 (NVIDIA H200, 139 GiB)", torch.bfloat16)
    ('H200', 989400000000000.0)
    """
    word = next((word for word in KNOWN_PEAKS if re.search(rf"\b{word}\b", device_name)), None)
    if word is None:
        return None
    peak = KNOWN_PEAKS[word]
    if dtype == torch.float32:
        teraflops = peak.tf32 if _rounds_float32() else peak.single
    elif dtype == FP8:
        teraflops = peak.fp8
    elif dtype == torch.float16 or (dtype == torch.bfloat16 and peak.has_bf16):
        teraflops = peak.half
    else:
        teraflops = None
    return None if teraflops is None else (word, teraflops * _TERA)


def measure_matrix_rate(device: torch.device, dtype: torch.dtype) -> MatrixRate:
    """Multiplies random square matrices for a third of a second; returns the median rate.

    The size doubles until one product takes 5 ms, or to 8192, or to the limit of the memory. The numbers come from a
    separate generator, because the run's must not change; zeros would need less power and result in a higher rate.
    """
    generator = torch.Generator(device).manual_seed(0)
    size = _SMALLEST
    multiply, seconds = _make_product(size, dtype, generator)
    with suppress(torch.OutOfMemoryError):
        while seconds < _ENOUGH_SECONDS and size < _LARGEST:
            multiply, seconds = _make_product(2 * size, dtype, generator)
            size *= 2
    repeats = max(1, round(2 * _ENOUGH_SECONDS / seconds))
    rounds: list[float] = []
    end = time.perf_counter() + _MEASURED_SECONDS
    while len(rounds) < _LEAST_ROUNDS or time.perf_counter() < end:
        rounds.append(_time_calls(multiply, repeats, device) / repeats)
    return MatrixRate(2 * size**3 / statistics.median(rounds), size, dtype)


def _make_product(size: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Callable[[], Any], float]:
    """Returns a function that multiplies two square matrices, and the seconds of one call."""
    device = generator.device
    first, second = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    multiply: Callable[[], Any]
    if dtype == FP8:
        scale = torch.ones((), device=device)
        multiply = partial(scaled_product, first, second, scale, scale, torch.bfloat16, fast=True)
    else:
        multiply = partial(torch.mm, first, second, out=torch.empty_like(first))
    _time_calls(multiply, 1, device)  # chooses a kernel, and warms up
    return multiply, _time_calls(multiply, 1, device)


def wait_for(device: torch.device) -> None:
    """Waits until the device has completed all launched work."""
    if not reads_at_once(device):
        torch.accelerator.synchronize(device)


@torch.no_grad()
def _time_calls(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait_for(device)
    return time.perf_counter() - start


def _rounds_float32() -> bool:
    """Returns True if torch multiplies fp32 matrices as tf32."""
    try:
        return bool(torch.get_float32_matmul_precision() != "highest")
    except RuntimeError:  # set by torch's newer setting, which this function does not read
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


Shape = Sequence[int]


@dataclass(frozen=True)
class TensorLike:
    """The shape and dtype of a tensor, without its memory."""

    shape: torch.Size
    dtype: torch.dtype


def flop_counter() -> FlopCounterMode:
    """Returns torch's counter with our own rules for attention: torch's support neither CPUs nor shared keys."""
    rules: dict[Any, Any] = {}
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
        rules[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")] = _attention_flops
        rules[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")] = _attention_backward_flops
    return FlopCounterMode(display=False, custom_mapping=rules)


def can_count_aside(trainer: Trainer) -> bool:
    """Returns True if a step can be counted outside the run, which excludes sharded models and custom steps."""
    return not trainer.ranks.mesh.is_split and not overrides(trainer, "train_step", Trainer)


def can_count_within(trainer: Trainer) -> bool:
    """Returns True if a step can be counted while it runs: only if nothing is compiled, which counting would change."""
    model = trainer.config.model
    return trainer.config.runtime.mode == "eager" and (model is None or "compile_repeated_blocks" not in model.reserved)


def flops_per_token(model: torch.nn.Module, ranks: Ranks, pipeline: Any = None) -> float:
    """Returns the operations of a step per token from the number of parameters alone: six for a trained one.

    Two each for the forward, the gradient of the activations and, if the parameter is trained, the gradient of the
    weight.
    """
    own = 4 * count_weights(model) + 2 * sum(each.numel() for each in model.parameters() if each.requires_grad)
    if pipeline is not None:  # tied weights are on the first and on the last stage
        own -= sum(3 * each.numel() for each, _ in pipeline.tied)
    # The parameters of a pipeline stage are its own; those of the other layouts have their full shape on every rank.
    return float(sum(ranks.gather(own)) * ranks.mesh.size("pipeline") / ranks.size)


def matmul_dtype(model: torch.nn.Module, precision: str) -> torch.dtype:
    """Returns the dtype of most matrix products of a forward."""
    if precision == "fp8":
        return FP8
    if precision in AUTOCAST_DTYPES:
        return AUTOCAST_DTYPES[precision]
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def estimate_flops(trainer: Trainer, tokens_per_step: float | None) -> int | None:
    """Returns the operations of a step on this rank, from the number of parameters; None without tokens."""
    if tokens_per_step is None or trainer.context.updater.pipeline is not None:
        return None
    return round(flops_per_token(trainer.model, Ranks()) * tokens_per_step / trainer.ranks.size)


def count_aside(trainer: Trainer, batch: Any) -> int | None:
    """Returns the operations of a step with a batch of these shapes, on this rank; None if they cannot be counted.

    `batch` has a TensorLike instead of each tensor. Weights, buffers, generators and storage do not change.
    """
    generators, current = generator_state(), trainer.batch
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _on_fakes(trainer), flop_counter() as counter:
            fakes = tree_map_only(
                TensorLike, lambda like: torch.empty(like.shape, dtype=like.dtype, device=trainer.device), batch
            )
            trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
            for micro_batch in trainer.micro_batches(fakes):
                loss = trainer.run_forward(micro_batch).loss
                total = torch.as_tensor(loss.total) if isinstance(loss, Mean) else loss
                torch.autograd.grad(total, trained, allow_unused=True)
        return int(counter.get_total_flops())
    except Exception as error:  # a user's forward may read values, which fake tensors do not have
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.info("The operations of a step could not be counted: %s", reason)
        return None
    finally:
        trainer.set_batch(current.value, current.num_samples)
        restore_generators(generators)


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Two products for each query head, [B, heads, length, width], whether or not heads share keys."""
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def _attention_backward_flops(_: Shape, query: Shape, key: Shape, value: Shape, *__: Any, **___: Any) -> int:
    """Five products: the scores again, then the gradients of scores, values, queries and keys."""
    return 2 * math.prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


@contextmanager
def _on_fakes(trainer: Trainer) -> Iterator[None]:
    """Replaces the model's tensors with fake ones, and isolates the storage."""
    real: list[tuple[dict[str, Any], str, Tensor]] = [
        (owner, name, tensor)
        for module in trainer.model.modules()
        for owner in (module._parameters, module._buffers)
        for name, tensor in owner.items()
        if tensor is not None
    ]
    fakes: dict[int, Tensor] = {}  # one for each tensor: tied weights stay tied
    try:
        for owner, name, tensor in real:
            if id(tensor) not in fakes:
                fake = torch.empty_like(tensor)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                fakes[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            owner[name] = fakes[id(tensor)]
        # Compiled code would run for real tensors.
        with trainer.storage.isolated(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for owner, name, tensor in real:
            owner[name] = tensor
