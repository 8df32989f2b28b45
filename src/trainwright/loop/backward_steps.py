"""`trainer.optimizer_in_backward`: steps parameters during the backward pass and frees their gradients.

The gradient of a layer is complete before those of earlier layers exist, so not all gradients are in memory at once.
Complete gradients are collected up to PENDING_BYTES and stepped together, because a call of `step()` for each small one
would be slow. build/run.py rejects settings that need all gradients before a weight changes, such as clipping by their
norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trainwright.errors import TrainwrightError
from trainwright.optim.device_step import step_unless
from trainwright.parallel.replicate import norms_of

PENDING_BYTES = 2**28
"""Complete gradients are stepped once they have this many bytes."""


class BackwardSteps:
    """Steps the parameters of optimizers from hooks on their gradients, within `during_backward`."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], before_step: Callable[[str], None]) -> None:
        """`before_step` is called with the name of an optimizer before it steps, and may raise."""
        self._optimizers = dict(optimizers)
        self._before_step = before_step
        self._owners: dict[int, str] = {}
        """The names of the optimizers whose parameters have a hook, by the id of the parameter."""
        self._hooks: list[tuple[torch.nn.Parameter, Any]] = []
        self._is_active = False
        self._skip: torch.Tensor | bool = False
        self._pending: dict[str, list[torch.nn.Parameter]] = {}
        self._pending_bytes = 0
        self._stepped: set[int] = set()
        self._norms: list[torch.Tensor] = []

    @contextmanager
    def during_backward(self, skip: torch.Tensor | bool) -> Iterator[None]:
        """A context for the single backward of an update; with `skip` the steps change nothing."""
        self._follow_parameters()
        self._is_active, self._skip = True, skip
        self._stepped.clear()
        self._norms.clear()
        try:
            yield
            self._step_pending()
        finally:
            self._is_active, self._pending, self._pending_bytes = False, {}, 0

    def grad_norm(self) -> torch.Tensor | None:
        """Returns the norm of all gradients of the last backward; None if there were none."""
        return torch.linalg.vector_norm(torch.stack(self._norms)) if self._norms else None

    def _follow_parameters(self) -> None:
        """Registers hooks on parameters that were added to an optimizer."""
        for name, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in self._owners and parameter.requires_grad:
                        self._owners[id(parameter)] = name
                        self._hooks.append((parameter, parameter.register_post_accumulate_grad_hook(self._take)))

    def _take(self, parameter: torch.nn.Parameter) -> None:
        """Called with each parameter whose gradient is complete."""
        gradient = parameter.grad
        if not self._is_active or gradient is None:
            return  # a backward in user code, outside of the update
        if id(parameter) in self._stepped:
            raise TrainwrightError(
                f"trainer.optimizer_in_backward: a parameter of shape {tuple(parameter.shape)} received a second "
                "gradient in one backward, after it was stepped with the first. Reentrant checkpointing "
                "(use_reentrant=True) does this. Use model.activation_checkpointing, or remove optimizer_in_backward."
            )
        if gradient.is_sparse:
            raise TrainwrightError(
                "A parameter has a sparse gradient, which is not supported. Use Embedding(sparse=False)."
            )
        self._stepped.add(id(parameter))
        self._pending.setdefault(self._owners[id(parameter)], []).append(parameter)
        self._pending_bytes += gradient.numel() * gradient.element_size()
        if self._pending_bytes >= PENDING_BYTES:
            self._step_pending()

    @torch.no_grad()
    def _step_pending(self) -> None:
        """Steps the parameters whose gradients are complete, and frees the gradients."""
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        for name, parameters in pending.items():
            gradients = [each.grad for each in parameters if each.grad is not None]
            self._norms += [norm.to(torch.float32) for norm in norms_of(gradients)]
            self._before_step(name)
            step_unless(self._optimizers[name], self._skip)  # only these parameters have a gradient
            for parameter in parameters:
                parameter.grad = None
