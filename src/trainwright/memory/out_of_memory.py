"""The report when memory runs out: its usage, and settings that reduce it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from trainwright.backends import Backend
from trainwright.backends.private_torch import tree_leaves
from trainwright.config import Component, RunConfig
from trainwright.errors import OutOfMemory

logger = logging.getLogger(__name__)

PARAMETER, GRADIENT, STATE, BUFFER = "parameter", "gradient", "optimizer state", "buffer"
KINDS = (PARAMETER, GRADIENT, STATE, BUFFER)


@dataclass(frozen=True)
class HeldTensor:
    """One tensor that a run keeps between steps."""

    name: str
    """The parameter or buffer that it is or belongs to."""
    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def held_tensors(
    model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], device: torch.device
) -> list[HeldTensor]:
    """Returns the tensors of model and optimizers on a device, the largest first; shared tensors count once."""
    found: list[HeldTensor] = []
    seen: set[int] = set()
    for name, kind, tensor in _tensors(model, optimizers):
        if id(tensor) in seen or tensor.device != device:
            continue
        seen.add(id(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        found.append(HeldTensor(name, kind, tuple(tensor.shape), dtype, tensor.nbytes))
    return sorted(found, key=lambda each: -each.num_bytes)


def bytes_by_kind(tensors: Iterable[HeldTensor]) -> dict[str, int]:
    """Returns the number of bytes of each kind."""
    sums = dict.fromkeys(KINDS, 0)
    for each in tensors:
        sums[each.kind] += each.num_bytes
    return sums


def bytes_by_module(tensors: Iterable[HeldTensor]) -> dict[str, dict[str, int]]:
    """Returns the number of bytes of each kind for every top module, the largest first.

    The top modules are the first names in which tensors differ: if all are below `model.`, its children.
    """
    tensors = list(tensors)
    paths = [each.name.split(".") for each in tensors]
    depth = 0
    while paths and all(len(path) > depth + 2 for path in paths) and len({path[depth] for path in paths}) == 1:
        depth += 1
    groups: dict[str, list[HeldTensor]] = {}
    for each, path in zip(tensors, paths, strict=True):
        groups.setdefault(".".join(path[: depth + 1]), []).append(each)
    sums = {name: bytes_by_kind(group) for name, group in groups.items()}
    return dict(sorted(sums.items(), key=lambda item: -sum(item[1].values())))


def _tensors(
    model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        yield name, PARAMETER, parameter
        if parameter.grad is not None:
            yield name, GRADIENT, parameter.grad
    for name, buffer in model.named_buffers():
        yield name, BUFFER, buffer
    for label, optimizer in optimizers.items():
        for owner, state in optimizer.state.items():
            name = names.get(id(owner), f"optimizer {label}")
            for tensor in tree_leaves(dict(state) if isinstance(state, Mapping) else state):
                if isinstance(tensor, torch.Tensor):
                    yield name, STATE, tensor


FOLDER = "out_of_memory"
_MESSAGES = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
_LARGEST = 20
_FRAGMENTED = 0.1  # of the device's memory: the unused memory of torch's allocator that is reported


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an error or its cause is a lack of memory on the device or the machine."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
            return True
        # Older kernels, other libraries and the CPU's allocator do not have their own error type.
        if isinstance(cause, RuntimeError) and any(message in str(cause).lower() for message in _MESSAGES):
            return True
        cause = cause.__cause__
    return False


def out_of_memory(
    error: BaseException,
    *,
    step: int,
    folder: Path,
    model: torch.nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    config: RunConfig,
    backend: Backend,
    rank: int = 0,
    in_evaluation: bool = False,
) -> OutOfMemory:
    """Writes the report and returns the error to raise from `error`, even if the report cannot be written.

    Call it while `error` is handled, because its frames still have the tensors that filled the memory.
    """
    text = explain(error, model, optimizers, config, backend, in_evaluation=in_evaluation)
    message = f"Out of memory at step {step} on rank {rank}, {backend.describe()}."
    for advice in advice_for(config, in_evaluation=in_evaluation)[:1]:
        message += f" First to try: {advice}"
    try:
        path = write_report(folder, step, text, backend, rank=rank)
    except OSError as failure:
        logger.warning("The memory report could not be written: %s", failure)
        return OutOfMemory(f"{message}\n{text}")
    return OutOfMemory(f"{message} The report on memory, with further advice: {path}")


def explain(
    error: BaseException,
    model: torch.nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    config: RunConfig,
    backend: Backend,
    *,
    in_evaluation: bool = False,
) -> str:
    """Returns the report: memory by kind, by top module and by tensor, and settings that reduce it."""
    tensors = held_tensors(model, optimizers, backend.device)
    kinds = bytes_by_kind(tensors)
    lines = [f"Out of memory on {backend.describe()}", ""]
    lines += [f"  {line}" for line in str(error).strip().splitlines()]
    rows = [(f"{kind}s" if kind != STATE else kind, num_bytes) for kind, num_bytes in kinds.items()]
    rows += _device_rows(backend, sum(kinds.values()))
    lines += ["", "Memory use", *(f"  {_size(num_bytes)}  {name}" for name, num_bytes in rows)]
    lines += ["", "By module: " + ", ".join(KINDS)]
    for name, sums in bytes_by_module(tensors).items():
        by_kind = " + ".join(_size(sums[kind]).strip() for kind in KINDS)
        lines.append(f"  {_size(sum(sums.values()))}  {name}  ({by_kind})")
    lines += ["", f"The largest of {len(tensors)} tensors"]
    lines += [
        f"  {_size(each.num_bytes)}  {each.name}  {each.kind}  {each.shape} {each.dtype}" for each in tensors[:_LARGEST]
    ]
    facts = backend.memory()
    unused = 0
    if facts.reserved is not None and facts.in_use is not None and facts.total is not None:
        unused = facts.reserved - facts.in_use
        unused = unused if unused > _FRAGMENTED * facts.total else 0
    advice = advice_for(config, {**kinds, "unused": unused}, in_evaluation=in_evaluation)
    lines += ["", "What could change", *(f"  - {each}" for each in advice)]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, step: int, text: str, backend: Backend, *, rank: int = 0) -> Path:
    """Writes the report and the memory snapshot to RUN/out_of_memory/step-…; returns the path of the report."""
    where = folder / FOLDER / f"step-{step:08d}"
    where.mkdir(parents=True, exist_ok=True)
    path = where / ("report.txt" if rank == 0 else f"report-rank-{rank}.txt")
    path.write_text(text, encoding="utf-8")
    try:
        snapshot = backend.write_memory_snapshot(where)
    except Exception as failure:  # torch's dump is private and may fail; the report is written
        logger.warning("The memory snapshot could not be written: %s", failure)
        return path
    if snapshot is not None:
        note = f"\n{snapshot.name} shows every block of the device's memory at pytorch.org/memory_viz.\n"
        path.write_text(text + note, encoding="utf-8")
    return path


def advice_for(
    config: RunConfig, held: Mapping[str, int] = MappingProxyType({}), *, in_evaluation: bool = False
) -> list[str]:
    """Returns the settings that need less memory and are not used yet, the cheapest first.

    `held` are the bytes of each kind, if they are known.
    """
    return list(_advice(config, held, in_evaluation=in_evaluation))


def _advice(config: RunConfig, held: Mapping[str, int], *, in_evaluation: bool) -> Iterator[str]:
    micro = config.trainer.micro_batch_size
    if in_evaluation:
        yield "evaluation.batch_size: fewer samples per forward of an evaluation; its result is the same."
    elif isinstance(micro, int) and micro > 1:
        yield (
            f"trainer.micro_batch_size={micro // 2}, or auto (now {micro}): smaller micro-batches; the batch of an "
            "update and its loss stay the same."
        )
    if held.get("unused", 0):
        yield (
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment: torch has "
            f"{_size(held['unused']).strip()} in blocks that are too small to use."
        )
    if config.runtime.precision == "fp32":
        yield "runtime.precision=bf16: most activations need half; parameters stay in fp32."
    if config.model is not None and "activation_checkpointing" not in config.model.reserved and not in_evaluation:
        yield (
            "model.activation_checkpointing, with the class of the model's blocks: their activations are recomputed, "
            "for about a quarter more time; losses stay equal, bit for bit."
        )
    if not in_evaluation:
        yield from _advice_for_recomputed(config)
    for label, optimizer in _optimizers(config):
        if optimizer.type == "adamw" and not {"state", "state_dtype"} & optimizer.arguments.keys():
            yield f"{label}.state=8bit: {_saving(held, STATE, 0.75)}both moments need a quarter of fp32."
    reserved = {} if config.model is None else config.model.reserved
    if config.model is not None and not {"freeze", "lora"} & reserved.keys():
        yield (
            f"model.freeze, or model.lora: {_saving(held, GRADIENT, 1.0)}frozen parameters need no gradient and "
            "no optimizer state."
        )
    is_split = any(size not in (None, 1) for axis, size in config.runtime.mesh if axis != "replicate")
    if {"lora", "peft"} & reserved.keys() and "quantize" not in reserved and not is_split:
        yield "model.quantize=nf4: frozen linear layers under adapters need a quarter of their memory in bf16."
    if any(hook.type == "ema" for hook in config.hooks):
        size = f" ({_size(held[PARAMETER]).strip()})" if held.get(PARAMETER) else ""
        yield f"hooks: ema keeps a copy of the weights{size}, and in evaluations a second."


def _advice_for_recomputed(config: RunConfig) -> Iterator[str]:
    """Yields the settings that matter if blocks are recomputed, when their inputs and one block need most of the
    memory."""
    reserved = {} if config.model is None else config.model.reserved
    if "activation_checkpointing" not in reserved:
        return
    if "offload" not in reserved and not config.runtime.device.startswith("cpu"):
        yield (
            "model.offload, with the name of the inputs of blocks ([decoder_input] in llama and gpt2): they stay in "
            "host memory until the backward pass."
        )
    if "tile" not in reserved:
        yield (
            'model.tile, with the class of the model\'s MLP or a glob such as "*.mlp": the wide tensors of a part of '
            "the tokens are in memory at a time."
        )


def _optimizers(config: RunConfig) -> Iterator[tuple[str, Component]]:
    if config.trainer.optimizer is not None:
        yield "trainer.optimizer", config.trainer.optimizer
    for name, section in config.trainer.optimizers.items():
        yield f"trainer.optimizers.{name}.optimizer", section.optimizer


def _saving(held: Mapping[str, int], kind: str, share: float) -> str:
    num_bytes = int(held.get(kind, 0) * share)
    return f"up to {_size(num_bytes).strip()} less: " if num_bytes else ""


def _device_rows(backend: Backend, known: int) -> Iterator[tuple[str, int]]:
    facts = backend.memory()
    if facts.peak is not None:
        yield "the rest of the peak: activations, batches, temporary memory", max(facts.peak - known, 0)
        yield "the peak", facts.peak
    if facts.in_use is not None:
        yield "in use when memory ran out", facts.in_use
    if facts.reserved is not None:
        yield "reserved by torch's allocator", facts.reserved
    if facts.total is not None:
        yield "total", facts.total


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:7.2f} {unit}"
    return f"{num_bytes / 2**10:7.2f} KiB"
