"""Lion: every weight moves by the same amount, in the direction of the sign of its momentum (Chen et al., 2023).

update = sign(β1 · momentum + (1 − β1) · gradient)
weight = weight · (1 − lr · weight_decay) − lr · update
momentum = β2 · momentum + (1 − β2) · gradient
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.models.layers.settings import keywords_of
from trainwright.optim.device_step import (
    ListOptimizer,
    in_chunks,
    unless,
    unscale_gradients,
)
from trainwright.optim.param_groups import reject_impossible


class Lion(ListOptimizer):
    """Lion has one state tensor per parameter, AdamW two. Use an lr that is 3 to 10 times smaller, and a larger weight
    decay.

    It steps lists of tensors at once, never synchronizes with the device, and skips an update with infinite gradients
    on the device. `master_weights` keeps an fp32 master of every 16-bit weight, and its momentum in fp32; `stochastic`
    rounds bf16 weights stochastically instead. `report` returns `update_norm`, at the cost of one more copy of the
    weights.
    """

    averages = ("momentum",)

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        master_weights: bool | str = False,
        report: bool = False,
    ) -> None:
        defaults = keywords_of(locals())
        del defaults["params"]
        reject_impossible(**defaults)
        # `fused` is torch's name for a step that reads found_inf.
        super().__init__(params, {**defaults, "betas": tuple(betas), "fused": True})

    def step_group(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        """Steps the parameters of a group that have a gradient, a chunk at a time."""
        for chunk in in_chunks(parameters):
            self._step_chunk(parameters[chunk], group)

    def _step_chunk(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        stepped = self.stepped_weights(parameters, group)
        momentum = self.state_of(parameters, stepped, "momentum")
        gradients, weights = self.gradients_of(parameters, group), self.shards_of(stepped)
        beta1, beta2 = group["betas"]
        rate = unless(unscale_gradients(self, gradients, momentum), group["lr"], 0.0)
        updates = list(torch._foreach_lerp(momentum, gradients, 1.0 - beta1))
        torch._foreach_sign_(updates)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1.0 - rate * group["weight_decay"])
        if isinstance(rate, Tensor):
            torch._foreach_mul_(updates, rate)
            torch._foreach_sub_(weights, updates)
        else:
            torch._foreach_add_(weights, updates, alpha=-rate)  # one pass with the same result, because updates are ±1
        torch._foreach_lerp_(momentum, gradients, 1.0 - beta2)
        self.round_weights(parameters, stepped, group)
