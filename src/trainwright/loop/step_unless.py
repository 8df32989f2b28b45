"""Steps an optimizer unless something says no: an overflow in fp16 (loss_scale.py), an incident (incidents.py).

The answer may lie on the device, where optimizers that know torch's `found_inf` look at it themselves. Only one that
does not makes the host wait, once per update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer as _torch_optimizer

from trainwright.optim.adamw import AdamW
from trainwright.optim.device_step import device_of

_DIVIDERS = (AdamW, torch.optim.AdamW, torch.optim.Adam)
"""Optimizers whose fused kernel divides gradients while it reads them. A subclass may look at them before."""


def step_unless(
    optimizer: torch.optim.Optimizer, hold: torch.Tensor | bool, *, grad_scale: torch.Tensor | None = None
) -> Any:
    """Steps the optimizer, or leaves weights and state as they are where `hold`; returns what its step returned.

    `hold` is a 0-dim bool on the device, or a plain one where the host knows already. `grad_scale` is what the
    gradients are still to be divided by (see `divides_gradients`).
    """
    if grad_scale is not None:
        optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]  # torch's own protocol
        try:
            return step_unless(optimizer, hold)
        finally:
            del optimizer.grad_scale  # type: ignore[attr-defined]
    if hold is False:
        return _step(optimizer)
    if knows_found_inf(optimizer) and not _lacks_momentum(optimizer):
        if isinstance(hold, torch.Tensor):
            found = hold.to(torch.float32)
        else:
            found = torch.ones((), device=device_of(optimizer))
        optimizer.found_inf = found  # type: ignore[attr-defined]  # torch's own protocol
        try:
            return _step(optimizer)
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    # One wait per update, only for optimizers that cannot skip on the device.
    is_held = hold.item() if isinstance(hold, torch.Tensor) else hold
    return None if is_held else _step(optimizer)


def _step(optimizer: torch.optim.Optimizer) -> Any:
    """Does what torch's own `step` does, without its profiling (30 µs) where nobody profiles or hooks into it."""
    step = type(optimizer).step
    if not getattr(step, "hooked", False) or is_watched(optimizer) or torch._C._autograd._profiler_enabled():
        return optimizer.step()
    return step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # what torch has wrapped


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Does somebody hook into this optimizer's step, or has it a step of its own?"""
    return bool(
        "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _torch_optimizer._global_optimizer_pre_hooks
        or _torch_optimizer._global_optimizer_post_hooks
    )


def divides_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Can this optimizer clip in its kernel, which saves a pass over the gradients, with nobody looking before?"""
    return type(optimizer) in _DIVIDERS and knows_found_inf(optimizer) and not is_watched(optimizer)


def knows_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Can this optimizer leave everything as it is by a word on the device, without the host knowing?"""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _lacks_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Would a skipped step of torch's fused SGD leave momentum that nobody has written? A group's first one would."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        stepped = (parameter for parameter in group["params"] if parameter.grad is not None)
        first = next(stepped, None) if group["momentum"] else None
        if first is not None and optimizer.state.get(first, {}).get("momentum_buffer") is None:
            return True
    return False
