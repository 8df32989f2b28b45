"""torch's AdamW, fused where supported, with a `step()` that returns metrics, and with moments in other precisions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.backends import has_fused_optimizers, waits_for_memory
from trainwright.backends.private_torch import has_triton
from trainwright.errors import ConfigError
from trainwright.models.layers.settings import keywords_of
from trainwright.optim.device_step import (
    CHUNK_ELEMENTS,
    STOCHASTIC,
    check_masters,
    copy_reported,
    count_step,
    device_of,
    fit_loaded_state,
    in_chunks,
    masters_of,
    read_entries,
    repair,
    report_update,
    restore_dtypes,
    round_masters,
    run_closure,
    tensors_of,
    updated_parameters,
)
from trainwright.optim.eight_bit import (
    FIRST,
    MIN_ELEMENTS,
    MIN_ROW,
    SECOND,
    StepNumbers,
    decode_state,
    encode_state,
    has_codes,
    is_quantized,
    place_scales,
    step_numbers,
    step_quantized,
    zero_codes,
)
from trainwright.optim.rounding import positions_in, round_to_bf16, salt_of
from trainwright.optim.sharded import has_shards, local_gradients, local_shards
from trainwright.parallel.mesh import local, own_gradient

OWN_DEFAULTS: Mapping[str, Any] = {
    "state": None,
    "state_dtype": None,
    "master_weights": False,
    "repair_nan": False,
    "report": False,
}
"""The settings that torch's AdamW does not have."""
WHOLE_SETTINGS = ("state", "state_dtype", "master_weights")
"""The settings of the whole optimizer, which a group cannot change."""
MIN_KERNEL_ELEMENTS = 2**20
"""Smaller parameters are stepped together by torch's kernel, because one kernel launch for each would take more host
time."""
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# torch wraps a class's step() in profiling and hooks when its first object is created. Calling super().step() would
# run a user's step hooks twice in a process that also has a plain torch AdamW, so we call the unwrapped function.
_update_parameters = inspect.unwrap(torch.optim.Adam.step)


class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay: torch's algorithm and defaults, but fused where possible.

    `fused=None` selects one kernel for all parameters if all are floating point on a device that has the kernel (CPU,
    CUDA), and otherwise torch's default. The fused kernel is the fastest, and the only one that can skip an update with
    infinite gradients without a synchronization. `True` and `False` are passed to torch.

    `state_dtype`, `fp32` or `bf16`, is the dtype of both moments; None means the parameter's dtype. bf16 with fp32
    weights saves 4 bytes per parameter. Without a Triton kernel (adamw_kernels.py), it takes more time.
    `state: 8bit` keeps both moments in 8 bits with a scale for each 256 elements: 2 bytes per parameter instead of 8
    (eight_bit.py). Parameters with one dim or fewer than 4,096 elements keep fp32 moments.
    `master_weights` keeps an fp32 master of every 16-bit weight, and moments in fp32 unless `state` or `state_dtype` is
    set: 12 bytes of state per weight, in addition to 2 of the weight and 2 of its gradient. `stochastic` keeps no
    masters: it rounds bf16 weights stochastically, so updates that are too small for bf16 are not lost on average.
    `repair_nan` makes gradients finite before they are measured, and returns `nan_gradients`, the number of values that
    were not finite. `report` returns `update_norm`, at the cost of one more copy of the weights and two passes over it.
    """

    divides_gradients = True
    """The fused kernel divides gradients by `grad_scale` while it reads them."""
    stages: Any = None
    """The process group of the other pipeline stages, over which metrics are summed; None without a pipeline."""

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
        state: str | None = None,
        state_dtype: str | None = None,
        master_weights: bool | str = False,
        repair_nan: bool = False,
        report: bool = False,
    ) -> None:
        settings = keywords_of(locals())
        entries = read_entries(settings.pop("params"), owner="AdamW")
        if fused is None and all(has_fused_kernel(tensor) for tensor in tensors_of(entries)):
            fused = True
        own = {name: settings.pop(name) for name in OWN_DEFAULTS}
        for name in WHOLE_SETTINGS:
            if own[name] and amsgrad:
                # Stochastic rounding would increase the maximum in every step.
                raise ConfigError(f"{name} and amsgrad are both set. Keep one of them.")
            if own[name] and fused is not True:
                raise ConfigError(f"{name} needs torch's fused AdamW, but the device lacks it or fused is False.")
        _check_dtypes(list(tensors_of(entries)), state, state_dtype, master_weights)
        settings |= {"betas": (betas[0], betas[1]), "fused": fused}  # YAML has only lists
        super().__init__(entries, **settings)
        self.defaults |= own
        self._repaired: Tensor | None = None
        self._is_loaded = False
        self._read_groups()

    def repair_gradients(self) -> None:
        """Makes the gradients of groups with `repair_nan` finite now; the next `step()` returns the count.

        The loop calls it before it measures and clips, because a single nan would make the norm, and then every
        gradient, nan. Without this call, `step()` does it. The count of a skipped step is discarded.
        """
        if self._repairs:
            groups = [group for group in self.param_groups if group["repair_nan"]]
            parameters = [parameter for group in groups for parameter in updated_parameters(group)]
            with torch.no_grad():
                self._repaired = repair(parameters, stages=self.stages, device=device_of(self))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        """Updates the parameters in place and returns the requested metrics.

        A closure runs as in torch, but its result is discarded, because the loop already has the loss.
        """
        if closure is not None:
            run_closure(closure)
        if self._repairs and self._repaired is None:
            self.repair_gradients()
        copies = copy_reported(self) if self._reports else None
        if self._is_loaded:
            self._fit_loaded_state()
        if self._moment_dtype is None:
            _update_parameters(self, None)
        else:
            for group in self.param_groups:
                step_group(self, group, self._moment_dtype)
        metrics = {} if self._repaired is None else {"nan_gradients": self._repaired}
        self._repaired = None
        return metrics if copies is None else {**metrics, **report_update(self, copies)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state_dict()`, each tensor in the dtype that it was saved in."""
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                place_scales(self.state.get(parameter, {}), parameter)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._repaired, self._is_loaded = None, True
        self._read_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch; the precision of moments and masters is the same for all groups."""
        for key in WHOLE_SETTINGS:
            if key in param_group:
                raise ConfigError(
                    f"{key} is {param_group[key]!r} in one group. Set it for the whole optimizer: one kernel steps all "
                    "groups."
                )
        super().add_param_group(param_group)
        if "report" in self.defaults:  # not in the base constructor, which runs before the additional defaults are set
            self._read_groups()

    def _init_group(self, group: dict[str, Any], parameters: list[Tensor], *lists: list[Tensor]) -> bool:
        """Fills torch's lists with the tensors to step; for sharded parameters, this rank's shards."""
        has_complex: bool = super()._init_group(group, parameters, *lists)  # type: ignore[no-untyped-call]
        if self.is_sharded:
            gradients, *states = lists
            gradients[:] = local_gradients(parameters)
            for tensors in (parameters, *states):
                tensors[:] = local_shards(tensors)
        return has_complex

    def _fit_loaded_state(self) -> None:
        """Adapts loaded state to this run's settings, which may differ from those of the run that saved it."""
        to_codes = self.param_groups[0]["state"] == "8bit"
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter, {})
                if has_codes(state) and not to_codes:
                    decode_state(state)
                elif FIRST in state and not has_codes(state) and to_codes and is_quantized(parameter):
                    encode_state(state, parameter)
        fit_loaded_state(self, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), dtype=self._moment_dtype)
        self._is_loaded = False

    def _read_groups(self) -> None:
        """Reads the settings of the groups that do not change between steps."""
        for group in self.param_groups:
            for key, default in OWN_DEFAULTS.items():
                group.setdefault(key, self.defaults.get(key, default))
        self._repairs = any(group["repair_nan"] for group in self.param_groups)
        self._reports = any(group["report"] for group in self.param_groups)
        self.is_sharded = has_shards(self.param_groups)
        state, name, masters = (self.param_groups[0][key] for key in WHOLE_SETTINGS)
        dtype = STATE_DTYPES[name or "fp32"] if state or name or masters else None
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        needs_cast = state or masters or any(parameter.dtype != dtype for parameter in parameters)
        self._moment_dtype = dtype if needs_cast else None  # None if torch's own step is used


def has_fused_kernel(parameter: Tensor) -> bool:
    """Returns True if torch has a fused optimizer step for this parameter."""
    return parameter.is_floating_point() and has_fused_optimizers(parameter.device)


def _check_dtypes(
    tensors: list[Tensor], state: str | None, state_dtype: str | None, master_weights: bool | str
) -> None:
    check_masters(tensors, master_weights)
    if state not in (None, "8bit"):
        raise ConfigError(f'state is {state!r}. Use "8bit", or remove it.')
    if state is not None and state_dtype is not None:
        raise ConfigError(
            f"state is {state} and state_dtype is {state_dtype}, but both define the precision of the moments. Keep "
            "one of them."
        )
    if state is not None and tensors and not any(map(is_quantized, tensors)):
        raise ConfigError(
            f"state: 8bit has no effect: no parameter has two dims, {MIN_ELEMENTS:,} elements and rows of {MIN_ROW}. "
            "Remove it."
        )
    if state_dtype not in (None, *STATE_DTYPES):
        raise ConfigError(f'state_dtype is {state_dtype!r}. Use "fp32" or "bf16", or remove it.')
    odd = {tensor.dtype for tensor in tensors} - {torch.float32, torch.bfloat16, torch.float16}
    if (state or state_dtype) is not None and odd:
        name = "state_dtype" if state is None else "state"
        raise ConfigError(f"{name} supports parameters in fp32, bf16 and fp16, but one is {odd.pop()}.")


class _Chunk(NamedTuple):
    """A parameter or a range of a large one with its state; all have one shape, except the step."""

    parameter: Tensor
    weight: Tensor
    """The tensor to step: the parameter itself, or its master."""
    gradient: Tensor
    first: Tensor
    second: Tensor
    step: Tensor
    whole: Tensor
    """The parameter that contains the range."""
    start: int
    """The first element of that range."""


def step_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Runs one AdamW step of the group with moments kept in `dtype`, or in 8 bits; the arithmetic is in fp32.

    With the group's `master_weights`, parameters in 16 bits are rounded from fp32 masters (device_step.py), or
    stochastically (rounding.py).
    """
    parameters = updated_parameters(group)
    if not parameters:
        return
    has_8bit = group.get("state") == "8bit"
    steps = count_step(optimizer, parameters)
    for parameter in parameters:
        state = optimizer.state[parameter]
        if FIRST not in state:
            if has_8bit and is_quantized(parameter):
                state.update(zero_codes(parameter))
            else:
                state[FIRST] = torch.zeros_like(parameter, dtype=dtype)
                state[SECOND] = torch.zeros_like(parameter, dtype=dtype)
    found_inf, grad_scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    is_stochastic = group["master_weights"] == STOCHASTIC
    weights = masters_of(optimizer, parameters) if group["master_weights"] is True else parameters
    pairs = list(zip(parameters, weights, strict=True))
    single = [pair for pair in pairs if has_codes(state := optimizer.state[pair[0]]) or _has_kernel(*pair, state)]
    if single:
        steps_of = [optimizer.state[parameter]["step"] for parameter, _ in single]
        numbers = step_numbers(steps_of, group, grad_scale, found_inf)
        for row, (parameter, weight) in enumerate(single):
            state = optimizer.state[parameter]
            step_one = step_quantized if has_codes(state) else _step_by_kernel
            step_one(parameter, weight, state, numbers, row, is_stochastic=is_stochastic)
        done = {id(parameter) for parameter, _ in single}
        pairs = [pair for pair in pairs if id(pair[0]) not in done]
    if not pairs:
        return
    chunks = [chunk for parameter, weight in pairs for chunk in _split(parameter, weight, optimizer.state[parameter])]
    if is_stochastic:  # only bf16 weights are rounded, so they need a separate buffer
        chunks.sort(key=lambda chunk: chunk.weight.dtype == torch.bfloat16)
    num_wide = sum(chunk.weight.dtype != torch.bfloat16 for chunk in chunks) if is_stochastic else 0
    salt = salt_of(steps[0])
    for alike in (chunks[:num_wide], chunks[num_wide:]):
        for some in in_chunks([chunk.parameter for chunk in alike]):
            _step_chunks(alike[some], group, salt, grad_scale, found_inf)


def _has_kernel(parameter: Any, weight: Any, state: Mapping[str, Tensor]) -> bool:
    """Returns True if a separate kernel steps this parameter. The size is that of the full tensor."""
    return (
        parameter.numel() >= MIN_KERNEL_ELEMENTS
        and waits_for_memory(parameter.device)
        and has_triton()
        and all(local(each).is_contiguous() for each in (parameter, weight, state[FIRST], state[SECOND]))
    )


def _step_by_kernel(
    parameter: Any, weight: Any, state: Mapping[str, Tensor], numbers: StepNumbers, row: int, *, is_stochastic: bool
) -> None:
    """Runs the step of a parameter in one kernel; `weight` is the parameter or its master."""
    if not local(parameter).numel():
        return  # this rank has no rows
    from trainwright.optim import adamw_kernels  # needs Triton

    gradient, moments = own_gradient(parameter), [local(state[key]) for key in (FIRST, SECOND)]
    assert gradient is not None  # parameters without a gradient are skipped
    master = None if weight is parameter else local(weight)
    adamw_kernels.step_by_kernel(local(parameter), master, gradient, moments, numbers, row, is_stochastic=is_stochastic)


def _split(parameter: Any, weight: Any, state: Mapping[str, Tensor]) -> Iterator[_Chunk]:
    gradient, step = own_gradient(parameter), state["step"]
    assert gradient is not None  # parameters without a gradient are skipped
    own = local(parameter)
    stepped = own if weight is parameter else local(weight)
    tensors = (own, stepped, gradient, local(state[FIRST]), local(state[SECOND]))
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield _Chunk(*tensors, step, own, 0)
        return
    for start in range(0, own.numel(), CHUNK_ELEMENTS):
        flat = [tensor.view(-1)[start : start + CHUNK_ELEMENTS] for tensor in tensors]
        yield _Chunk(flat[0], flat[0] if stepped is own else flat[1], flat[2], flat[3], flat[4], step, own, start)


def _step_chunks(
    chunks: Sequence[_Chunk],
    group: Mapping[str, Any],
    salt: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    parameters, weights, gradients, firsts, seconds, steps = (
        list(column) for column in list(zip(*chunks, strict=True))[:6]
    )
    wide = [_widen(column) for column in (weights, gradients, firsts, seconds)]
    torch._fused_adamw_(  # type: ignore[call-overload]  # torch's annotation lacks an lr on the device
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
    (new_weights, buffer), _, *moments = wide
    if buffer is not None:
        if group["master_weights"] == STOCHASTIC and weights[0].dtype == torch.bfloat16:
            ranges = [(each.whole, each.start, each.start + each.weight.numel()) for each in chunks]
            round_to_bf16(buffer, salt, torch.cat([positions_in(*each) for each in ranges]))
        torch._foreach_copy_(weights, new_weights)
    round_masters(parameters, weights)
    for kept, (new, buffer) in zip((firsts, seconds), moments, strict=True):
        if buffer is not None:
            if kept[0].dtype == torch.bfloat16:
                round_to_bf16(buffer, salt)
            torch._foreach_copy_(kept, new)


def _widen(tensors: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """Returns the tensors in fp32: the same tensors and None, or views of one new buffer and the buffer."""
    if all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors):
        return tensors, None
    sizes = [tensor.numel() for tensor in tensors]
    buffer = torch.empty(sum(sizes), dtype=torch.float32, device=tensors[0].device)
    views = [view.view(tensor.shape) for view, tensor in zip(buffer.split(sizes), tensors, strict=True)]  # type: ignore[no-untyped-call]
    torch._foreach_copy_(views, tensors)
    return views, buffer
