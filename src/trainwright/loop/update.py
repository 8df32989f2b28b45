"""One update: backward over micro-batches, then one exact gradient, clipped and stepped.

The loss of an update is Σtotal / Σcount over micro-batches and data ranks, and its gradient is exactly that. This file
has the package's only tensor `.backward(`; `Trainer.train_step` calls it. The loss scale for fp16, and optimizers that
skip a step on the device, are here as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import optimizer as _torch_optimizer

from trainwright.anomaly.detection import AnomalyWatch
from trainwright.backends import reads_at_once, waits_for_memory
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.events import Mean
from trainwright.loop.outputs import ForwardResult, Loss, read_pair
from trainwright.optim.adamw import AdamW
from trainwright.optim.device_step import device_of, set_learning_rate
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import local
from trainwright.parallel.replicate import GradientNorm, GradientSum, copy_from_first

if TYPE_CHECKING:
    from trainwright.parallel.fully_shard import GradientSync
    from trainwright.parallel.pipeline import Pipeline

logger = logging.getLogger(__name__)


class LossScale:
    """A scale that halves when gradients overflow and doubles after `growth_interval` updates without."""

    def __init__(self, device: torch.device, *, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self._good_updates = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_interval = growth_interval

    def follow(self, overflowed: torch.Tensor) -> None:
        """Adjusts the scale after an update; `overflowed` is a 0-dim bool on the device."""
        self._good_updates.add_(1).mul_(~overflowed)
        grown = self._good_updates == self._growth_interval
        # Not below 2^-14: a scale that has run down to 0 in a bad stretch would never come back.
        self.scale.mul_(torch.where(overflowed, 0.5, torch.where(grown, 2.0, 1.0))).clamp_(min=2.0**-14)
        self._good_updates.mul_(~grown)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the scale and how long it has held."""
        return {"scale": self.scale, "good_updates": self._good_updates}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores `state_dict` in place."""
        self.scale.copy_(state["scale"])
        self._good_updates.copy_(state["good_updates"])


BufferSlot = tuple[torch.nn.Module, str]
"""Where a buffer lies: a forward may put another tensor there."""


def persistent_buffers(model: torch.nn.Module) -> list[BufferSlot]:
    """Returns the places of the buffers that belong to the model's state; tables that are computed anew do not."""
    found = {
        id(buffer): (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    return list(found.values())


class HeldBuffers:
    """A copy of buffers at a step's beginning, taken in one kernel for each dtype."""

    def __init__(self, slots: Sequence[BufferSlot]) -> None:
        self._slots = list(slots)
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def remember(self) -> None:
        """Copies the buffers as they are now."""
        now = [read_buffer(slot) for slot in self._slots]
        # The same memory in every step, which a recorded step has to find again.
        if [_kind(each) for each in self._copies] != [_kind(each) for each in now]:
            self._copies = [torch.empty_like(each) for each in now]
        pairs: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for copy, buffer in zip(self._copies, now, strict=True):
            copies, buffers = pairs.setdefault(buffer.dtype, ([], []))
            copies.append(copy)
            buffers.append(buffer)
        for copies, buffers in pairs.values():
            torch._foreach_copy_(copies, buffers)

    @torch.no_grad()
    def put_back(self, hold: torch.Tensor | bool) -> None:
        """Gives the buffers what was remembered where `hold`, which may be known to the device alone."""
        if hold is False:
            return
        for slot, copy in zip(self._slots, self._copies, strict=True):
            buffer = read_buffer(slot)
            buffer.copy_(torch.where(hold, copy, buffer) if isinstance(hold, torch.Tensor) else copy)


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def read_buffer(slot: BufferSlot) -> torch.Tensor:
    """Returns the tensor that lies there now, or this rank's part of it."""
    module, name = slot
    buffer = module._buffers[name]
    assert buffer is not None
    return local(buffer)


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


class StepResult(NamedTuple):
    """What one update gives. `loss` and `grad_norm` stay on the device; reading them waits for it."""

    loss: torch.Tensor
    metrics: dict[str, Any]
    grad_norm: torch.Tensor
    lr: float


@dataclass(slots=True)
class ScheduledOptimizer:
    """An optimizer with the schedule of its learning rate, a pure function of the step."""

    optimizer: torch.optim.Optimizer
    schedule: Callable[[int, int], float]
    base_rates: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def clear_gradients(self) -> None:
        """Does what torch's own `zero_grad` does, without its profiling (40 µs); an optimizer's own is called."""
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            self.optimizer.zero_grad(set_to_none=True)
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def rate(self, step: int, max_steps: int) -> float:
        """The first group's learning rate in the update that follows `step` updates."""
        return self.base_rates[0] * self.schedule(step, max_steps)

    def set_rate(self, step: int, max_steps: int) -> float:
        """Writes the learning rate of the update that follows `step` updates; returns the first group's."""
        factor = self.schedule(step, max_steps)
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            set_learning_rate(group, base * factor)
        return self.base_rates[0] * factor


class Updater:
    """What updates share over a run: the optimizers, the clipping, the loss scale and the gradient sum."""

    def __init__(
        self,
        optimizers: Mapping[str, ScheduledOptimizer],
        *,
        global_batch_size: int,
        max_steps: int,
        ranks: Ranks,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        loss_scale: LossScale | None = None,
        watch: AnomalyWatch | None = None,
        buffers: Sequence[BufferSlot] = (),
        sync: GradientSync | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.optimizers = dict(optimizers)
        self.global_batch_size = global_batch_size
        self.max_steps = max_steps
        self.ranks = ranks
        self.max_grad_norm = max_grad_norm
        self.max_grad_value = max_grad_value
        self.loss_scale = loss_scale
        self.watch = watch
        self.sync = sync
        """How FSDP sums the gradients while they are made; None where every rank has the whole model."""
        self.pipeline = pipeline
        """Who runs the micro-batches where each rank has some of the layers; None where each has all."""
        self.step = 0
        """The number of the update under way, from 1 on."""
        self.is_judged = False
        """Has this step's loss been judged? A step may have several updates."""
        self.rates: dict[str, float] = {}
        self.after_replay: set[str] = set()
        """The optimizers that cannot be recorded: in graph mode they step after each replay."""
        self.is_recording = False
        self._postponed: list[tuple[str, torch.Tensor | bool]] = []
        self.enter_phase: Callable[[str], None] | None = None
        """Told when the ranks begin and end to talk to each other; the trainer sets it."""
        self._groups: dict[tuple[str, ...], _OwnedParameters] = {}
        self._buffers = list(buffers)
        self.held_buffers: HeldBuffers | None = None
        if watch is not None and watch.gates:
            self.held_buffers = HeldBuffers(buffers) if buffers else None
            self._announce_waits()

    def _announce_waits(self) -> None:
        """Says which optimizers cannot hold an update back by themselves, so that the host waits in every step."""
        for name, entry in self.optimizers.items():
            device = device_of(entry.optimizer) or torch.device("cpu")
            if not reads_at_once(device) and not knows_found_inf(entry.optimizer):
                logger.info(
                    "anomalies: the optimizer %s (%s) cannot hold an update back on the device, so the host waits for "
                    "it in every step. Fused optimizers can, and need no waiting.",
                    name,
                    type(entry.optimizer).__name__,
                )

    def set_rates(self, step: int) -> None:
        """Begins a step: writes the learning rates of the update that follows `step` updates into the optimizers."""
        if self.held_buffers is not None:
            self.held_buffers.remember()
        self.step, self.is_judged = step + 1, False
        self.rates = {name: entry.set_rate(step, self.max_steps) for name, entry in self.optimizers.items()}

    def share_buffers(self) -> None:
        """Gives every rank the first rank's buffers, so that a run that goes on from a checkpoint has the same."""
        if self.ranks.size > 1 and self._buffers:
            copy_from_first([read_buffer(slot) for slot in self._buffers], self.ranks)

    def begin(self, count_samples: Callable[[], int], *, num_backwards: int | None = None) -> Update:
        """Begins an update with cleared gradients; `count_samples` tells what a bare loss weighs when it comes.

        `num_backwards` is how often `backward` will be called, where that is known: ranks can then begin to talk
        while the last one still runs.
        """
        if self._postponed:
            raise ConfigError(
                f"runtime.mode: graph cannot record a step that goes on after the optimizer {self._postponed[0][0]}, "
                "which cannot be recorded, has stepped. Use a fused or capturable optimizer, or mode compile."
            )
        for entry in self.optimizers.values():
            entry.clear_gradients()
        return Update(self, self.rates, count_samples, num_backwards)

    def divides_gradients(self, names: Sequence[str]) -> bool:
        """Do all of these optimizers clip in their own kernels, and does that pay on this device?"""
        optimizers = [self.optimizers[name].optimizer for name in names if name not in self.after_replay]
        return len(optimizers) == len(names) and all(
            waits_for_memory(device_of(each) or torch.device("cpu")) and divides_gradients(each) for each in optimizers
        )

    def step_optimizer(
        self, name: str, hold: torch.Tensor | bool, grad_scale: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Steps an optimizer unless `hold`, and returns its metrics; while recording perhaps only when it is over."""
        if self.is_recording and name in self.after_replay:
            self._postponed.append((name, hold))
            return {}
        return self.step_now(name, hold, grad_scale)

    def step_now(self, name: str, hold: torch.Tensor | bool, grad_scale: torch.Tensor | None = None) -> dict[str, Any]:
        """Steps an optimizer unless `hold`; returns its metrics under the names that they have in the log."""
        returned = step_unless(self.optimizers[name].optimizer, hold, grad_scale=grad_scale)
        returned = returned if isinstance(returned, Mapping) else {}
        is_only = len(self.optimizers) == 1
        return dict(returned) if is_only else {f"{key}/{name}": value for key, value in returned.items()}

    def take_postponed(self) -> list[tuple[str, torch.Tensor | bool]]:
        """Returns which optimizers a recorded step leaves to be stepped, and whether they are."""
        postponed, self._postponed = self._postponed, []
        return postponed

    def owned_by(self, names: tuple[str, ...]) -> _OwnedParameters:
        """Returns the parameters of the named optimizers."""
        owned = self._groups.get(names)
        if owned is None:
            for name in names:
                if name not in self.optimizers:
                    raise ConfigError(f"apply: no optimizer {name!r}. Known: {', '.join(self.optimizers)}.")
            owned = self._groups[names] = _OwnedParameters(
                [
                    parameter
                    for name in names
                    for group in self.optimizers[name].optimizer.param_groups
                    for parameter in group["params"]
                ],
                self.ranks,
                sums_gradients=self.sync is None,
                num_stages={id(each): 2 for each, _ in self.pipeline.tied} if self.pipeline is not None else {},
                enter=self.enter_phase,
            )
        return owned


class _OwnedParameters:
    """The parameters that one `apply` steps, and the sum of their gradients over ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        ranks: Ranks,
        *,
        sums_gradients: bool,
        num_stages: Mapping[int, int],
        enter: Callable[[str], None] | None,
    ) -> None:
        self.parameters = list(parameters)
        self.gradient_sum = GradientSum(self.parameters, ranks, sums_gradients=sums_gradients, enter=enter)
        is_split = ranks.mesh.is_split
        self.norm = GradientNorm(self.parameters, ranks.mesh, num_stages=num_stages) if is_split else None

    def gradients(self) -> list[torch.Tensor]:
        """What of the gradients lies on this rank."""
        if self.norm is None:
            return [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return self.norm.gradients()


class Update:
    """One update under way: any number of `backward`, then one `apply`."""

    def __init__(
        self,
        updater: Updater,
        rates: dict[str, float],
        count_samples: Callable[[], int],
        num_backwards: int | None = None,
    ) -> None:
        self._updater = updater
        self._backwards_left = num_backwards
        self._rates = rates
        self._count_samples = count_samples
        self._losses: list[tuple[Loss, int]] = []
        self._metrics: dict[str, list[tuple[Any, int]]] = {}
        self._own_is_finite: torch.Tensor | bool = True
        self.weight: torch.Tensor | float = 0.0
        """After `apply`: what the loss weighs, Σcount over micro-batches and ranks."""

    def backward(self, result: ForwardResult | Loss | tuple[Loss, Mapping[str, Any]]) -> None:
        """Adds a micro-batch: propagates its share of the loss and keeps its metrics.

        A plain loss, alone or as (loss, metrics), is weighed by the samples of its micro-batch. What is propagated is
        total / global_batch_size, which keeps fp16 in range whatever the counts are.
        """
        if isinstance(result, tuple):
            result = read_pair(result, self._count_samples())
        elif not isinstance(result, ForwardResult):
            result = ForwardResult(result, self._count_samples())
        scaled = self.scale(result)
        if scaled is not None:
            self.begin_backward()
            scaled.backward()  # type: ignore[no-untyped-call]

    def scale(self, result: ForwardResult) -> torch.Tensor | None:
        """Notes a micro-batch's loss and metrics; returns what is to be propagated, None if nothing is."""
        loss, num_samples = result.loss, result.num_samples
        if num_samples == 0:
            self._losses.append((Mean(0.0, 0.0), 0))
            # Not even multiplied by 0, for a NaN would stay one. The forward has run, which is all that ranks share,
            # unless they also share parameters or layers: then they meet in the backward too.
            if self._updater.sync is None and self._updater.pipeline is None:
                return None
            value = loss.total if isinstance(loss, Mean) else loss
            return value * 0.0 if isinstance(value, torch.Tensor) else None
        # Ranks along context all propagate this loss, and their gradients are added up.
        batch_size = self._updater.global_batch_size * self._updater.ranks.mesh.num_gradient_copies
        if isinstance(loss, Mean):
            scaled = loss.total / batch_size
        else:
            share = num_samples / batch_size
            scaled = loss if share == 1.0 else loss * share
        if not isinstance(scaled, torch.Tensor) or not scaled.requires_grad:
            raise TrainwrightError(
                "The loss has no gradient: nothing that it was computed from requires one. "
                "Check for .detach(), torch.no_grad() or .item() on its way, and that some parameter is not frozen."
            )
        if self._updater.loss_scale is not None:
            scaled = scaled * self._updater.loss_scale.scale
        self._losses.append((loss.detach(), num_samples))
        for name, value in result.metrics.items():
            self._metrics.setdefault(name, []).append((value, num_samples))
        return scaled

    def note_elsewhere(self) -> None:
        """Says that all backwards have run, of losses that other ranks may have seen."""
        self._backwards_left = None
        if not self._losses:
            self._losses.append((Mean(0.0, 0.0), 0))

    def begin_backward(self) -> None:
        """Tells those who sum gradients over ranks whether this backward is the update's last, if that is known."""
        if self._updater.ranks.size == 1:
            return
        is_last = True
        if self._backwards_left is not None:
            if self._backwards_left == 0:
                raise TrainwrightError("backward was called more often than the update was told, and ranks have met.")
            self._backwards_left -= 1
            is_last = self._backwards_left == 0
            if is_last:
                self._updater.owned_by(tuple(self._updater.optimizers)).gradient_sum.begin_last_backward()
        if self._updater.sync is not None:
            self._updater.sync.begin_backward(is_last=is_last)

    def apply(self, optimizers: Sequence[str] | None = None) -> StepResult:
        """Makes the gradient exact, measures and clips it, and steps the optimizers (all, or those named).

        On a GPU fused optimizers may clip while they read the gradients: what `.grad` holds afterwards is not promised.
        """
        updater = self._updater
        if not self._losses:
            raise TrainwrightError("apply was called without a backward: there is no gradient to step with.")
        names = tuple(updater.optimizers) if optimizers is None else tuple(optimizers)
        owned = updater.owned_by(names)
        loss, factor = self._reduce(owned)
        gradients = owned.gradients()
        if any(gradient.is_sparse for gradient in gradients):
            raise TrainwrightError(
                "A parameter has a sparse gradient, which is not supported. Use Embedding(sparse=False)."
            )
        if not gradients:
            raise TrainwrightError(
                f"No parameter of the optimizers {', '.join(names)} got a gradient. Does the loss depend on them?"
            )
        for name in names:
            repair = getattr(updater.optimizers[name].optimizer, "repair_gradients", None)
            # Before the norm, which one nan would spoil. With a loss scale an overflow must show: it skips the update.
            if repair is not None and updater.loss_scale is None:
                repair()
        grad_norm, factor = self._clipped(gradients, factor, owned.norm)
        overflowed = None if updater.loss_scale is None else ~torch.isfinite(grad_norm)
        hold = _either(self._judge(loss, grad_norm), overflowed)
        grad_scale = self._scale_gradients(names, gradients, factor)
        metrics = self._merged_metrics()
        for name in names:
            metrics.update(updater.step_optimizer(name, hold, grad_scale))
        if overflowed is not None and updater.loss_scale is not None:
            metrics["loss_scale"] = updater.loss_scale.scale.clone()
            updater.loss_scale.follow(overflowed)
        if len(self._rates) > 1:
            metrics.update({f"lr/{name}": rate for name, rate in self._rates.items()})
        return StepResult(loss, metrics, grad_norm, self._rates[names[0]])

    def _reduce(self, owned: _OwnedParameters) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Sums over micro-batches and ranks: returns the loss and what makes the gradients exactly its own."""
        batch_size = self._updater.global_batch_size
        first, num_samples = self._losses[0]
        if self._updater.ranks.size == 1 and len(self._losses) == 1 and isinstance(first, torch.Tensor):
            # The common case needs no arithmetic on the device at all.
            self.weight = float(num_samples)
            return first, batch_size / num_samples if num_samples else 0.0
        device = owned.parameters[0].device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for loss, samples in self._losses:
            total, count = (loss.total, loss.count) if isinstance(loss, Mean) else (loss * samples, samples)
            totals[0] += total
            totals[1] += count
        mesh, sync = self._updater.ranks.mesh, self._updater.sync
        if self._updater.watch is not None and self._updater.ranks.size > 1:
            self._own_is_finite = totals[0] - totals[0] == 0
        if not mesh.is_loss_rank:
            totals.zero_()  # other ranks have seen the same samples
        if sync is not None:
            sync.finish()
        owned.gradient_sum.reduce(totals)
        if self._updater.pipeline is not None:
            self._updater.pipeline.sum_tied_gradients()
        total, count = totals.unbind()
        self.weight = count
        # A batch without anything to count (all labels ignored) moves nothing, rather than dividing by zero.
        counted = count.clamp(min=1e-12)
        # FSDP has divided the sum by the number of its ranks.
        unit = batch_size * (1 if sync is None else sync.averaging)
        precise = torch.promote_types(owned.parameters[0].dtype, torch.float32)
        return (total / counted).to(precise), torch.where(count > 0, unit / counted, 0.0)

    def _clipped(
        self, gradients: list[torch.Tensor], factor: torch.Tensor | float, norm: GradientNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Returns the gradients' norm before clipping, and what they are to be multiplied by."""
        updater = self._updater
        if updater.loss_scale is not None:
            factor = factor / updater.loss_scale.scale
        grad_norm = _total_norm(gradients) if norm is None else norm.measure()
        is_one = isinstance(factor, float) and factor == 1.0
        if not is_one:
            grad_norm = (grad_norm * factor).to(grad_norm.dtype)
        if updater.max_grad_norm is not None:
            # max / (norm + ε), as torch divides a number by a tensor, but for its wrappers.
            clipped = (grad_norm + 1e-6).reciprocal_().mul_(updater.max_grad_norm).clamp_(max=1.0)
            factor = clipped if is_one else factor * clipped
        return grad_norm, factor

    def _scale_gradients(
        self, names: Sequence[str], gradients: list[torch.Tensor], factor: torch.Tensor | float
    ) -> torch.Tensor | None:
        """Multiplies and limits the gradients in place, or returns what the optimizers are to divide them by."""
        most = self._updater.max_grad_value
        if isinstance(factor, torch.Tensor):
            if most is None and self._updater.divides_gradients(names):
                if not any(gradient.dtype == torch.float64 for gradient in gradients):
                    return factor.to(torch.float32).reciprocal()
            elif gradients[0].dtype == torch.float32:
                factor = factor.to(torch.float32)  # as the kernel would, which takes all gradients at once only then
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        if most is not None:
            torch._foreach_clamp_min_(gradients, -most)
            torch._foreach_clamp_max_(gradients, most)
        return None

    def _judge(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor | bool | None:
        """Returns whether an anomaly holds this update back; None where none ever does."""
        updater = self._updater
        if updater.watch is None:
            return None
        is_first, updater.is_judged = not updater.is_judged, True
        hold = updater.watch.judge(
            updater.step,
            loss,
            grad_norm,
            own_is_finite=self._own_is_finite,
            # An overflow in fp16 is the loss scale's to handle.
            judges_norm=updater.loss_scale is None,
            is_first=is_first,
        )
        if hold is not None and updater.held_buffers is not None:
            updater.held_buffers.put_back(hold)
        return hold

    def _merged_metrics(self) -> dict[str, Any]:
        return {name: _merge_metric(values) for name, values in self._metrics.items()}


def _either(hold: torch.Tensor | bool | None, overflowed: torch.Tensor | None) -> torch.Tensor | bool:
    """Joins two reasons not to step; a plain bool where the host knows the answer already."""
    if overflowed is None:
        return False if hold is None else hold
    if hold is None or hold is False:
        return overflowed
    return hold if hold is True else hold | overflowed


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, in one pass; torch's own helper regroups them on every call (30 µs)."""
    is_short = gradients[0].dtype in (torch.bfloat16, torch.float16)
    norms = list(torch._foreach_norm(gradients, 2, torch.float32) if is_short else torch._foreach_norm(gradients))
    if len({(norm.dtype, norm.device) for norm in norms}) > 1:
        norms = [norm.to(device=norms[0].device, dtype=torch.float32) for norm in norms]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _merge_metric(values: list[tuple[Any, int]]) -> Any:
    """Adds up one metric over micro-batches: Means exactly, scalars by samples; of other objects the last stays."""
    counted = [(value, samples) for value, samples in values if samples] or values[-1:]
    if all(isinstance(value, Mean) for value, _ in counted):
        means = [value.detach() for value, samples in counted if samples]
        return sum(means[1:], means[0]) if means else Mean(0.0, 0.0)
    if all(_is_scalar(value) for value, _ in counted):
        if len(counted) == 1:
            return _settled(counted[0][0])
        return sum(_settled(value) * samples for value, samples in counted) / sum(samples for _, samples in counted)
    return _settled(counted[-1][0])


def _is_scalar(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Real)


def _settled(value: Any) -> Any:
    # A metric that aliases a buffer would change before the log period reads it.
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
