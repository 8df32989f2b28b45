"""Optimizers that can be recorded with the rest of a step and replayed: what changes between steps is in tensors.

A number in a recorded step stays the number that it was, so the learning rate becomes a tensor, which the loop fills
anew before every replay. What is saved are plain numbers, so that the mode can change from one run to the next.
Who records and replays is loop/recorded_step.py.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from trainwright.backends import has_capturable_optimizers, reads_at_once

_KNOWN_ROOMS = ("torch.optim.", "trainwright.optim.")


def prepare_for_capture(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Makes an optimizer's step one that can be recorded; returns False, and changes nothing, where it cannot be.

    Every group's `lr` becomes a 0-dim tensor of its own, `capturable` is set where torch's class knows the word, and
    `step` counters move to the device. It stays so over `load_state_dict`. State is still made in the first step, and
    momentum of torch's SGD in its first with a gradient: only a step after those is like the ones that follow.
    """
    if getattr(optimizer, "captured_rates", None) is not None:
        return True
    if not can_be_captured(optimizer, device):
        return False
    told: Any = optimizer
    # A kernel on the host reads the rate as the double that a plain number is, one on a device as a float.
    dtype = torch.float64 if reads_at_once(device) else torch.float32
    told.captured_rates = [
        torch.tensor(float(group["lr"]), dtype=dtype, device=device) for group in optimizer.param_groups
    ]
    told.was_capturable = [group.get("capturable") for group in optimizer.param_groups]
    _settle(optimizer, device)
    optimizer.register_state_dict_post_hook(_save_plain_numbers)
    optimizer.register_load_state_dict_post_hook(lambda loaded: _settle(loaded, device))
    return True


def can_be_captured(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Does the step read its rate on the device and nothing else on the host?

    The fused steps of torch and all of ours do, and torch's `capturable` ones where the device has graphs. Of other
    optimizers those whose groups say `capturable` are believed.
    """
    knows_capturable = has_capturable_optimizers(device)
    is_known = f"{type(optimizer).step.__module__}.".startswith(_KNOWN_ROOMS)
    for group in optimizer.param_groups:
        if any(parameter.device != device for parameter in group["params"]) or group.get("differentiable"):
            return False
        says_capturable = knows_capturable and bool(group.get("capturable"))
        # torch's loops over single tensors read the rate on the host, capturable or not.
        may_say = knows_capturable and "capturable" in group and group.get("foreach") is not False
        if not (group.get("fused") or may_say if is_known else says_capturable):
            return False
    return True


def set_rate(group: MutableMapping[str, Any], value: float) -> None:
    """Writes the learning rate of the next update into a group, be it a plain number there or a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def settle_rates(optimizer: torch.optim.Optimizer) -> None:
    """Takes a rate that somebody has put in the place of a group's tensor into that tensor, which a replay reads."""
    told: Any = optimizer
    for group, rate in zip(optimizer.param_groups, told.captured_rates, strict=True):
        if group["lr"] is not rate:
            rate.fill_(group["lr"])
            group["lr"] = rate


def _settle(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Puts the tensors in the place of numbers; of loaded ones too, for a recording knows the tensors by place."""
    settle_rates(optimizer)
    knows_capturable = has_capturable_optimizers(device)
    for group in optimizer.param_groups:
        if knows_capturable and "capturable" in group:
            group["capturable"] = True
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, Tensor):
                optimizer.state[parameter]["step"] = step.to(device)


def _save_plain_numbers(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Writes the groups as a run that records nothing would have: the packed groups are copies."""
    told: Any = optimizer
    for group, was_capturable in zip(state_dict["param_groups"], told.was_capturable, strict=True):
        group["lr"] = float(group["lr"])
        if was_capturable is not None:
            group["capturable"] = was_capturable
