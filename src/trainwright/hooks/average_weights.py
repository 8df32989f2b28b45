"""Keeps an exponential average of the weights and evaluates with it.

The weights that training goes on with are untouched: they are swapped out for an evaluation and back
after it, bit for bit, also when the evaluation fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainwright.errors import CheckpointError, ConfigError
from trainwright.loop.hook import Hook


class AverageWeights(Hook):
    """Averages every floating-point parameter: average = decay × average + (1 − decay) × weight.

    The average begins as a copy of the weights, not as zeros, so it needs no correction. It is saved in
    the checkpoint; `evaluate: false` keeps it without evaluating with it.
    """

    def __init__(self, decay: float = 0.999, every_steps: int = 1, evaluate: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"average_weights.decay: {decay} is not in 0 … 1 (1 excluded). Common: 0.99 to 0.9999.")
        if every_steps < 1:
            raise ConfigError(f"average_weights.every_steps: {every_steps} is not a positive number of steps.")
        self.decay = decay
        self.every_steps = every_steps
        self.evaluate = evaluate
        self.averages: dict[str, torch.Tensor] = {}
        self.is_swapped = False

    def before_train(self) -> None:
        """Begins with a copy of the weights, unless a checkpoint brought averages."""
        own = self._parameters()
        for name, parameter in own.items():
            self.averages.setdefault(name, parameter.detach().clone())
        unknown = self.averages.keys() - own.keys()
        if unknown:
            raise CheckpointError(f"The averaged weights hold {', '.join(sorted(unknown))}, which the model lacks.")
        self.averages = {name: self.averages[name].to(parameter.device) for name, parameter in own.items()}

    @torch.no_grad()
    def after_step(self) -> None:
        """Moves the averages towards the weights."""
        if self.trainer.step % self.every_steps == 0:
            weights: list[torch.Tensor] = list(self._parameters().values())
            torch._foreach_lerp_(list(self.averages.values()), weights, 1.0 - self.decay)

    def before_eval(self) -> None:
        """Puts the averages into the model."""
        if self.evaluate and self.averages:
            self.swap()

    def after_eval(self, logs: Mapping[str, Any]) -> None:
        """Puts the weights back."""
        if self.is_swapped:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges weights and averages, one parameter at a time: costs the memory of the largest one."""
        for name, parameter in self._parameters().items():
            average = self.averages[name]
            held = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(held)
        self.is_swapped = not self.is_swapped

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages."""
        return {"averages": self.averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the averages back."""
        self.averages = dict(state["averages"])

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        named = self.trainer.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.is_floating_point()}
