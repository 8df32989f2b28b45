"""AdamW: torch's, fused wherever torch can, with a `step()` that returns metrics and moments in other precisions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.backends import has_fused_optimizers
from trainwright.errors import ConfigError
from trainwright.optim.device_step import (
    CHUNK_ELEMENTS,
    copy_reported,
    device_of,
    entries_of,
    in_chunks,
    repair,
    report_update,
    run_closure,
    settle_loaded,
    tensors_of,
    updated_parameters,
)
from trainwright.optim.master_weights import check_masters, masters_of, settle_masters, write_back
from trainwright.optim.sharded import has_parts, optimizes_parts, own_gradients, own_parts
from trainwright.parallel.mesh import local, own_gradient

_SPREAD = 0x9E3779B1 - 2**32  # 2³² over the golden ratio, as the signed 32-bit number that it is


class _ParameterState(NamedTuple):
    """A parameter or a stretch of a large one, with what belongs to it; all of one shape but the step."""

    parameter: Tensor
    weight: Tensor
    """What is stepped: the parameter itself, or its master."""
    gradient: Tensor
    first: Tensor
    second: Tensor
    step: Tensor


def step_group(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype, *, has_masters: bool = False
) -> None:
    """Does one AdamW step of the group with moments kept in `dtype`; the arithmetic is in fp32.

    With `has_masters` parameters in 16 bits are rounded from masters in fp32 (master_weights.py).
    """
    parameters = updated_parameters(group)
    if not parameters:
        return
    weights = masters_of(optimizer, parameters) if has_masters else parameters
    for parameter in parameters:
        state = optimizer.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
    found_inf = getattr(optimizer, "found_inf", None)
    steps = [optimizer.state[parameter]["step"] for parameter in parameters]
    torch._foreach_add_(steps, 1.0)
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf.reshape(())] * len(steps))  # a list: one tensor would be read by the host
    parts = [
        part
        for parameter, weight in zip(parameters, weights, strict=True)
        for part in _parts_of(parameter, weight, optimizer.state[parameter])
    ]
    salt = salt_of(steps[0])
    for chunk in in_chunks([part.parameter for part in parts]):
        _step_chunk(parts[chunk], group, salt, getattr(optimizer, "grad_scale", None), found_inf)


def _parts_of(parameter: Any, weight: Any, state: Mapping[str, Tensor]) -> Iterator[_ParameterState]:
    gradient, step = own_gradient(parameter), state["step"]
    assert gradient is not None  # parameters without are left out
    own = local(parameter)
    stepped = own if weight is parameter else local(weight)
    whole = _ParameterState(own, stepped, gradient, local(state["exp_avg"]), local(state["exp_avg_sq"]), step)
    if not all(tensor.is_contiguous() for tensor in whole):
        yield whole
        return
    for start in range(0, own.numel(), CHUNK_ELEMENTS):
        stretch = slice(start, start + CHUNK_ELEMENTS)
        flat = [tensor.view(-1)[stretch] for tensor in whole[:5]]
        yield _ParameterState(flat[0], flat[0] if stepped is own else flat[1], flat[2], flat[3], flat[4], step)


def _step_chunk(
    parts: Sequence[_ParameterState],
    group: Mapping[str, Any],
    salt: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    columns = [list(column) for column in zip(*parts, strict=True)]
    parameters, weights, gradients, firsts, seconds, steps = columns
    wide = [_widen(column) for column in (weights, gradients, firsts, seconds)]
    torch._fused_adamw_(  # type: ignore[call-overload]  # torch's annotation knows no lr on the device
        *(tensors for tensors, _ in wide),
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        grad_scale=grad_scale,
        found_inf=found_inf,
    )
    (new_weights, room), _, *moments = wide
    if room is not None:
        torch._foreach_copy_(weights, new_weights)
    write_back(parameters, weights)
    for kept, (new, room) in zip((firsts, seconds), moments, strict=True):
        if room is not None:
            if kept[0].dtype == torch.bfloat16:
                round_to_bf16(room, salt)
            torch._foreach_copy_(kept, new)


def _widen(tensors: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """Returns the tensors in fp32: themselves, or views of one stretch of memory that is returned beside them."""
    if all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors):
        return tensors, None
    sizes = [tensor.numel() for tensor in tensors]
    room = torch.empty(sum(sizes), dtype=torch.float32, device=tensors[0].device)
    views = [view.view(tensor.shape) for view, tensor in zip(room.split(sizes), tensors, strict=True)]  # type: ignore[no-untyped-call]
    torch._foreach_copy_(views, tensors)
    return views, room


def salt_of(step: Tensor) -> Tensor:
    """Returns 32 bits for a step, as if drawn by chance: a counter alone would make the roundings of a value that
    stands still follow each other too evenly, and a moment would decay too slowly.
    """
    word = step.to(torch.int64) * 0x9E3779B1 & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = ((word ^ (word >> shift)) * factor) & 0xFFFFFFFF
    word = word ^ (word >> 16)
    return (word - 2**31).to(torch.int32)


def round_to_bf16(values: Tensor, salt: Tensor) -> None:
    """Rounds fp32 values in place to ones that bf16 holds, up with the probability that makes the mean right.

    What bf16 holds already stays as it is, so that a skipped update changes nothing. The largest nan becomes −0,
    which hides nothing: the weight was computed before and is nan.
    """
    bits = values.view(torch.int32)
    noise = torch.add(salt, bits, alpha=_SPREAD)
    noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    bits.add_(noise).bitwise_and_(-0x10000)


# torch wraps a class's step() in profiling and hooks when its first object is made. Calling super().step() would run
# a user's step hooks twice in a process that also made a plain torch AdamW, so we call the function inside the wraps.
_update_parameters = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay: torch's algorithm and torch's defaults, but fused where possible.

    `fused=None` means: one kernel for all parameters if every one is floating point on a device that has the kernel
    (CPU, CUDA), else torch's own choice. The fused kernel is the fastest, and the only one that can skip an update
    with infinite gradients without the host waiting for the device. `True` and `False` are passed on to torch.

    `state_dtype`, `fp32` or `bf16`, is what both moments are kept in; None means the parameter's own dtype. bf16
    beside fp32 weights saves 4 bytes a parameter and costs time (see rounded_moments.py).
    `master_weights` keeps an fp32 master of every weight in 16 bits, and moments in fp32 unless `state_dtype` says
    otherwise: 12 bytes of state a weight, beside 2 of the weight and 2 of its gradient.
    `repair_nan` makes gradients finite before anything else sees them, and returns `nan_gradients`, how many values
    were not. `report` returns `update_norm`, for one more copy of the weights and two passes over it.
    """

    stages: Any = None
    """The process group of the ranks with other layers, whose metrics are summed with these; None: there are none."""
    _has_parts = False

    divides_gradients = True
    """The fused kernel divides gradients by `grad_scale`; see device_step.py."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
        state_dtype: str | None = None,
        master_weights: bool = False,
        repair_nan: bool = False,
        report: bool = False,
    ) -> None:
        entries = entries_of(params, owner="AdamW")
        if fused is None and all(has_fused_kernel(tensor) for tensor in tensors_of(entries)):
            fused = True
        if state_dtype is not None:
            _check_state_dtype(state_dtype, entries, fused=fused, amsgrad=amsgrad)
        if master_weights:
            _check_master_weights(entries, fused=fused, amsgrad=amsgrad)
        super().__init__(
            entries,
            lr=lr,
            betas=(betas[0], betas[1]),  # YAML knows only lists
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            capturable=capturable,
            fused=fused,
        )
        self.defaults |= {
            "state_dtype": state_dtype,
            "master_weights": master_weights,
            "repair_nan": repair_nan,
            "report": report,
        }
        self._complete_groups()
        self._repaired: Tensor | None = None
        self._is_loaded = False

    def repair_gradients(self) -> None:
        """Makes the gradients finite now, where `repair_nan` asks for it; the next `step()` returns the count.

        The loop calls it before it measures and clips, for one nan in the norm would make every gradient nan.
        Without that call `step()` does it. The count of a step that was held back is dropped.
        """
        groups = [group for group in self.param_groups if group["repair_nan"]]
        if groups:
            with torch.no_grad():
                parameters = [parameter for group in groups for parameter in updated_parameters(group)]
                self._repaired = repair(parameters, stages=self.stages, device=device_of(self))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        """Updates the parameters in place and returns the metrics that were asked for.

        A closure is run as in torch, but what it returns is dropped: the loop has the loss already.
        """
        run_closure(closure)
        if self._repaired is None:
            self.repair_gradients()
        copied = copy_reported(self)
        dtype, has_masters = self._mixed_dtype(), self.param_groups[0]["master_weights"]
        if self._is_loaded:
            settle_masters(self, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), dtype=dtype)
            self._is_loaded = False
        if dtype is None:
            _update_parameters(self, None)
        else:
            for group in self.param_groups:
                step_group(self, group, dtype, has_masters=has_masters)
        metrics = {} if self._repaired is None else {"nan_gradients": self._repaired}
        self._repaired = None
        return {**metrics, **report_update(copied, stages=self.stages, device=device_of(self))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state_dict()`, each tensor in the dtype that it was saved in."""
        super().load_state_dict(state_dict)
        settle_loaded(self, state_dict)
        self._is_loaded = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._complete_groups()
        self._repaired, self._is_loaded = None, True
        self._has_parts = optimizes_parts(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as in torch; the precision of moments and masters is one for all groups."""
        for key in ("state_dtype", "master_weights"):
            if key in param_group:
                raise ConfigError(
                    f"{key} is {param_group[key]!r} in one group. Set it for the whole optimizer: one kernel steps all "
                    "groups."
                )
        super().add_param_group(param_group)
        self._has_parts = self._has_parts or has_parts(self.param_groups[-1]["params"])

    def _init_group(self, group: dict[str, Any], parameters: list[Tensor], *lists: list[Tensor]) -> bool:
        """Fills torch's lists with what is stepped; of split parameters with this rank's parts."""
        has_complex: bool = super()._init_group(group, parameters, *lists)  # type: ignore[no-untyped-call]
        if self._has_parts:
            gradients, *states = lists
            gradients[:] = own_gradients(parameters)
            for tensors in (parameters, *states):
                tensors[:] = own_parts(tensors)
        return has_complex

    def _complete_groups(self) -> None:
        for group in self.param_groups:
            group.setdefault("state_dtype", self.defaults.get("state_dtype"))
            for key in ("master_weights", "repair_nan", "report"):
                group.setdefault(key, self.defaults.get(key, False))

    def _mixed_dtype(self) -> torch.dtype | None:
        """Returns the moments' dtype where some parameter has another, else None: torch's own step will do."""
        name, has_masters = self.param_groups[0]["state_dtype"], self.param_groups[0]["master_weights"]
        if has_masters:
            return STATE_DTYPES[name or "fp32"]
        dtype = STATE_DTYPES[name] if name is not None else None
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return dtype if dtype is not None and any(parameter.dtype != dtype for parameter in parameters) else None


def has_fused_kernel(parameter: Tensor) -> bool:
    """Has torch a fused optimizer step for this parameter?"""
    return parameter.is_floating_point() and has_fused_optimizers(parameter.device)


def _check_master_weights(entries: list[Any], *, fused: bool | None, amsgrad: bool) -> None:
    check_masters(tensors_of(entries))
    if amsgrad:
        raise ConfigError("master_weights and amsgrad are both set. Keep one of them.")
    if fused is not True:
        raise ConfigError("master_weights needs torch's fused AdamW, which this device lacks or fused=False rejects.")


def _check_state_dtype(state_dtype: str, entries: list[Any], *, fused: bool | None, amsgrad: bool) -> None:
    if state_dtype not in list(STATE_DTYPES):  # a list: what has no hash is rejected too
        raise ConfigError(f'state_dtype is {state_dtype!r}. Use "fp32" or "bf16", or leave it out.')
    if amsgrad:
        # Rounding by chance would drive the maximum up, step after step.
        raise ConfigError("state_dtype and amsgrad are both set. Keep one of them.")
    if fused is not True:
        raise ConfigError("state_dtype needs torch's fused AdamW, which this device lacks or fused=False rejects.")
    for tensor in tensors_of(entries):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"state_dtype is for parameters in fp32, bf16 or fp16, but one is {tensor.dtype}.")
