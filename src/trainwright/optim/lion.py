"""Lion: every weight moves by the same amount, in the direction of its momentum's sign (Chen et al., 2023).

update = sign(β1 · momentum + (1 − β1) · gradient)
weight = weight · (1 − lr · weight_decay) − lr · update
momentum = β2 · momentum + (1 − β2) · gradient
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.optim.device_step import (
    copy_reported,
    device_of,
    entries_of,
    in_chunks,
    report_update,
    run_closure,
    settle_gradients,
    settle_loaded,
    tensors_of,
    unless,
    updated_parameters,
)
from trainwright.optim.master_weights import check_masters, masters_of, settle_masters, widen, write_back
from trainwright.optim.param_groups import reject_impossible
from trainwright.optim.sharded import has_parts, optimizes_parts, own_gradients, own_parts


class Lion(torch.optim.Optimizer):
    """One state tensor a parameter, against AdamW's two. Rates are 3 to 10 times smaller than AdamW's, decay larger.

    It steps whole lists of tensors at once, never makes the host wait, and skips an update with infinite gradients on
    the device. `master_weights` keeps an fp32 master of every weight in 16 bits, and its momentum in fp32
    (master_weights.py). `report` returns `update_norm`, for one more copy of the weights.
    """

    _step_supports_amp_scaling = True
    stages: Any = None
    """The process group of the ranks with other layers, whose metrics are summed with these; None: there are none."""
    _has_parts = False

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        master_weights: bool = False,
        report: bool = False,
    ) -> None:
        reject_impossible(lr=lr, betas=betas, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": (betas[0], betas[1]),
            "weight_decay": weight_decay,
            "master_weights": master_weights,
            "report": report,
            "fused": True,  # torch's word for a step that knows found_inf
        }
        entries = entries_of(params, owner="Lion")
        if master_weights:
            check_masters(tensors_of(entries))
        super().__init__(entries, defaults)
        self._is_loaded = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        """Updates the parameters in place and returns the metrics that were asked for."""
        run_closure(closure)
        copied = copy_reported(self)
        if self._is_loaded:
            settle_masters(self, ("momentum",))
            self._is_loaded = False
        for group in self.param_groups:
            parameters = updated_parameters(group)
            for chunk in in_chunks(parameters):
                self._step_chunk(parameters[chunk], group)
        return report_update(copied, stages=self.stages, device=device_of(self))

    def _step_chunk(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        weights = masters_of(self, parameters) if group["master_weights"] else parameters
        for parameter, weight in zip(parameters, weights, strict=True):
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(weight)
        momentum = [self.state[parameter]["momentum"] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._has_parts:
            gradients = own_gradients(parameters)
            momentum, weights, parameters = own_parts(momentum), own_parts(weights), own_parts(parameters)
        if group["master_weights"]:
            gradients = widen(gradients)
        self._step_tensors(weights, gradients, momentum, group)
        if group["master_weights"]:
            write_back(parameters, weights)

    def _step_tensors(
        self, parameters: list[Tensor], gradients: list[Tensor], momentum: list[Tensor], group: Mapping[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        skip = settle_gradients(self, gradients, momentum)
        rate = unless(skip, group["lr"], 0.0)
        updates = list(torch._foreach_lerp(momentum, gradients, 1.0 - beta1))
        torch._foreach_sign_(updates)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1.0 - rate * group["weight_decay"])
        if isinstance(rate, Tensor):
            torch._foreach_mul_(updates, rate)
            torch._foreach_sub_(parameters, updates)
        else:
            torch._foreach_add_(parameters, updates, alpha=-rate)  # one pass, and the same bits: updates are ±1
        torch._foreach_lerp_(momentum, gradients, 1.0 - beta2)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as in torch."""
        super().add_param_group(param_group)
        self._has_parts = self._has_parts or has_parts(self.param_groups[-1]["params"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._is_loaded = True
        for group in self.param_groups:
            group.setdefault("master_weights", False)
        self._has_parts = optimizes_parts(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state_dict()`, each tensor in the dtype that it was saved in."""
        super().load_state_dict(state_dict)
        settle_loaded(self, state_dict)
        self._is_loaded = True
