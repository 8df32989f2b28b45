"""Weights in 16 bits beside masters in fp32: the model computes with the former, the optimizer steps the latter.

    gradients (bf16) → fp32 → step of the masters → rounded to the weights (bf16)

A weight in bf16 has 8 bits: an update of less than a 256th of it would be lost, and most are. The master keeps all of
them. It belongs to the optimizer's state, and is made from the weight in the first step. A weight that is written to
by hand between steps is overwritten by its master in the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.errors import ConfigError

NARROW = (torch.bfloat16, torch.float16)
KEY = "master"
"""Where a parameter's state has its master."""


def check_masters(tensors: Iterable[Tensor]) -> None:
    """Rejects masters that would have no effect, or less bits than their weights."""
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes & {*NARROW}:
        raise ConfigError(
            "master_weights has no effect: no trained weight has 16 bits. Make the model's weights bf16, by "
            "model.dtype or model.pretrained.dtype, or leave it out."
        )
    odd = dtypes - {*NARROW, torch.float32}
    if odd:
        raise ConfigError(f"master_weights is for parameters in bf16, fp16 and fp32, but one is {odd.pop()}.")


def masters_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns what is stepped for each parameter: its master, made where there is none, or an fp32 parameter itself."""
    stepped = []
    for parameter in parameters:
        if parameter.dtype in NARROW:
            state = optimizer.state[parameter]
            if KEY not in state:
                state[KEY] = parameter.detach().to(torch.float32)
            parameter = state[KEY]
        stepped.append(parameter)
    return stepped


def write_back(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Rounds masters to their weights; where a step was held back these are what they were."""
    pairs = [(weight, master) for weight, master in zip(parameters, masters, strict=True) if weight is not master]
    if pairs:
        torch._foreach_copy_([weight for weight, _ in pairs], [master for _, master in pairs])


def widen(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors in fp32: those that are already as they are, copies of the others."""
    return [tensor.to(torch.float32) for tensor in tensors]


def settle_masters(
    optimizer: torch.optim.Optimizer, averages: Iterable[str], *, dtype: torch.dtype | None = None
) -> None:
    """Fits loaded state to the settings, which a run that begins with another's state need not share with it.

    Masters that nobody steps are dropped, for one day they would be taken for the weights. Averages get `dtype`, or
    where that is None the dtype of what is stepped.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            has_master = bool(group["master_weights"]) and parameter.dtype in NARROW
            if not has_master:
                state.pop(KEY, None)
            wanted = dtype or (torch.float32 if has_master else parameter.dtype)
            for key in averages:
                if key in state:
                    state[key] = state[key].to(wanted)
