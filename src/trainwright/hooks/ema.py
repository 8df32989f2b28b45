"""Keeps an exponential moving average of the weights, with which the loop evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainwright.errors import CheckpointError, ConfigError
from trainwright.loop.hook import Hook
from trainwright.optim.param_groups import whole_of
from trainwright.optim.sharded import local_shards, shard_like


class EMA(Hook):
    """Averages every trained floating-point parameter: average = decay × average + (1 − decay) × weight.

    The average starts as a copy of the weights, so it needs no bias correction. It is saved in checkpoints; with
    `evaluate: false`, evaluations do not use it. Each rank averages its own shards of sharded parameters. A frozen
    parameter is its own average; a parameter that becomes trainable is averaged from then on.
    """

    copies_of_weights = 1

    def __init__(self, decay: float = 0.999, every_steps: int = 1, evaluate: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"ema.decay: {decay} is not in [0, 1). Common values: 0.99 to 0.9999.")
        if every_steps < 1:
            raise ConfigError(f"ema.every_steps: {every_steps} is not a positive number of steps.")
        self.decay = decay
        self.every_steps = every_steps
        self.evaluates_averaged = evaluate
        self.averages: dict[str, torch.Tensor] = {}

    def before_train(self) -> None:
        """Starts with a copy of the weights, unless a checkpoint has averages."""
        own = self._averaged_parameters()
        unknown = self.averages.keys() - own.keys()
        if unknown:
            raise CheckpointError(f"The averaged weights have {', '.join(sorted(unknown))}, but the model does not.")
        self.averages = {name: _sharded_like(parameter, self.averages[name]) for name, parameter in own.items()}

    @torch.no_grad()
    def after_step(self) -> None:
        """Moves the averages towards the weights."""
        if self.trainer.step % self.every_steps == 0:
            parameters = self._averaged_parameters()
            averages = local_shards(self.averages[name] for name in parameters)
            own = local_shards(parameters.values())
            weights = [parameter.to(average.dtype) for parameter, average in zip(own, averages, strict=True)]
            torch._foreach_lerp_(averages, weights, 1.0 - self.decay)

    def averaged_weights(self) -> Mapping[str, torch.Tensor]:
        """Returns the averages."""
        return self.averages

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages."""
        return {"averages": self.averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the averages, at the start or in a rollback."""
        own, saved = self._parameters(), state["averages"]
        whole = whole_of(self.trainer.model)
        elsewhere = {} if whole is None else whole.parameters  # other stages of a pipeline restore theirs
        self.averages = {name: _sharded_like(own[name], saved[name]) for name in own if name in saved}
        self.averages |= {name: average for name, average in saved.items() if name not in own and name not in elsewhere}

    def _averaged_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns the averaged parameters: those that are or were trainable; adds missing averages."""
        named = self._parameters()
        own = {name: each for name, each in named.items() if each.requires_grad or name in self.averages}
        for name, parameter in own.items():
            if name not in self.averages:
                # At least fp32: bf16 would round a step of 1 − decay to nothing.
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                self.averages[name] = parameter.detach().to(dtype, copy=True)
        return own

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        named = self.trainer.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.is_floating_point()}


def _sharded_like(parameter: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    return shard_like(average, parameter).to(parameter.device)
