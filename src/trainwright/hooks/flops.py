"""The floating-point operations of a step, and how fast the device multiplies matrices: what MFU is computed from."""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainwright.backends import reads_at_once
from trainwright.backends.private_torch import FakeTensorMode, tree_map_only
from trainwright.checkpoint.contents import generator_state, restore_generators
from trainwright.events import EventStorage, Mean
from trainwright.loop.task import overrides
from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

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
    except RuntimeError:  # set by torch's other, newer way, which this one rejects to read
        return bool(torch.backends.cuda.matmul.allow_tf32)


Shape = Sequence[int]


@dataclass(frozen=True)
class TensorLike:
    """What a tensor was like; it holds no memory."""

    shape: torch.Size
    dtype: torch.dtype


def flop_counter() -> FlopCounterMode:
    """Returns torch's counter; attention by a rule of our own, for torch's knows no CPU and no shared keys."""
    aten = torch.ops.aten
    forward = (
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
    )
    backward = (
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    rules = {**dict.fromkeys(forward, _attention_flops), **dict.fromkeys(backward, _attention_backward_flops)}
    return FlopCounterMode(display=False, custom_mapping=rules)


def can_count_aside(trainer: Trainer) -> bool:
    """Can a step be counted beside the run? Not where ranks share a model, nor a step that a user has written."""
    return not trainer.ranks.mesh.is_split and not overrides(trainer, "train_step", Trainer)


def can_count_within(trainer: Trainer) -> bool:
    """Can a step be counted while it runs? Only where nothing of it is compiled: that would then run otherwise."""
    model = trainer.config.model
    return trainer.config.runtime.mode == "eager" and (model is None or "compile_repeated_blocks" not in model.reserved)


def estimate_flops(trainer: Trainer, tokens_per_step: float | None) -> int | None:
    """Returns six operations for each parameter and token, on this rank; None where nobody knows either number."""
    if tokens_per_step is None or trainer.context.updater.pipeline is not None:
        return None
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    return round(6 * num_parameters * tokens_per_step / trainer.ranks.size)


def count_aside(trainer: Trainer, batch: Any) -> int | None:
    """Returns the operations of a step on a batch like this one, on this rank; None where they cannot be counted.

    `batch` has a TensorLike in each tensor's place. Weights, buffers, generators and storage are left alone.
    """
    generators = generator_state()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _on_fakes(trainer), flop_counter() as counter:
            fakes = tree_map_only(TensorLike, lambda like: _fake(like, trainer.device), batch)
            for micro_batch in trainer.micro_batches(fakes):
                loss = trainer.run_forward(micro_batch).loss
                total = torch.as_tensor(loss.total) if isinstance(loss, Mean) else loss
                torch.autograd.grad(total, _trained(trainer.model), allow_unused=True)
        return int(counter.get_total_flops())
    except Exception as error:  # a user's forward may read values, which are not there
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.info("The operations of a step could not be counted: %s", reason)
        return None
    finally:
        restore_generators(generators)


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Two products for each query head, [B, heads, positions, width], whether or not heads share keys."""
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def _attention_backward_flops(_: Shape, query: Shape, key: Shape, value: Shape, *__: Any, **___: Any) -> int:
    """Five products: the scores once more, then the gradients of scores, values, queries and keys."""
    return 2 * math.prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


def _fake(like: TensorLike, device: torch.device) -> Tensor:
    """A tensor without values, which takes no memory within a FakeTensorMode."""
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _trained(model: torch.nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextmanager
def _on_fakes(trainer: Trainer) -> Iterator[None]:
    """Gives the model tensors without values, and the trainer a storage that nobody reads."""
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (held, name, tensor)
        for module in trainer.model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]
    fakes: dict[int, Tensor] = {}  # one for each tensor: tied weights stay tied
    for _, _, tensor in places:
        if id(tensor) not in fakes:
            fake = torch.empty_like(tensor)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            fakes[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    storage, samples = trainer.storage, trainer.samples_in_hand
    try:
        for held, name, tensor in places:
            held[name] = fakes[id(tensor)]
        # Compiled code would run as it was compiled, for real tensors.
        with EventStorage() as unread, torch.compiler.set_stance("force_eager"):
            trainer.storage = unread
            yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor
        trainer.storage, trainer.samples_in_hand = storage, samples
