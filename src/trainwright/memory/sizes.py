"""How many bytes a model's parameters, gradients, buffers and optimizer states hold, tensor by tensor.

Only sizes are read: nothing is computed, copied or waited for, so it is safe with no memory left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from trainwright.backends.private_torch import tree_leaves

PARAMETER, GRADIENT, STATE, BUFFER = "parameter", "gradient", "optimizer state", "buffer"
KINDS = (PARAMETER, GRADIENT, STATE, BUFFER)


@dataclass(frozen=True)
class HeldTensor:
    """One tensor that a run keeps from step to step."""

    name: str
    """The parameter or buffer that it is, or belongs to."""
    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def held_tensors(
    model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], device: torch.device
) -> list[HeldTensor]:
    """Returns what model and optimizers hold on a device, the largest first; shared tensors count once."""
    found: list[HeldTensor] = []
    seen: set[int] = set()
    for name, kind, tensor in _tensors(model, optimizers):
        if id(tensor) in seen or tensor.device != device:
            continue
        seen.add(id(tensor))
        found.append(_describe(name, kind, tensor))
    return sorted(found, key=lambda each: -each.num_bytes)


def bytes_by_kind(tensors: Iterable[HeldTensor]) -> dict[str, int]:
    """Returns the sum of each kind."""
    sums = dict.fromkeys(KINDS, 0)
    for each in tensors:
        sums[each.kind] += each.num_bytes
    return sums


def bytes_by_module(tensors: Iterable[HeldTensor]) -> dict[str, dict[str, int]]:
    """Returns the sum of each kind for every top module, the largest first.

    The top modules are the first names in which tensors differ: with everything below `model.`, its children.
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


def _describe(name: str, kind: str, tensor: torch.Tensor) -> HeldTensor:
    return HeldTensor(name, kind, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
