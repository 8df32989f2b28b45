"""One update: backward over micro-batches, then an optimizer step with the exact, clipped gradient.

The loss of an update is Σtotal / Σcount over micro-batches and data ranks, and its gradient is exactly that. This file
has the package's only tensor `.backward(`; `Trainer.train_step` calls it. How an optimizer skips a step on the device
is in optim/device_step.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainwright.anomaly.detection import AnomalyDetector
from trainwright.backends import Capture, reads_at_once, waits_for_memory
from trainwright.backends.private_torch import version_of
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.events import Mean
from trainwright.events.mean import detached_copy, is_sharded
from trainwright.loop.backward_steps import BackwardSteps
from trainwright.loop.heartbeat import Heartbeat
from trainwright.loop.outputs import ForwardResult, Loss, full_loss, read_pair
from trainwright.loop.state import Batch
from trainwright.optim.device_step import (
    device_of,
    divides_gradients,
    follow_groups,
    has_eval_weights,
    rate_stamp,
    requires_closure,
    set_learning_rate,
    step_unless,
    supports_found_inf,
)
from trainwright.optim.torch_schedules import TorchSchedule
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import is_split, local, set_gradient_dtype
from trainwright.parallel.replicate import SHORT_DTYPES, GradientNorm, GradientSum, copy_from_first, norms_of
from trainwright.user_code.locations import describe_method

if TYPE_CHECKING:
    from trainwright.parallel.fully_shard import GradientSync
    from trainwright.parallel.pipeline import Pipeline

logger = logging.getLogger(__name__)


class LossScale:
    """A scale that halves when gradients overflow and doubles after `growth_interval` updates without overflow."""

    def __init__(self, device: torch.device, *, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self._good_updates = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_interval = growth_interval

    def adjust(self, overflowed: torch.Tensor) -> None:
        """Adjusts the scale after an update; `overflowed` is a 0-dim bool on the device."""
        self._good_updates.add_(1).mul_(~overflowed)
        grown = self._good_updates == self._growth_interval
        # Not below 2^-14: a scale of 0 would never recover.
        self.scale.mul_(torch.where(overflowed, 0.5, torch.where(grown, 2.0, 1.0))).clamp_(min=2.0**-14)
        self._good_updates.mul_(~grown)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the scale and the number of updates since it changed."""
        return {"scale": self.scale, "good_updates": self._good_updates}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores `state_dict` in place."""
        self.scale.copy_(state["scale"])
        self._good_updates.copy_(state["good_updates"])


NamedBuffer = tuple[torch.nn.Module, str]
"""A module and the name of its buffer: a forward may replace the tensor."""


def persistent_buffers(model: torch.nn.Module) -> list[NamedBuffer]:
    """Returns the buffers that belong to the model's state dict."""
    found = {
        id(buffer): (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    return list(found.values())


class BufferSnapshot:
    """A copy of buffers from the beginning of a step, taken in one kernel per dtype."""

    def __init__(self, buffers: Sequence[NamedBuffer]) -> None:
        self._buffers = list(buffers)
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self) -> None:
        """Copies the current values."""
        now = [read_buffer(each) for each in self._buffers]
        # The same memory in every step, because a captured step refers to it.
        if [_layout(each) for each in self._copies] != [_layout(each) for each in now]:
            self._copies = [torch.empty_like(each) for each in now]
        pairs: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for copy, buffer in zip(self._copies, now, strict=True):
            copies, buffers = pairs.setdefault(buffer.dtype, ([], []))
            copies.append(copy)
            buffers.append(buffer)
        for copies, buffers in pairs.values():
            torch._foreach_copy_(copies, buffers)

    @torch.no_grad()
    def restore(self, skip: torch.Tensor | bool) -> None:
        """Restores the copied values where `skip`, which may be a 0-dim bool on the device."""
        if skip is False:
            return
        for each, copy in zip(self._buffers, self._copies, strict=True):
            buffer = read_buffer(each)
            buffer.copy_(torch.where(skip, copy, buffer) if isinstance(skip, torch.Tensor) else copy)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def read_buffer(buffer: NamedBuffer) -> torch.Tensor:
    """Returns the current tensor of a buffer, or this rank's shard of it."""
    module, name = buffer
    tensor = module._buffers[name]
    assert tensor is not None
    return local(tensor)


class StepResult(NamedTuple):
    """The result of one update. `loss` and `grad_norm` stay on the device; reading them waits for it."""

    loss: torch.Tensor
    """The mean over all ranks, detached."""
    metrics: dict[str, Any]
    """The metrics of the step by name; a step may add others."""
    grad_norm: torch.Tensor
    """The norm of all gradients before clipping."""
    lr: float
    """The learning rate that was used; with several optimizers `metrics` has `lr/NAME`."""


class ScheduledOptimizer:
    """An optimizer and its learning-rate schedule: a pure function of the step, a scheduler with state, or None.

    Without a schedule, the rates of the groups are not written: a rate that a hook writes is kept and saved.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Callable[[int, int], float] | TorchSchedule | None
    ) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.base_rates: list[float] = []
        self.num_parameters = 0
        self.requires_closure = requires_closure(optimizer)
        self._factor: float | None = None
        """The schedule's factor in the rates that it has written; None if it has written none."""
        self.read_groups()
        self.writer: str | None = None
        """The hook that has written a rate since the schedule did."""
        self._written: list[object] | None = None
        """The results of `rate_stamp` for the rates that the schedule has written; None if it has written none."""
        self._read: tuple[torch.Tensor, int, float] | None = None

    def read_groups(self, base_rates: Sequence[float] = ()) -> None:
        """Reads the base rates of groups that were added; `base_rates` are those of a checkpoint."""
        groups = self.optimizer.param_groups
        if any(group["lr"] is None for group in groups):
            raise ConfigError(
                f"{type(self.optimizer).__name__} has no learning rate (lr is None). Set lr; Adafactor of transformers "
                "also needs relative_step: false and scale_parameter: false."
            )
        known = [*self.base_rates, *base_rates[len(self.base_rates) :]][: len(groups)]
        self.base_rates = [*known, *(float(group["lr"]) for group in groups[len(known) :])]
        self._factor = None
        self.num_parameters = sum(len(group["params"]) for group in groups)
        if has_eval_weights(self.optimizer):  # for added groups; without state this changes no weights
            self.optimizer.train()  # type: ignore[attr-defined]
        if isinstance(self.schedule, TorchSchedule):
            self.schedule.check_groups(len(groups))

    def scale_added(self, num_known: int) -> None:
        """Sets the rates of groups after the first `num_known` according to the schedule's factor in the first
        group."""
        groups = self.optimizer.param_groups
        if self.schedule is None or num_known == len(groups) or not self.base_rates[0]:
            return
        factor = float(groups[0]["lr"]) / self.base_rates[0]
        for group, base in zip(groups[num_known:], self.base_rates[num_known:], strict=True):
            set_learning_rate(group, base * factor)

    def rate(self, step: int, max_steps: int) -> float | None:
        """Returns the first group's rate in the update that follows `step` updates; None if it does not depend on the
        step alone."""
        if self.schedule is None or isinstance(self.schedule, TorchSchedule):
            return None
        return self.base_rates[0] * self.schedule(step, max_steps)

    def set_rate(self, step: int, max_steps: int, epoch: int = 0) -> float:
        """Writes the learning rates of the update that follows `step` updates; returns the first group's."""
        if self.schedule is None:
            return self._own_rate()
        are_as_written = self._written is not None and self._stamps() == self._written
        if not are_as_written and self.is_overwritten():
            self._warn_of_writer()
        if isinstance(self.schedule, TorchSchedule):
            self.schedule.advance(step, epoch)
            self._note_rates()
            return self._own_rate()
        factor = self.schedule(step, max_steps)
        # On a GPU each write is a kernel; a constant schedule needs none. Writes that torch does not count, through
        # `.data` or in a replay, are not detected; compile/guards.py rejects steps that write a rate.
        if factor != self._factor or not are_as_written:
            for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
                set_learning_rate(group, base * factor)
            self._factor = factor
            self._note_rates()
        return self.base_rates[0] * factor

    def observe(self, logs: Mapping[str, float]) -> None:
        """Lets a schedule that follows a metric read the logs of an evaluation; it may write the learning rates."""
        if isinstance(self.schedule, TorchSchedule) and self.schedule.metric is not None:
            self.schedule.observe(logs)

    def _note_rates(self) -> None:
        """Records that the schedule has written the rates; other rates were written by user code.

        A schedule that follows a metric reduces the current rates, so rates of user code have an effect.
        """
        if isinstance(self.schedule, TorchSchedule) and self.schedule.metric is not None:
            return
        self._written = self._stamps()

    def _stamps(self) -> list[object]:
        return [rate_stamp(group["lr"]) for group in self.optimizer.param_groups]

    def is_overwritten(self) -> bool:
        """Returns True if a rate differs from the one that the schedule wrote. Reads no value from the device."""
        if self._written is None:
            return False
        for group, stamp in zip(self.optimizer.param_groups, self._written, strict=False):
            # Graph mode replaces numbers with tensors.
            is_captured = isinstance(group["lr"], torch.Tensor) and not isinstance(stamp, tuple)
            if not is_captured and rate_stamp(group["lr"]) != stamp:
                return True
        return False

    def forget_written(self) -> None:
        """Called after the optimizer's state was loaded: its rates are those of the checkpoint."""
        self._written, self.writer = None, None

    def _own_rate(self) -> float:
        """Returns the first group's rate; one that is a tensor is read only after it was written."""
        rate = self.optimizer.param_groups[0]["lr"]
        if not isinstance(rate, torch.Tensor):
            return float(rate)
        if self._read is None or self._read[0] is not rate or self._read[1] != version_of(rate):
            self._read = (rate, version_of(rate), float(rate))
        return self._read[2]

    def _warn_of_writer(self) -> None:
        """Warns once about a rate that the schedule overwrites."""
        if self.writer != "":
            effect = "the schedule overwrites in the next step"
            if isinstance(self.schedule, TorchSchedule):  # some schedules multiply the current rate
                effect = f"{self.schedule.name} overwrites or scales"
            logger.warning(
                "%s has written a learning rate, which %s. Set the schedule to null to keep the rates that are "
                "written, or remove the write.",
                self.writer or "Code outside of the hooks, such as train_step,",
                effect,
            )
        self.writer = ""


class Updater:
    """The state shared by all updates of a run: optimizers, clipping, loss scale and gradient reduction."""

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
        detector: AnomalyDetector | None = None,
        buffers: Sequence[NamedBuffer] = (),
        sync: GradientSync | None = None,
        pipeline: Pipeline | None = None,
        heartbeat: Heartbeat | None = None,
        capture: Capture | None = None,
        steps_in_backward: bool = False,
    ) -> None:
        self.optimizers = dict(optimizers)
        self.global_batch_size = global_batch_size
        self.max_steps = max_steps
        self.ranks = ranks
        self.max_grad_norm = max_grad_norm
        self.max_grad_value = max_grad_value
        self.loss_scale = loss_scale
        self.detector = detector
        self.sync = sync
        """Reduces the gradients of FSDP during backward; None if every rank has the full model."""
        self.pipeline = pipeline
        """Runs the micro-batches over the pipeline stages; None if every rank has all layers."""
        groups = [group for entry in self.optimizers.values() for group in entry.optimizer.param_groups]
        # The stages of a pipeline have different parameters, and all ranks must divide by the same number.
        has_short = any(each.dtype in SHORT_DTYPES for group in groups for each in group["params"])
        self.has_short = has_short and pipeline is None
        """True if some parameters have 16 bits, on every rank."""
        self.has_shards = ranks.mesh.is_split
        """True if parameters may be DTensors."""
        self.suspend: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Returns a context in which `Trainer.gather_mixed` has no effect, because a custom step runs within it."""
        self.heartbeat = heartbeat or Heartbeat()
        self._capture = capture or Capture()
        devices = [device_of(entry.optimizer) for entry in self.optimizers.values()]
        self._reads_at_once = all(each is None or reads_at_once(each) for each in devices)
        self.backward_steps: BackwardSteps | None = None
        """Steps the parameters during backward; None if `Update.apply` steps them."""
        if steps_in_backward:
            named = {name: entry.optimizer for name, entry in self.optimizers.items()}
            self.backward_steps = BackwardSteps(named, self._reject_postponed)
        self.step = 0
        """The number of the current update, starting at 1."""
        self.is_judged = False
        """True once the loss of this step has been checked. A step may have several updates."""
        self.checks_gradients = True
        """True until the first update, which checks that `forward` computes and clears no gradients itself."""
        self.rates: dict[str, float] = {}
        self.after_replay: set[str] = set()
        """The optimizers that cannot be captured; in graph mode they step after each replay."""
        self._postponed: list[tuple[str, torch.Tensor | bool]] = []
        self.repeat: Callable[[], Any] | None = None
        """Repeats the current train_step, for optimizers that recompute the loss; set by the trainer."""
        self._last_loss = torch.zeros(())
        """The loss of the last `apply`."""
        self.is_repeating = False
        """True while a closure repeats a step; `apply` then only computes the gradients."""
        self.num_repeated = 0
        """How often a repeated step has called `apply`."""
        self.skips_updates = detector is not None and detector.skips_updates
        """True if an update may be skipped, by a policy for anomalies or because all labels are ignored."""
        self._owned: dict[tuple[str, ...], _OwnedParameters] = {}
        self._buffers = list(buffers)
        self._gradient_copies = ranks.mesh.num_gradient_copies
        self.buffer_snapshot: BufferSnapshot | None = None
        if self.skips_updates:
            self.buffer_snapshot = BufferSnapshot(buffers) if buffers else None
            self._log_waits("anomalies")

    @property
    def reads_at_once(self) -> bool:
        """True if reading a value of this step does not wait for the device."""
        return self._reads_at_once and not self._capture.is_active

    @property
    def is_capturing(self) -> bool:
        """True while graph mode captures the step: no value can be read on the host."""
        return self._capture.is_active

    def note_counted(self) -> None:
        """Records that losses count labels, so an update without counted labels is skipped."""
        if not self.skips_updates:
            self.skips_updates = True
            self._log_waits("labels of -100")

    def _log_waits(self, reason: str) -> None:
        """Logs the optimizers that cannot skip an update on the device, for which the host waits in every step."""
        for name, entry in self.optimizers.items():
            device = device_of(entry.optimizer) or torch.device("cpu")
            if not reads_at_once(device) and not supports_found_inf(entry.optimizer):
                logger.info(
                    "%s: the optimizer %s (%s) cannot skip an update on the device, so the host waits for it in "
                    "every step. Fused optimizers do not need this.",
                    reason,
                    name,
                    type(entry.optimizer).__name__,
                )

    def begin_step(self, step: int, epoch: int = 0) -> None:
        """Begins a step: writes the learning rates of the update that follows `step` updates."""
        if self.buffer_snapshot is not None:
            self.buffer_snapshot.take()
        self.step, self.is_judged = step + 1, False
        for name, entry in self.optimizers.items():
            num_parameters = 0
            for group in entry.optimizer.param_groups:
                num_parameters += len(group["params"])
            if num_parameters != entry.num_parameters:
                self.follow_groups()  # user code has called add_param_group
            self.rates[name] = entry.set_rate(step, self.max_steps, epoch)

    def observe(self, logs: Mapping[str, float]) -> None:
        """Lets the schedules that follow a metric read the logs of an evaluation."""
        for entry in self.optimizers.values():
            entry.observe(logs)

    def follow_groups(self, base_rates: Mapping[str, Sequence[float]] = MappingProxyType({})) -> None:
        """Called after parameters or groups were added to an optimizer or removed from it."""
        for owned in self._owned.values():
            owned.gradient_sum.close()
        self._owned.clear()
        for name, entry in self.optimizers.items():
            entry.read_groups(base_rates.get(name, ()))
            follow_groups(entry.optimizer, device_of(entry.optimizer) or torch.device("cpu"))

    def follow_added(self) -> None:
        """Called after newly trainable parameters were added: new groups follow the schedule immediately."""
        num_known = {name: len(entry.base_rates) for name, entry in self.optimizers.items()}
        self.follow_groups()
        for name, entry in self.optimizers.items():
            entry.scale_added(num_known[name])

    @property
    def torch_schedules(self) -> dict[str, TorchSchedule]:
        """The schedules that have state, by the name of their optimizer."""
        found = {name: entry.schedule for name, entry in self.optimizers.items()}
        return {name: each for name, each in found.items() if isinstance(each, TorchSchedule)}

    def note_writer(self, function: Callable[..., Any]) -> None:
        """Called after a hook; records the hook if it has written a rate that a schedule will overwrite."""
        for entry in self.optimizers.values():
            if entry.writer is None and entry.schedule is not None and entry.is_overwritten():
                entry.writer = describe_method(function)

    def load_schedules(self, states: Mapping[str, Mapping[str, Any]], *, keep_settings: bool = False) -> None:
        """Restores the schedules that have state; called after the optimizers were restored."""
        for entry in self.optimizers.values():
            entry.forget_written()
        for name, schedule in self.torch_schedules.items():
            if name in states:
                schedule.load_state_dict(states[name], keep_settings=keep_settings)
            else:
                logger.warning("The checkpoint has no state of the schedule of %s, which starts over.", name)
            schedule.check_length(self.max_steps)

    def share_buffers(self) -> None:
        """Copies the first rank's buffers to every rank, so that a run resumed from a checkpoint has the same."""
        if self._buffers:
            copy_from_first([read_buffer(each) for each in self._buffers], self.ranks)

    def begin(
        self,
        num_samples: int,
        *,
        num_backwards: int | None = None,
        accumulates: bool = True,
        micro_batch: object = None,
    ) -> Update:
        """Begins an update with cleared gradients; `num_samples` is the weight of a plain loss.

        `micro_batch` is the key of the current micro-batch (see `Update`). `num_backwards` is the number of `backward`
        calls, if it is known: the reduction over ranks can then overlap with the last one. If it `accumulates` several
        gradients, or reduces them over ranks, those of 16-bit parameters are fp32 until the optimizers read them; in
        bf16, a sum of hundreds loses several percent.
        """
        if self._postponed:
            raise ConfigError(
                f"runtime.mode graph: the step continues after the optimizer {self._postponed[0][0]}, which cannot be "
                "captured, has stepped. Use a fused or capturable optimizer, or mode compile."
            )
        for entry in self.optimizers.values():
            optimizer = entry.optimizer
            if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
                optimizer.zero_grad(set_to_none=True)
                continue
            for group in optimizer.param_groups:  # what torch's zero_grad does, without its profiling range (40 µs)
                for parameter in group["params"]:
                    parameter.grad = None
        if accumulates or self.ranks.size > 1:
            for parameter in self.owned_by(tuple(self.optimizers)).short:
                set_gradient_dtype(parameter, torch.float32)
        return Update(self, num_samples, num_backwards, micro_batch)

    def divides_gradients(self, names: Sequence[str]) -> bool:
        """Returns True if all of these optimizers clip in their own kernels and this is faster on the device."""
        optimizers = [self.optimizers[name].optimizer for name in names if name not in self.after_replay]
        return len(optimizers) == len(names) and all(
            waits_for_memory(device_of(each) or torch.device("cpu")) and divides_gradients(each) for each in optimizers
        )

    def _reject_postponed(self, name: str) -> None:
        """Raises for an optimizer that cannot be captured, because it would have to step after the replay."""
        if self._capture.is_active and name in self.after_replay:
            raise ConfigError(
                f"trainer.optimizer_in_backward: the optimizer {name} cannot be captured in runtime.mode graph. Use a "
                "fused or capturable optimizer, or mode eager."
            )

    def step_optimizer(
        self, name: str, skip: torch.Tensor | bool, grad_scale: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Steps an optimizer unless `skip`; returns its metrics under the names of the log."""
        if self._capture.is_active and name in self.after_replay:
            self._postponed.append((name, skip))
            return {}
        entry = self.optimizers[name]
        closure = self._closure(entry.optimizer) if entry.requires_closure else None
        returned = step_unless(entry.optimizer, skip, grad_scale=grad_scale, closure=closure)
        if not isinstance(returned, Mapping):
            return {}
        is_only = len(self.optimizers) == 1
        return dict(returned) if is_only else {f"{key}/{name}": value for key, value in returned.items()}

    def _closure(self, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
        """Returns a function that repeats forward and backward of this step and returns the loss."""
        repeat = self.repeat
        if repeat is None:
            raise ConfigError(f"{type(optimizer).__name__} computes the loss again, which works only within train().")
        # LBFGS begins with the existing loss and gradients.
        known = [self._last_loss] if isinstance(optimizer, torch.optim.LBFGS) else []

        def closure() -> torch.Tensor:
            if known:
                return known.pop()
            self.is_repeating, self.num_repeated = True, 0
            try:
                with torch.enable_grad():
                    loss: torch.Tensor = repeat()[0]
            finally:
                self.is_repeating = False
            if self.num_repeated != 1:
                raise ConfigError(
                    f"{type(optimizer).__name__} computes the loss again, but train_step calls apply "
                    f"{self.num_repeated} times, so the loss that it needs is ambiguous. Call apply once in a step, or "
                    "use another optimizer."
                )
            return loss

        return closure

    def reshard(self) -> None:
        """Frees sharded parameters that are still gathered after a forward without a backward, for example in a
        hook."""
        if self.sync is not None:
            self.sync.reshard()

    def take_postponed(self) -> list[tuple[str, torch.Tensor | bool]]:
        """Returns the optimizers to step after a replay of a captured step, each with its skip flag."""
        postponed, self._postponed = self._postponed, []
        return postponed

    def owned_by(self, names: tuple[str, ...]) -> _OwnedParameters:
        """Returns the parameters of the named optimizers."""
        owned = self._owned.get(names)
        if owned is None:
            for name in names:
                if name not in self.optimizers:
                    raise ConfigError(f"apply: no optimizer {name!r}. Known: {', '.join(self.optimizers)}.")
            owned = self._owned[names] = _OwnedParameters(
                [
                    parameter
                    for name in names
                    for group in self.optimizers[name].optimizer.param_groups
                    for parameter in group["params"]
                ],
                self.ranks,
                sums_gradients=self.sync is None,
                num_stages={id(each): 2 for each, _ in self.pipeline.tied} if self.pipeline is not None else {},
                heartbeat=self.heartbeat,
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
        heartbeat: Heartbeat,
    ) -> None:
        self.parameters = list(parameters)
        short = [each for each in self.parameters if each.dtype in SHORT_DTYPES]
        self.has_short = bool(short)
        """True if some parameters have 16 bits."""
        # FSDP casts the gradients that it reduces to fp32 itself.
        self.short = [each for each in short if sums_gradients or not is_split(each)]
        self.gradient_sum = GradientSum(self.parameters, ranks, sums_gradients=sums_gradients, enter=heartbeat.enter)
        is_sharded = ranks.mesh.is_split
        self.norm = GradientNorm(self.parameters, ranks.mesh, num_stages=num_stages) if is_sharded else None

    def gradients(self) -> list[torch.Tensor]:
        """Returns this rank's shards of the gradients; raises for sparse ones."""
        gradients = []
        if self.norm is not None:
            gradients = self.norm.gradients()
        else:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    gradients.append(parameter.grad)
        for gradient in gradients:
            if gradient.is_sparse:
                raise TrainwrightError(
                    "A parameter has a sparse gradient, which is not supported. Use Embedding(sparse=False)."
                )
        return gradients


def _explain_freed_graph(error: RuntimeError) -> None:
    """Raises a clear error if the graph of the loss was freed by an earlier backward; ignores other errors."""
    if "backward through the graph a second time" in str(error):
        raise TrainwrightError(
            "The graph of the loss is freed: forward has called backward(), or uses a tensor that an earlier step has "
            "kept with its graph. Return the loss, which the update differentiates, and keep tensors with .detach()."
        ) from error


class Update:
    """One update in progress: any number of `backward`, then one `apply`."""

    def __init__(
        self, updater: Updater, num_samples: int, num_backwards: int | None = None, micro_batch: object = None
    ) -> None:
        self.num_samples = num_samples
        """The weight of a plain loss; the trainer sets it for each micro-batch."""
        self.micro_batch = micro_batch
        """The key of the current micro-batch, None for the whole batch: terms with the same key add up."""
        self.weight: torch.Tensor | float = 0.0
        """After `apply`: the weight of the loss, Σcount over micro-batches and ranks."""
        self._updater = updater
        self._backwards_left = num_backwards
        self._is_whole = num_backwards == 1 and updater.ranks.size == 1
        """True if one micro-batch of one rank is the whole batch: its mean needs no weight."""
        self._losses: dict[object, tuple[Loss, torch.Tensor | float]] = {}
        """The sum of the terms of each micro-batch, with its weight."""
        self._unit: int | None = None
        self.has_plain_loss = False
        """True if a loss was neither a Mean nor a mean over a known number of labels."""
        self._metrics: dict[str, list[tuple[Any, int]]] = {}
        self._own_is_finite: torch.Tensor | bool = True
        self._is_stepped = False
        """True once a backward has stepped the parameters (`trainer.optimizer_in_backward`)."""
        self._is_skipped: torch.Tensor | bool = False
        """True if those steps change nothing, because no label counts."""
        is_plain = updater.sync is None and updater.pipeline is None and updater.backward_steps is None
        self._checks_gradients = updater.checks_gradients and is_plain and num_backwards is not None
        """True in the first update, unless the step is custom, which may use gradients in any way."""
        self._had_gradients = False
        """True if there were gradients after the last backward."""
        updater.checks_gradients = False

    def backward(
        self, result: ForwardResult | Loss | tuple[Loss, Mapping[str, Any]], num_samples: int | None = None
    ) -> None:
        """Adds a term to the loss of the current micro-batch: propagates its share and keeps its metrics.

        Several terms of one micro-batch add up, like several calls of `.backward()`; terms of different micro-batches
        are averaged. A plain loss, alone or as (loss, metrics), is weighted by the samples of the current micro-batch.
        With `num_samples`, it is a separate micro-batch, for a step that splits its batch itself. Propagates total /
        global_batch_size, which stays in the range of fp16 for any count.
        """
        if not isinstance(result, ForwardResult):
            count = self.num_samples if num_samples is None else num_samples
            result = read_pair(result, count) if isinstance(result, tuple) else ForwardResult(result, count)
        key = self.micro_batch if num_samples is None else object()
        updater = self._updater
        if updater.has_shards:
            result.loss = full_loss(result.loss)  # a custom step may have changed it
        with updater.suspend():
            scaled = self._scale(result, key)
            if scaled is None:
                return
            trace = updater.heartbeat.trace
            if trace is not None:
                trace.enter_part("backward")
            if updater.ranks.size > 1:
                self._begin_backward()
            if self._checks_gradients:
                self._check_gradients()
            with self._around_backward():
                try:
                    scaled.backward()  # type: ignore[no-untyped-call]
                except RuntimeError as error:
                    _explain_freed_graph(error)
                    raise
            if self._checks_gradients:
                self._had_gradients = self._has_gradients()
            if trace is not None:
                trace.leave_part()

    def _check_gradients(self) -> None:
        """Raises if `forward` has written or cleared gradients: the result would be wrong without an error."""
        if self._has_gradients() == self._had_gradients:
            return
        if self._had_gradients:
            raise TrainwrightError(
                "The gradients of the earlier micro-batches of this update are gone: forward has cleared them. Remove "
                "zero_grad() from it: each update begins with cleared gradients."
            )
        if not any(bool(local(gradient).norm()) for gradient in self._gradients()):
            return  # cleared by zero_grad(set_to_none=False)
        raise TrainwrightError(
            "The parameters have gradients before the update has computed any: forward has called backward(). Return "
            "the loss instead, which the update differentiates, or use torch.autograd.grad for a gradient that is part "
            "of the loss."
        )

    def _has_gradients(self) -> bool:
        return bool(self._gradients())

    def _gradients(self) -> list[torch.Tensor]:
        groups = [group for entry in self._updater.optimizers.values() for group in entry.optimizer.param_groups]
        return [each.grad for group in groups for each in group["params"] if each.grad is not None]

    def _around_backward(self) -> AbstractContextManager[None]:
        """Returns the context of a backward, which steps parameters with `trainer.optimizer_in_backward`."""
        steps = self._updater.backward_steps
        if steps is None:
            return _NO_STEPS
        if self._is_stepped:
            raise TrainwrightError(
                "trainer.optimizer_in_backward: backward was called a second time in one update, after the first has "
                "stepped the parameters. Add the terms and call backward once, or remove optimizer_in_backward."
            )
        self._is_stepped = True
        (_, weight), *_ = self._losses.values()
        self.weight = weight if isinstance(weight, torch.Tensor) else float(weight)
        self._is_skipped = False if self.has_plain_loss else self._is_empty()
        return steps.during_backward(self._is_skipped)

    def backward_pipelined(
        self, micro_batches: Sequence[Batch], read: Callable[[Any, Batch], ForwardResult], pipeline: Pipeline
    ) -> None:
        """Runs forward and backward of all micro-batches over the stages; `read` interprets the last stage's outputs.

        Ranks of other stages see no loss; `apply` sums it over ranks.
        """

        def loss_of(outputs: Any, number: int) -> torch.Tensor:
            scaled = self._scale(read(outputs, micro_batches[number]), number)
            assert scaled is not None  # every stage takes part in each backward
            return scaled

        self._begin_backward()
        pipeline.run([each.value for each in micro_batches], loss_of)
        self._backwards_left = None
        if not self._losses:
            self._losses[None] = _NO_LOSS

    def _scale(self, result: ForwardResult, key: object) -> torch.Tensor | None:
        """Keeps the loss and metrics of a term; returns the tensor to propagate, or None."""
        updater = self._updater
        loss, num_samples = result.loss, result.num_samples
        if num_samples == 0:
            self._losses.setdefault(key, _NO_LOSS)
            # Not multiplied by 0, because a NaN would remain. Without sharding, ranks only participate in the reduction
            # of gradients; with sharded parameters or layers, every rank has to participate in the backward.
            if updater.sync is None and updater.pipeline is None:
                return None
            value = loss.total if isinstance(loss, Mean) else loss
            return value * 0.0 if isinstance(value, torch.Tensor) else None
        # Ranks along context all propagate this loss, and their gradients are summed.
        unit = self._short_unit(num_samples) if updater.has_short else updater.global_batch_size
        batch_size = unit * updater._gradient_copies
        weight: torch.Tensor | float = num_samples
        scaled: torch.Tensor | float
        if self._losses and (earlier := self._earlier_terms(key)) is not None:
            loss, scaled, weight = self._add_term(result, earlier, batch_size)
        elif updater.backward_steps is not None:
            # One micro-batch of one rank is the whole batch, so no later factor is needed.
            loss, scaled, weight = self._whole_mean(result)
        elif isinstance(loss, Mean):
            scaled = loss.total / batch_size
        elif result.count is None:
            share = num_samples / batch_size
            scaled = loss if share == 1.0 else loss * share
            self.has_plain_loss = True
        else:
            weight = result.count.item() if updater.reads_at_once else result.count
            scaled = loss if self._is_whole else loss * (weight / batch_size)
            loss = _without_nan(loss, weight)
        if not isinstance(scaled, torch.Tensor) or not scaled.requires_grad:
            raise TrainwrightError(
                "The loss has no gradient: nothing it was computed from requires one. Check for .detach(), "
                "torch.no_grad() or .item() in its computation, and that not all parameters are frozen."
            )
        if updater.loss_scale is not None:
            scaled = scaled * updater.loss_scale.scale
        self._losses[key] = loss.detach(), weight
        for name, value in result.metrics.items():
            self._metrics.setdefault(name, []).append((value, num_samples))
        return scaled

    def _whole_mean(self, result: ForwardResult) -> tuple[Loss, Any, torch.Tensor | float]:
        """Returns the mean loss of a whole batch, the same loss as the tensor to propagate, and its weight."""
        loss = result.loss
        if isinstance(loss, Mean):
            count = torch.as_tensor(loss.count)
            mean = loss.total / count.clamp(min=1e-12)
            return mean, mean, count.item() if self._updater.reads_at_once else count
        if result.count is None:
            self.has_plain_loss = True
            return loss, loss, result.num_samples
        weight = result.count.item() if self._updater.reads_at_once else result.count
        return _without_nan(loss, weight), loss, weight

    def _earlier_terms(self, key: object) -> tuple[Loss, torch.Tensor | float] | None:
        """Returns the sum of the earlier terms of a micro-batch with its weight; None for its first term.

        A term of the whole batch that follows those of its micro-batches has the sum of their weights.
        """
        earlier = self._losses.get(key)
        if earlier is None and key is None:
            counts = [_count_of(each) for each in self._losses.values()]
            return Mean(0.0, sum(counts[1:], counts[0])), 0
        return None if earlier is _NO_LOSS else earlier

    def _add_term(
        self, result: ForwardResult, earlier: tuple[Loss, torch.Tensor | float], batch_size: int
    ) -> tuple[Loss, Any, torch.Tensor | float]:
        """Returns the sum of the terms with another one, the tensor to propagate for it, and the weight of the sum.

        A plain loss gets the weight of the earlier terms. A loss with a count must have the same count; otherwise the
        mean of the sum would not be the sum of the means.
        """
        (loss, weight), term = earlier, result.loss
        count = _count_of(earlier)
        own_count = term.count if isinstance(term, Mean) else result.count
        if own_count is not None:
            self._require_equal(count, own_count)
        total = term.total if isinstance(term, Mean) else term * count
        scaled = total / batch_size if isinstance(term, Mean) else term * (count / batch_size)
        if isinstance(loss, Mean):
            return Mean(loss.total + total, loss.count), scaled, weight
        return loss + _without_nan(total / count if isinstance(term, Mean) else term, count), scaled, weight

    def _require_equal(self, first: Any, second: Any) -> None:
        """Raises for terms of one micro-batch with different weights; a captured step was checked in its warm-up."""
        is_on_device = isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor)
        if first is second or (is_on_device and self._updater.is_capturing):
            return
        if bool(abs(first - second) <= 1e-6 * abs(first)):  # sums of fractional counts are rounded
            return
        raise TrainwrightError(
            f"Two terms of one micro-batch have different counts, {float(first):g} and {float(second):g}, so their sum "
            "has no common mean. A plain loss counts samples. Add the terms before backward, for example Mean(total + "
            "0.1 * penalty * count, count), give both the same count, or call backward with the counted term first: a "
            "plain loss that follows gets its count."
        )

    def _short_unit(self, num_samples: int) -> int:
        """Returns the divisor of losses that replaces the batch size if parameters have 16 bits.

        It is the next power of two, so the division does not round gradients; `_reduce` corrects the factor in fp32. A
        loss of the whole batch is not divided.
        """
        if self._unit is None:
            size = self._updater.global_batch_size
            is_whole = self._updater.ranks.size == 1 and num_samples == size
            self._unit = size if is_whole else 1 << (size - 1).bit_length()
        return self._unit

    def _begin_backward(self) -> None:
        """Prepares the reduction over ranks, which starts during the last backward of the update if that is known."""
        is_last = True
        if self._backwards_left is not None:
            if self._backwards_left == 0:
                raise TrainwrightError(
                    "backward was called more often than there are micro-batches, after the gradients were summed over "
                    "ranks."
                )
            self._backwards_left -= 1
            is_last = self._backwards_left == 0
            if is_last:
                self._updater.owned_by(tuple(self._updater.optimizers)).gradient_sum.begin_last_backward()
        if self._updater.sync is not None:
            self._updater.sync.begin_backward(is_last=is_last)

    def apply(self, optimizers: Sequence[str] | None = None) -> StepResult:
        """Makes the gradient exact, measures and clips it, and steps the optimizers (all, or those named).

        On a GPU fused optimizers may clip while they read the gradients: the content of `.grad` afterwards is
        undefined.
        """
        updater = self._updater
        with updater.suspend():
            trace = updater.heartbeat.trace
            if trace is not None:
                trace.enter_part("optimizer")
            if not self._losses:
                raise TrainwrightError("apply was called without a backward: there is no gradient to step with.")
            names = tuple(updater.optimizers) if optimizers is None else tuple(optimizers)
            if updater.backward_steps is not None:
                return self._finish_steps(names, updater.backward_steps)
            owned = updater.owned_by(names)
            loss, factor = self._reduce(owned)
            gradients = owned.gradients()
            if not gradients:
                raise TrainwrightError(
                    f"No parameter of the optimizers {', '.join(names)} received a gradient. Does the loss depend on "
                    "them?"
                )
            for name in names:
                repair = getattr(updater.optimizers[name].optimizer, "repair_gradients", None)
                # Before the norm, which a single NaN would make NaN. With a loss scale, an overflow must remain
                # visible, because it skips the update.
                if repair is not None and updater.loss_scale is None:
                    repair()
            grad_norm, factor = self._clip(gradients, factor, owned.norm)
            metrics: dict[str, Any] = {}
            for name, values in self._metrics.items():
                metrics[name] = _merge_metric(values)
            if updater.is_repeating:
                updater.num_repeated += 1
                self._scale_gradients(names, gradients, factor)
                for name in names if owned.has_short else ():
                    _narrow_gradients(updater.optimizers[name].optimizer)
                return StepResult(loss, metrics, grad_norm, updater.rates[names[0]])
            updater._last_loss = loss
            skip = False if self.has_plain_loss else self._is_empty()  # a plain loss counts samples
            if skip is not True:
                judged = self._judge(loss, grad_norm)
                skip = judged if skip is False else _either(skip, judged)
            overflowed = None
            if updater.loss_scale is not None:
                overflowed = ~torch.isfinite(grad_norm)
                skip = _either(skip, overflowed)
            grad_scale = self._scale_gradients(names, gradients, factor)
            for name in names:
                if owned.has_short:
                    _narrow_gradients(updater.optimizers[name].optimizer)
                metrics.update(updater.step_optimizer(name, skip, grad_scale))
            if overflowed is not None and updater.loss_scale is not None:
                metrics["loss_scale"] = updater.loss_scale.scale.clone()
                updater.loss_scale.adjust(overflowed)
            if len(updater.rates) > 1:
                metrics.update({f"lr/{name}": rate for name, rate in updater.rates.items()})
            if trace is not None:
                trace.leave_part()
            return StepResult(loss, metrics, grad_norm, updater.rates[names[0]])

    def _finish_steps(self, names: tuple[str, ...], steps: BackwardSteps) -> StepResult:
        """Ends an update whose parameters were stepped during backward."""
        updater = self._updater
        if set(names) != set(updater.optimizers):
            raise TrainwrightError(
                f"trainer.optimizer_in_backward: apply names the optimizers {', '.join(names)}, but backward has "
                "stepped all of them. Remove optimizer_in_backward."
            )
        grad_norm = steps.grad_norm()
        if grad_norm is None:
            raise TrainwrightError(
                f"No parameter of the optimizers {', '.join(names)} received a gradient. Does the loss depend on them?"
            )
        (loss, _), *_ = self._losses.values()
        assert isinstance(loss, torch.Tensor)  # `_whole_mean` returns no Mean
        updater._last_loss = loss
        if self._is_skipped is not True:
            self._judge(loss, grad_norm)
        metrics = {name: _merge_metric(values) for name, values in self._metrics.items()}
        if len(updater.rates) > 1:
            metrics.update({f"lr/{name}": rate for name, rate in updater.rates.items()})
        if updater.heartbeat.trace is not None:
            updater.heartbeat.trace.leave_part()
        return StepResult(loss, metrics, grad_norm, updater.rates[names[0]])

    def _reduce(self, owned: _OwnedParameters) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Sums over micro-batches and ranks; returns the loss, and the factor that makes the gradients exact."""
        updater = self._updater
        batch_size = self._short_unit(0) if updater.has_short else updater.global_batch_size
        first, weight = next(iter(self._losses.values()))
        if updater.ranks.size == 1 and len(self._losses) == 1:
            # The common case, with as few small kernels as possible.
            if isinstance(first, torch.Tensor):
                self.weight = weight if isinstance(weight, torch.Tensor) else float(weight)
                if self._is_whole and not self.has_plain_loss:
                    return first, 1.0
                if isinstance(weight, torch.Tensor):
                    return first, torch.where(weight > 0, batch_size / weight, 0.0)
                return first, batch_size / weight if weight else 0.0
            total, count = first.total, first.count
            if isinstance(total, torch.Tensor) and isinstance(count, torch.Tensor) and total.device == count.device:
                self.weight = count
                precise = torch.promote_types(total.dtype, torch.float32)
                counted = count.to(precise).clamp(min=1e-12)
                return (total / counted).to(precise), torch.where(count > 0, batch_size / counted, 0.0)
        device = owned.parameters[0].device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        losses = dict(self._losses)
        of_whole = losses.pop(None, None) if len(losses) > 1 else None
        for loss, weight in losses.values():
            total, count = (loss.total, loss.count) if isinstance(loss, Mean) else (loss * weight, weight)
            totals[0] += total
            totals[1] += count
        if of_whole is not None:  # the samples of the whole batch are those of its micro-batches
            self._require_equal(totals[1], _count_of(of_whole))
            totals[0] += of_whole[0].total if isinstance(of_whole[0], Mean) else of_whole[0] * of_whole[1]
        mesh, sync = updater.ranks.mesh, updater.sync
        if updater.detector is not None and updater.ranks.size > 1:
            self._own_is_finite = totals[0] - totals[0] == 0
        if not mesh.is_loss_rank:
            totals.zero_()  # another rank counts the same samples
        if sync is not None:
            sync.finish(is_captured=updater.is_capturing)
        owned.gradient_sum.reduce(totals, is_captured=updater.is_capturing)
        if updater.pipeline is not None:
            updater.pipeline.sum_tied_gradients()
        total, count = totals.unbind()
        self.weight = count
        # A batch with nothing to count (all labels ignored) has a gradient of 0, instead of one divided by zero.
        counted = count.clamp(min=1e-12)
        # FSDP has divided the sum by the number of its ranks.
        unit = batch_size * (1 if sync is None else sync.averaging)
        precise = torch.promote_types(owned.parameters[0].dtype, torch.float32)
        return (total / counted).to(precise), torch.where(count > 0, unit / counted, 0.0)

    def _is_empty(self) -> torch.Tensor | bool:
        """Returns whether all labels are ignored on all ranks, in which case the update must not change weights or
        momentum.

        A tensor if only the device knows; a fused optimizer then skips the step there.
        """
        updater = self._updater
        updater.note_counted()
        is_empty: Any = self.weight == 0
        return bool(is_empty) if updater.reads_at_once else is_empty

    def _clip(
        self, gradients: list[torch.Tensor], factor: torch.Tensor | float, norm: GradientNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Returns the norm of the gradients before clipping, and the factor to multiply them by."""
        updater = self._updater
        if updater.loss_scale is not None:
            factor = factor / updater.loss_scale.scale
        grad_norm = _total_norm(gradients) if norm is None else norm.measure()
        is_one = isinstance(factor, float) and factor == 1.0
        if not is_one:
            grad_norm = (grad_norm * factor).to(grad_norm.dtype)
        if updater.max_grad_norm is not None:
            # max / (norm + ε): the order of operations of torch's division of a number by a tensor.
            clipped = (grad_norm + 1e-6).reciprocal_().mul_(updater.max_grad_norm).clamp_(max=1.0)
            factor = clipped if is_one else factor * clipped
        return grad_norm, factor

    def _scale_gradients(
        self, names: Sequence[str], gradients: list[torch.Tensor], factor: torch.Tensor | float
    ) -> torch.Tensor | None:
        """Multiplies and clamps the gradients in place, or returns the divisor that the optimizers apply."""
        limit = self._updater.max_grad_value
        if isinstance(factor, torch.Tensor):
            if limit is None and self._updater.divides_gradients(names):
                if not any(gradient.dtype == torch.float64 for gradient in gradients):
                    return factor.to(torch.float32).reciprocal()
            elif gradients[0].dtype == torch.float32:
                factor = factor.to(torch.float32)  # the fast kernel takes all gradients at once only in their dtype
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        if limit is not None:
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)
        return None

    def _judge(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor | bool:
        """Returns whether an anomaly skips this update; a tensor if only the device knows."""
        updater = self._updater
        if updater.detector is None:
            return False
        is_first, updater.is_judged = not updater.is_judged, True
        skip = updater.detector.judge(
            updater.step,
            loss,
            grad_norm,
            own_is_finite=self._own_is_finite,
            # An overflow in fp16 is handled by the loss scale.
            judges_norm=updater.loss_scale is None,
            is_first=is_first,
        )
        if skip is None:
            return False
        if updater.buffer_snapshot is not None:
            updater.buffer_snapshot.restore(skip)
        return skip


_NO_STEPS = nullcontext()
_NO_LOSS: tuple[Loss, float] = (Mean(0.0, 0.0), 0)
"""The loss of a micro-batch without samples."""


def _count_of(terms: tuple[Loss, torch.Tensor | float]) -> Any:
    """Returns the weight of a loss in the mean over micro-batches: the count of a Mean, or that of its samples."""
    loss, weight = terms
    return loss.count if isinstance(loss, Mean) else weight


def _either(first: torch.Tensor | bool, second: torch.Tensor | bool) -> torch.Tensor | bool:
    """Returns `first or second`, where either may be known to the device only."""
    if first is True or second is False:
        return first
    return second if first is False or second is True else first | second


def _without_nan(loss: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
    """Returns the loss, or 0 if its weight is 0, because the mean over zero labels is NaN."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, loss, 0.0)
    return loss if weight else torch.zeros_like(loss)


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Returns the 2-norm of all gradients together; torch's own helper regroups them on every call (30 µs)."""
    has_short = {gradient.dtype for gradient in gradients} & SHORT_DTYPES
    norms = norms_of(gradients) if has_short else list(torch._foreach_norm(gradients))
    first = norms[0]
    for norm in norms[1:]:
        if norm.dtype != first.dtype or norm.device != first.device:
            dtype = reduce(torch.promote_types, {each.dtype for each in norms})
            norms = [each.to(device=first.device, dtype=dtype) for each in norms]
            break
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _narrow_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Rounds gradients to the dtype of their parameters, which most optimizers need.

    Optimizers with `state` or `master_weights` compute in fp32 and keep them.
    """
    for group in optimizer.param_groups:
        if not group.get("master_weights") and not group.get("state"):
            for parameter in group["params"]:
                if parameter.dtype in SHORT_DTYPES:
                    set_gradient_dtype(parameter, parameter.dtype)


def _merge_metric(values: list[tuple[Any, int]]) -> Any:
    """Merges a metric over micro-batches: Means exactly, scalars weighted by samples; for other objects, keeps the
    last."""
    counted = [(value, samples) for value, samples in values if samples] or values[-1:]
    if all(isinstance(value, Mean) for value, _ in counted):
        means = [value.detach() for value, samples in counted if samples]
        return sum(means[1:], means[0]) if means else Mean(0.0, 0.0)
    if all(_is_scalar(value) for value, _ in counted):
        # A value that is still sharded depends on the parameters alone: it is the same in every micro-batch.
        if len(counted) == 1 or is_sharded(counted[-1][0]):
            return detached_copy(counted[-1][0])
        total = sum(detached_copy(value) * samples for value, samples in counted)
        return total / sum(samples for _, samples in counted)
    # Cloned, because a metric that aliases a buffer would change before it is logged.
    return detached_copy(counted[-1][0])


def _is_scalar(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Real)
