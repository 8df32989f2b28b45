"""What optimizer steps share so that the host never waits for the device: skipping, repair, reports, capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.backends import has_capturable_optimizers, reads_at_once
from trainwright.optim.sharded import own_gradients, split_state, sum_over_ranks
from trainwright.parallel.mesh import local

CHUNK_ELEMENTS = 2**25
"""How many elements are worked on at once where a step needs room beside the state: 128 MiB in fp32."""


def entries_of(params: Iterable[Any], *, owner: str) -> list[Any]:
    """Returns the parameters or groups as lists: they are read here and again by torch, and may be generators."""
    if isinstance(params, Tensor):
        raise TypeError(f"{owner} got one tensor. Give an iterable of tensors, such as model.parameters().")
    return [
        {**entry, "params": list(entry["params"])}
        if isinstance(entry, dict) and isinstance(entry["params"], Iterator)
        else entry
        for entry in params
    ]


def tensors_of(entries: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors in what torch's optimizers take: tensors, (name, tensor) pairs, or groups of either."""
    for entry in entries:
        if isinstance(entry, dict):
            members = entry["params"]
            yield from [members] if isinstance(members, Tensor) else tensors_of(members)
        else:
            yield entry[1] if isinstance(entry, tuple) else entry


def run_closure(closure: Callable[[], Any] | None) -> None:
    """Runs a closure as torch's optimizers do; what it returns is dropped, for the loop has the loss already."""
    if closure is not None:
        with torch.enable_grad():
            closure()


def updated_parameters(group: Mapping[str, Any]) -> list[Tensor]:
    """Returns the group's parameters that have a gradient; the others are left alone, state and all."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def device_of(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """Returns where an optimizer's numbers lie. One that owns nothing on this stage was told (whole_model.py)."""
    first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    told: torch.device | None = getattr(optimizer, "device_of_stage", None)
    return told if first is None else first.device


def settle_gradients(
    optimizer: torch.optim.Optimizer, gradients: list[Tensor], averages: Sequence[Tensor]
) -> Tensor | None:
    """Unscales the gradients in place as torch's protocol asks; returns the 0-dim bool that says: skip, or None.

    Where the update is skipped the gradients become the averages that they would move, which then stay bit for bit as
    they were: an update that might be skipped does the same arithmetic as one that is not. The rate is `unless`'s.
    """
    grad_scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if grad_scale is not None:
        torch._foreach_div_(gradients, grad_scale)
    if found_inf is None:
        return None
    skip: Tensor = found_inf.reshape(()) != 0
    for gradient, average in zip(gradients, averages, strict=True):
        torch.where(skip, average, gradient, out=gradient)
    return skip


def unless(skip: Tensor | None, value: float | Tensor, otherwise: float) -> float | Tensor:
    """Returns `value`, or on the device `otherwise` where the update is skipped."""
    return value if skip is None else torch.where(skip, otherwise, value)


def in_chunks(tensors: Sequence[Tensor], most: int = CHUNK_ELEMENTS) -> Iterator[slice]:
    """Yields slices of the list that hold at most `most` elements each, or one tensor that is larger."""
    start = held = 0
    for number, tensor in enumerate(tensors):
        if held and held + tensor.numel() > most:
            yield slice(start, number)
            start, held = number, 0
        held += tensor.numel()
    if start < len(tensors):
        yield slice(start, len(tensors))


def repair(parameters: Sequence[Tensor], *, stages: Any = None, device: torch.device | None = None) -> Tensor:
    """Replaces gradients' values that are not finite by 0, in place; returns how many there were, on the device.

    A value whose square overflows counts too, for it would make Adam's second moment infinite for good. Of split
    parameters the parts of all ranks are counted (see parts.py).
    """
    counts = []
    for gradient in own_gradients(parameters):
        limits = torch.finfo(gradient.dtype)
        # In fp16 every value above 256 has an infinite square: only infinities are errors there.
        most = limits.max if gradient.dtype == torch.float16 else limits.max**0.5
        is_bad = ~(gradient.abs() <= most)  # also true of nan
        counts.append(is_bad.sum())
        gradient.masked_fill_(is_bad, 0.0)
    return sum_over_ranks(parameters, counts, stages=stages, device=device)


def copy_reported(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, Tensor]] | None:
    """Returns the parameters of groups with `report`, each with a copy: one more copy of them in memory.

    None where no group asks. A stage of a pipeline may have nothing to report, and adds it to what the others have.
    """
    groups = [group for group in optimizer.param_groups if group.get("report")]
    if not groups:
        return None
    parameters = [parameter for group in groups for parameter in updated_parameters(group)]
    return [(parameter, local(parameter).detach().clone()) for parameter in parameters]


def report_update(
    copied: list[tuple[Tensor, Tensor]] | None, *, stages: Any = None, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Returns `update_norm`, the 2-norm of what the step changed; nothing where no group asked for it."""
    if copied is None or (not copied and stages is None):
        return {}
    parameters, copies = [parameter for parameter, _ in copied], [copy for _, copy in copied]
    squares: list[Tensor] = []
    if copied:
        torch._foreach_sub_(copies, [local(parameter) for parameter in parameters])
        squares = [norm.to(torch.float32).square() for norm in torch._foreach_norm(copies)]
    return {"update_norm": sum_over_ranks(parameters, squares, stages=stages, device=device).sqrt()}


def settle_loaded(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Gives loaded state its own dtype back, which torch casts to the parameter's, and the parameter's layout."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            loaded = optimizer.state[parameter][key]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)
    split_state(optimizer)


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
