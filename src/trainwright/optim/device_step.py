"""Shared parts of optimizer steps that never synchronize with the device.

Skipped updates, repair and reports, masters in fp32 for weights in 16 bits, loaded state, capture in a CUDA graph.
rounding.py rounds bf16 weights without masters stochastically.

    gradients (bf16) → fp32 → step of the masters → rounded to the weights (bf16)

A weight in bf16 has 8 significant bits: an update below a 256th of it is lost, and most are. The master keeps all of
them. It belongs to the optimizer's state and is created from the weight in the first step. A weight that is modified
between steps is overwritten by its master in the next step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import optimizer as _torch_optimizer

from trainwright.backends import has_capturable_optimizers, reads_at_once
from trainwright.backends.private_torch import version_of
from trainwright.errors import ConfigError
from trainwright.optim.rounding import positions_in, round_to_bf16, salt_of
from trainwright.optim.sharded import has_shards, local_gradients, local_shards, shard_like, sum_over_ranks
from trainwright.parallel.mesh import is_split, local

CHUNK_ELEMENTS = 2**25
"""The number of elements that are processed at once if a step needs additional memory: 128 MiB in fp32."""
NARROW = (torch.bfloat16, torch.float16)
MASTER = "master"
"""The key of a parameter's master in its state."""
STOCHASTIC = "stochastic"
"""The value of `master_weights` that rounds bf16 weights stochastically instead of keeping masters."""


class ListOptimizer(torch.optim.Optimizer):
    """An optimizer that steps lists of tensors: masters, shards, reports and loaded state are handled here.

    A subclass defines `step_group` and `averages`, and has the settings `master_weights` and `report`.
    """

    averages: ClassVar[tuple[str, ...]] = ()
    """The keys of the state tensors that have the shape of their parameter."""
    stages: Any = None
    """The process group of the other pipeline stages, over which metrics are summed; None without a pipeline."""
    _step_supports_amp_scaling = True
    is_sharded = False
    _is_loaded = False

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        entries = read_entries(params, owner=type(self).__name__)
        check_masters(list(tensors_of(entries)), defaults["master_weights"])
        super().__init__(entries, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        """Updates the parameters in place and returns the requested metrics."""
        run_closure(closure)
        copies = copy_reported(self)
        if self._is_loaded:
            fit_loaded_state(self, self.averages)
            self._is_loaded = False
        for group in self.param_groups:
            self.step_group(updated_parameters(group), group)
        return report_update(self, copies)

    def step_group(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        """Steps the parameters of a group that have a gradient."""
        raise NotImplementedError(f"{type(self).__name__} must define step_group(parameters, group).")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch."""
        super().add_param_group(param_group)
        self.is_sharded = self.is_sharded or has_shards(self.param_groups[-1:])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state_dict()`, each tensor in the dtype that it was saved in."""
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.is_sharded, self._is_loaded = has_shards(self.param_groups), True

    def stepped_weights(self, parameters: Sequence[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
        """Returns the tensors to step: the parameters, their masters, or fp32 copies to round stochastically."""
        if group["master_weights"] == STOCHASTIC:
            return [each.detach().to(torch.float32) if each.dtype in NARROW else each for each in parameters]
        return masters_of(self, parameters) if group["master_weights"] else list(parameters)

    def round_weights(self, parameters: Sequence[Tensor], stepped: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        """Rounds the stepped tensors to the weights; a skipped step does not change the weights."""
        if not group["master_weights"]:
            return
        if group["master_weights"] == STOCHASTIC:
            salt = salt_of(count_step(self, parameters)[0])
            for parameter, weight in zip(parameters, stepped, strict=True):
                if weight is not parameter:
                    own = local(weight)
                    round_to_bf16(own, salt, positions_in(own).view(own.shape))
        round_masters(self.shards_of(list(parameters)), self.shards_of(list(stepped)))

    def gradients_of(self, parameters: Sequence[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
        """Returns the local gradients, in fp32 for a group with masters."""
        if self.is_sharded:
            gradients = local_gradients(parameters)
        else:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [gradient.to(torch.float32) for gradient in gradients] if group["master_weights"] else gradients

    def state_of(self, parameters: Sequence[Tensor], stepped: Sequence[Tensor], key: str) -> list[Tensor]:
        """Returns local state tensors, which are created as zeros like the stepped tensors."""
        for parameter, weight in zip(parameters, stepped, strict=True):
            if key not in self.state[parameter]:
                self.state[parameter][key] = torch.zeros_like(weight)
        return self.shards_of([self.state[parameter][key] for parameter in parameters])

    def shards_of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the local shards of the tensors."""
        return local_shards(tensors) if self.is_sharded else tensors


def read_entries(params: Iterable[Any], *, owner: str) -> list[Any]:
    """Returns the parameters or groups as lists, because they may be generators and torch iterates over them twice."""
    if isinstance(params, Tensor):
        raise TypeError(f"{owner} got a single tensor. Pass an iterable of tensors, such as model.parameters().")
    return [
        {**entry, "params": list(entry["params"])}
        if isinstance(entry, dict) and isinstance(entry["params"], Iterator)
        else entry
        for entry in params
    ]


def tensors_of(entries: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors of any argument that torch's optimizers accept: tensors, (name, tensor) pairs, or groups of
    either."""
    for entry in entries:
        if isinstance(entry, dict):
            members = entry["params"]
            yield from [members] if isinstance(members, Tensor) else tensors_of(members)
        else:
            yield entry[1] if isinstance(entry, tuple) else entry


def run_closure(closure: Callable[[], Any] | None) -> None:
    """Runs a closure as torch's optimizers do. Its result is discarded, because the loop already has the loss."""
    if closure is not None:
        with torch.enable_grad():
            closure()


def updated_parameters(group: Mapping[str, Any]) -> list[Tensor]:
    """Returns the group's parameters that have a gradient; the others and their state do not change."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def device_of(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """Returns the device of an optimizer's parameters; if it has none on this stage, the device of the stage."""
    first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    stage_device: torch.device | None = getattr(optimizer, "device_of_stage", None)
    return stage_device if first is None else first.device


def unscale_gradients(
    optimizer: torch.optim.Optimizer, gradients: list[Tensor], averages: Sequence[Tensor]
) -> Tensor | None:
    """Unscales the gradients in place by torch's `grad_scale`; returns a 0-dim bool, True to skip, or None.

    If the update is skipped, the gradients are replaced by the averages, which then do not change; otherwise the
    arithmetic is that of an update that cannot be skipped. `unless` does the same for the rate.
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
    """Returns `value`, or `otherwise` if the update is skipped, selected on the device."""
    return value if skip is None else torch.where(skip, otherwise, value)


def in_chunks(tensors: Sequence[Tensor], most: int = CHUNK_ELEMENTS) -> Iterator[slice]:
    """Yields slices of the list with at most `most` elements each, or a single larger tensor."""
    start = held = 0
    for number, tensor in enumerate(tensors):
        if held and held + tensor.numel() > most:
            yield slice(start, number)
            start, held = number, 0
        held += tensor.numel()
    if start < len(tensors):
        yield slice(start, len(tensors))


def repair(parameters: Sequence[Tensor], *, stages: Any = None, device: torch.device | None = None) -> Tensor:
    """Replaces non-finite values of gradients by 0, in place; returns their number over all ranks, on the device.

    A value whose square overflows counts too, because it would make Adam's second moment infinite for the rest of the
    run.
    """
    counts = []
    for gradient in local_gradients(parameters):
        limits = torch.finfo(gradient.dtype)
        # In fp16 every value above 256 has an infinite square, so only infinities count.
        most = limits.max if gradient.dtype == torch.float16 else limits.max**0.5
        is_bad = ~(gradient.abs() <= most)  # also true of nan
        counts.append(is_bad.sum())
        gradient.masked_fill_(is_bad, 0.0)
    return sum_over_ranks(parameters, counts, stages=stages, device=device)


def copy_reported(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor] | None:
    """Returns the parameters of groups with `report`, each with a copy; None if no group has it."""
    groups = [group for group in optimizer.param_groups if group.get("report")]
    parameters = [parameter for group in groups for parameter in updated_parameters(group)]
    return {parameter: local(parameter).detach().clone() for parameter in parameters} if groups else None


def report_update(optimizer: Any, copied: dict[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """Returns `update_norm`, the 2-norm of the changes by the step; empty if no group reports.

    A pipeline stage without a reported parameter still joins the sum over stages.
    """
    if copied is None or (not copied and optimizer.stages is None):
        return {}
    parameters, copies = list(copied), list(copied.values())
    squares: list[Tensor] = []
    if copied:
        torch._foreach_sub_(copies, local_shards(parameters))
        squares = [norm.to(torch.float32).square() for norm in torch._foreach_norm(copies)]
    total = sum_over_ranks(parameters, squares, stages=optimizer.stages, device=device_of(optimizer))
    return {"update_norm": total.sqrt()}


def count_step(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Adds 1 to the counter in each parameter's state, unless the step is skipped; returns the counters."""
    for parameter in parameters:
        if "step" not in optimizer.state[parameter]:
            optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    steps: list[Tensor] = [optimizer.state[parameter]["step"] for parameter in parameters]
    torch._foreach_add_(steps, 1.0)
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf.reshape(())] * len(steps))  # a list: the host would read a single tensor
    return steps


def check_masters(tensors: Iterable[Tensor], master_weights: bool | str) -> None:
    """Rejects masters or stochastic rounding that would have no effect, and weights that do not support them."""
    if not isinstance(master_weights, bool) and master_weights != STOCHASTIC:
        raise ConfigError(f"master_weights is {master_weights!r}. Use true, false or stochastic.")
    if master_weights is False:
        return
    narrow = {torch.bfloat16} if master_weights == STOCHASTIC else {*NARROW}
    dtypes = {tensor.dtype for tensor in tensors}
    odd = dtypes - narrow - {torch.float32}
    if odd:
        names = "bf16 and fp32" if master_weights == STOCHASTIC else "bf16, fp16 and fp32"
        raise ConfigError(f"master_weights supports parameters in {names}, but one is {odd.pop()}.")
    if not dtypes & narrow:
        value = f": {STOCHASTIC}" if master_weights == STOCHASTIC else ""
        raise ConfigError(
            f"master_weights{value} has no effect: no trained weight has 16 bits. Use bf16 weights (model.dtype or "
            "model.pretrained.dtype), or remove master_weights. Adapters of model.lora are always in fp32."
        )


def masters_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensor to step for each parameter: its master, which is created if missing, or an fp32 parameter
    itself."""
    stepped = []
    for parameter in parameters:
        if parameter.dtype in NARROW:
            state = optimizer.state[parameter]
            if MASTER not in state:
                state[MASTER] = parameter.detach().to(torch.float32)
            parameter = state[MASTER]
        stepped.append(parameter)
    return stepped


def round_masters(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Rounds masters to their weights; a skipped step does not change the weights."""
    pairs = [(weight, master) for weight, master in zip(parameters, masters, strict=True) if weight is not master]
    if pairs:
        torch._foreach_copy_([weight for weight, _ in pairs], [master for _, master in pairs])


def restore_dtypes(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Restores the dtypes of loaded state, which torch casts to the parameter's, and shards it like the parameter."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        for key, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor) and state[key].dtype != value.dtype:
                state[key] = value.to(state[key].device)
            if is_split(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape:
                state[key] = shard_like(state[key], parameter)


def fit_loaded_state(
    optimizer: torch.optim.Optimizer, averages: Iterable[str], *, dtype: torch.dtype | None = None
) -> None:
    """Adapts loaded state to this run's settings, which may differ from those of the run that saved it.

    Masters that are no longer used are deleted, because a later run would load them over newer weights. Averages get
    `dtype`, or the dtype of the stepped tensor if that is None.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            is_wide = bool(group["master_weights"]) and parameter.dtype in NARROW
            if group["master_weights"] is not True or not is_wide:
                state.pop(MASTER, None)
            wanted = dtype or (torch.float32 if is_wide else parameter.dtype)
            for key in averages:
                if key in state and state[key].is_floating_point():  # codes of 8-bit moments are integers
                    state[key] = state[key].to(wanted)


_KNOWN_PACKAGES = ("torch.optim.", "trainwright.optim.")


def prepare_for_capture(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Prepares an optimizer for capture; returns False, without changes, if its step cannot be captured.

    Every group's `lr` becomes a 0-dim tensor, `capturable` is set if torch's class supports it, and `step` counters
    move to the device. This persists across `load_state_dict`. State is still created in the first step, and the
    momentum of torch's SGD in the first step with a gradient; only the steps after these are equal.
    """
    if getattr(optimizer, "captured_rates", None) is not None:
        return True
    if not can_be_captured(optimizer, device):
        return False
    prepared: Any = optimizer
    # A host kernel reads the rate in double precision, like a plain number; a device kernel reads it in single
    # precision.
    dtype = torch.float64 if reads_at_once(device) else torch.float32
    prepared.captured_rates = [
        torch.tensor(float(group["lr"]), dtype=dtype, device=device) for group in optimizer.param_groups
    ]
    prepared.was_capturable = [group.get("capturable") for group in optimizer.param_groups]
    _settle(optimizer, device)
    optimizer.register_state_dict_post_hook(_save_plain_numbers)
    optimizer.register_load_state_dict_post_hook(lambda loaded: _settle(loaded, device))
    return True


def follow_groups(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Prepares groups that were added to an optimizer after `prepare_for_capture`; others are not changed."""
    prepared: Any = optimizer
    rates = getattr(optimizer, "captured_rates", None)
    if rates is None:
        return
    for group in optimizer.param_groups[len(rates) :]:
        rates.append(torch.tensor(float(group["lr"]), dtype=rates[0].dtype, device=device))
        prepared.was_capturable.append(group.get("capturable"))
    del rates[len(optimizer.param_groups) :], prepared.was_capturable[len(optimizer.param_groups) :]
    _settle(optimizer, device)


def can_be_captured(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Returns True if the step reads its rate on the device and reads nothing on the host.

    The fused steps of torch and all of ours do, and torch's `capturable` ones if the device supports graphs. Other
    optimizers do so only if their groups set `capturable`.
    """
    has_capturable = has_capturable_optimizers(device)
    is_known = f"{type(optimizer).step.__module__}.".startswith(_KNOWN_PACKAGES)
    for group in optimizer.param_groups:
        if any(parameter.device != device for parameter in group["params"]) or group.get("differentiable"):
            return False
        sets_capturable = has_capturable and bool(group.get("capturable"))
        # torch's loops over single tensors read the rate on the host, capturable or not.
        can_set_capturable = has_capturable and "capturable" in group and group.get("foreach") is not False
        if not (group.get("fused") or can_set_capturable if is_known else sets_capturable):
            return False
    return True


def set_learning_rate(group: MutableMapping[str, Any], value: float) -> None:
    """Writes the learning rate of the next update into a group, which has a plain number or a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def rate_stamp(rate: Any) -> Any:
    """Returns a value that changes when a rate is written; for a tensor its version, which is known on the host."""
    return (id(rate), version_of(rate)) if isinstance(rate, Tensor) else rate


def sync_captured_rates(optimizer: torch.optim.Optimizer) -> None:
    """If a rate has replaced a group's tensor, copies it into the tensor that a replay reads."""
    prepared: Any = optimizer
    for group, rate in zip(optimizer.param_groups, prepared.captured_rates, strict=True):
        if group["lr"] is not rate:
            rate.fill_(group["lr"])
            group["lr"] = rate


def _settle(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Replaces rates that are numbers, including loaded ones, with the tensors that a captured step refers to."""
    sync_captured_rates(optimizer)
    has_capturable = has_capturable_optimizers(device)
    for group in optimizer.param_groups:
        if has_capturable and "capturable" in group:
            group["capturable"] = True
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, Tensor):
                optimizer.state[parameter]["step"] = step.to(device)


def _save_plain_numbers(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Saves the groups as in a run without capture; the packed groups are copies."""
    prepared: Any = optimizer
    for group, was_capturable in zip(state_dict["param_groups"], prepared.was_capturable, strict=True):
        group["lr"] = float(group["lr"])
        if was_capturable is not None:
            group["capturable"] = was_capturable


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if hooks, or a `step` set on the object, run Python code in the optimizer's step."""
    return bool(
        "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _torch_optimizer._global_optimizer_pre_hooks
        or _torch_optimizer._global_optimizer_post_hooks
    )


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the optimizer can skip a step on the device via `found_inf`."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def divides_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the fused kernel can divide gradients by `grad_scale`, which saves a pass over them.

    Only for the classes themselves, because a subclass or a hook may read the gradients before the step.
    """
    own = vars(type(optimizer)).get("divides_gradients", type(optimizer) in (torch.optim.AdamW, torch.optim.Adam))
    return bool(own) and supports_found_inf(optimizer) and not has_step_hooks(optimizer)


def requires_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True for an optimizer whose step recomputes the loss, such as LBFGS.

    Its `step` has a parameter `closure` without a default, or its class sets `needs_closure`.
    """
    if hasattr(optimizer, "needs_closure"):
        return bool(optimizer.needs_closure)
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is parameter.empty


def steps_only_whole(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the reason why an optimizer cannot step its parameters in several calls of `step()`, with advice; None if
    it can.

    The other optimizers of torch and this package can. A custom class declares `steps_in_parts = True` if the step of a
    parameter uses only its own gradient and state.
    """
    name = type(optimizer).__name__
    if requires_closure(optimizer):
        return f"{name} computes the loss again. Use another optimizer"
    for setting in ("report", "repair_nan"):
        if any(group.get(setting) for group in optimizer.param_groups):
            return f"{setting} is a value of all gradients of an update. Remove {setting}"
    is_known = f"{type(optimizer).step.__module__}.".startswith(_KNOWN_PACKAGES)
    if is_known or getattr(optimizer, "steps_in_parts", False):
        return None
    return (
        f"{name} gets several calls of step() in an update, each with some of the gradients, which it may not support. "
        "Set its class attribute steps_in_parts = True if it does, use adamw"
    )


def has_eval_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True for an optimizer with `train` and `eval`, whose weights differ between training and evaluation.

    The optimizers of the package schedulefree are examples.
    """
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@torch.no_grad()
def eval_weights(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns the parameters of an optimizer with `eval`, each with a copy of its weights in evaluations.

    The parameters do not change; calling `eval` and then `train` would round them.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    found = [parameter.detach().clone() for parameter in parameters]
    optimizer.train()
    for parameter, value in zip(parameters, trained, strict=True):
        local(parameter).copy_(local(value))
    return list(zip(parameters, found, strict=True))


def step_unless(
    optimizer: torch.optim.Optimizer,
    skip: Tensor | bool,
    *,
    grad_scale: Tensor | None = None,
    closure: Callable[[], Any] | None = None,
) -> Any:
    """Steps the optimizer, or leaves weights and state unchanged if `skip`; returns the result of its step.

    `skip` is a 0-dim bool on the device, or a plain bool if the host knows it. `grad_scale` is the divisor that the
    step applies to the gradients (see `divides_gradients`). `closure` is for optimizers that require one.
    """
    if closure is not None:
        return None if bool(skip) else optimizer.step(closure)
    amp: Any = optimizer  # torch's protocol: `grad_scale` and `found_inf` are attributes
    if grad_scale is not None:
        amp.grad_scale = grad_scale
    try:
        if skip is False:
            return optimizer.step()
        if supports_found_inf(optimizer) and not _lacks_momentum(optimizer):
            known = torch.as_tensor(skip, device=device_of(optimizer))
            amp.found_inf = known.to(torch.float32)
            try:
                return optimizer.step()
            finally:
                del amp.found_inf
        # One synchronization per update, only for optimizers that cannot skip on the device.
        return None if bool(skip) else optimizer.step()
    finally:
        if grad_scale is not None:
            del amp.grad_scale


def _lacks_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if a skipped step of torch's fused SGD would leave uninitialized momentum: in its first step."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        stepped = (parameter for parameter in group["params"] if parameter.grad is not None)
        first = next(stepped, None) if group["momentum"] else None
        if first is not None and optimizer.state.get(first, {}).get("momentum_buffer") is None:
            return True
    return False
