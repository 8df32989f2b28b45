"""Steps an optimizer unless something says no: an overflow in fp16 (loss_scale.py), an incident (incidents.py).

The answer may lie on the device, where optimizers that know torch's `found_inf` look at it themselves. Only one that
does not makes the host wait, once per update.
"""

from __future__ import annotations

from typing import Any

import torch

from trainwright.optim.device_step import device_of


def step_unless(optimizer: torch.optim.Optimizer, hold: torch.Tensor | bool) -> Any:
    """Steps the optimizer, or leaves weights and state as they are where `hold`; returns what its step returned.

    `hold` is a 0-dim bool on the device, or a plain one where the host knows already.
    """
    if hold is False:
        return optimizer.step()
    if knows_found_inf(optimizer) and not _lacks_momentum(optimizer):
        if isinstance(hold, torch.Tensor):
            found = hold.to(torch.float32)
        else:
            found = torch.ones((), device=device_of(optimizer))
        optimizer.found_inf = found  # type: ignore[attr-defined]  # torch's own protocol
        try:
            return optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    # One wait per update, only for optimizers that cannot skip on the device.
    is_held = hold.item() if isinstance(hold, torch.Tensor) else hold
    return None if is_held else optimizer.step()


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
