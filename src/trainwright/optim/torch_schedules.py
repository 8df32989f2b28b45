"""Learning-rate schedulers with state: torch's, those that follow torch's contract, and `reduce_on_plateau`.

    scheduler = TorchSchedule(OneCycleLR(optimizer, max_lr=1.0, total_steps=100))
    scheduler.advance(step, epoch)      # before update number step + 1, instead of scheduler.step() after each update

A scheduler writes `lr`, and some also write `momentum` or `betas`, into the optimizer's groups. schedules.py has the
schedules that are pure functions of the step.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainwright.backends.private_torch import version_of
from trainwright.errors import ConfigError

LENGTHS = ("total_steps", "T_max", "num_training_steps")
"""Arguments that are the number of updates of the run; the default is `max_steps`."""

_PROGRESS = frozenset(
    {"last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"}
)
"""The state of torch's schedulers that is not a setting."""


class ReduceOnPlateau(ReduceLROnPlateau):
    """Multiplies the rate by `factor` after `patience` evaluations without improvement of `metric`.

    The arguments are those of torch.optim.lr_scheduler.ReduceLROnPlateau; `metric` is the evaluation set and its
    metric, such as valid/loss.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        metric: str,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
    ) -> None:
        if not isinstance(metric, str):
            raise ConfigError(f"metric: must be text, such as valid/loss; got {metric!r}.")
        limits: Any = min_lr if isinstance(min_lr, int | float) else list(min_lr)
        super().__init__(
            optimizer,
            mode=mode,
            factor=factor,
            patience=patience,
            threshold=threshold,
            threshold_mode=threshold_mode,
            cooldown=cooldown,
            min_lr=limits,
            eps=eps,
        )
        self.metric = metric


class TorchSchedule:
    """Steps a scheduler once per update, per epoch, or per evaluation.

    `scheduler` follows the contract of torch.optim.lr_scheduler: it has an `optimizer`, whose groups it writes, and
    `step`, `state_dict` and `load_state_dict`. torch's ReduceLROnPlateau needs `metric`, and is stepped with its value
    after each evaluation. `where` is the source location of the setting, for errors.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        step_on: Literal["step", "epoch"] | None = None,
        metric: str | None = None,
        label: str = "trainer.schedule",
        where: object = None,
    ) -> None:
        self.scheduler = scheduler
        self.metric: str | None = metric or getattr(scheduler, "metric", None)
        self._label, self._where = label, where
        if isinstance(scheduler, ReduceLROnPlateau) and self.metric is None:
            self._reject("metric", "is required: the evaluation set and its metric, such as valid/loss.")
        if not isinstance(scheduler, ReduceLROnPlateau) and self.metric is not None:
            self._reject("metric", f"has no effect on {self.name}. Remove it.")
        if step_on not in (None, "step", "epoch"):
            self._reject("step_on", f"must be step or epoch, got {step_on!r}.")
        if self.metric is not None and step_on is not None:
            self._reject("step_on", "has no effect: the schedule is stepped after each evaluation. Remove it.")
        self.is_by_epoch = step_on == "epoch"
        """True if it is stepped once per epoch."""
        self._num_steps = 0
        """How often the scheduler was stepped."""
        self._known: dict[int, tuple[int | None, float]] = {}
        """The values that were written to rates that are tensors, by the number of the group, with their versions."""
        # torch replaces `step` on the object to count calls; a replaced step is not captured in graph mode.
        vars(scheduler.optimizer).pop("step", None)

    @property
    def name(self) -> str:
        """The name of the scheduler's class."""
        return type(self.scheduler).__name__

    def advance(self, step: int, epoch: int) -> None:
        """Steps the scheduler for the update that follows `step` updates, if it is the first of `epoch` for a scheduler
        by epochs."""
        if self.metric is None:
            wanted = epoch if self.is_by_epoch else step
            while self._num_steps < wanted:
                self._num_steps += 1
                self._step()

    def observe(self, logs: Mapping[str, float]) -> None:
        """Steps a scheduler that follows a metric with the logs of an evaluation."""
        if self.metric is None:
            return
        if self.metric not in logs:
            known = ", ".join(logs) or "nothing"
            self._reject("metric", f"no evaluation returns {self.metric!r}. The last one returned {known}.")
        self._num_steps += 1
        self._step(logs[self.metric])

    def check_metric(self, check: Callable[..., None]) -> None:
        """Calls `check(name, label=…, mode=…, where=…)`, which raises for a name that no evaluation returns."""
        if self.metric is not None:
            mode = getattr(self.scheduler, "mode", "min")
            check(self.metric, label=f"{self._label}.metric", mode=mode, where=self._where)

    def check_groups(self, num_groups: int) -> None:
        """Raises if groups were added to the optimizer that the scheduler does not have."""
        known = getattr(self.scheduler, "base_lrs", None)
        if isinstance(known, list) and len(known) < num_groups:
            raise ConfigError(
                f"{self._label}: {self.name} was built for {len(known)} parameter groups, but the optimizer has "
                f"{num_groups} now: a parameter with other settings has become trainable. Use a built-in schedule, "
                "such as cosine.",
                where=self._where,
            )

    def check_length(self, max_steps: int) -> None:
        """Raises if the scheduler ends before the run: torch's OneCycleLR cannot be stepped further."""
        total = getattr(self.scheduler, "total_steps", None)
        if isinstance(total, int) and not self.is_by_epoch and total < max_steps:
            self._reject(
                "total_steps",
                f"{self.name} ends after {total} steps, but the run has {max_steps}, and it has no rate for further "
                "steps. Use at least as many total_steps, or omit them; a run that was trained with fewer steps "
                "continues with the new number with --accept-changes.",
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the scheduler's state and how often it was stepped."""
        return {"num_steps": self._num_steps, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, keep_settings: bool = False) -> None:
        """Restores `state_dict`; with `keep_settings` only the progress, not the settings of the saved scheduler."""
        self._num_steps = int(state["num_steps"])
        saved = dict(state["scheduler"])
        if keep_settings and type(self.scheduler).__module__.startswith(("torch.", "trainwright.")):
            saved = {key: value for key, value in saved.items() if key in _PROGRESS or key not in vars(self.scheduler)}
        for key, value in saved.items():
            if isinstance(getattr(self.scheduler, key, None), Counter):  # the milestones of MultiStepLR
                saved[key] = Counter(value)
        self.scheduler.load_state_dict(saved)
        if keep_settings:  # the optimizer has its initial rates
            for group, rate in zip(self.scheduler.optimizer.param_groups, saved.get("_last_lr", ()), strict=False):
                group["lr"] = rate

    def _step(self, *metrics: float) -> None:
        with self._plain_rates(), warnings.catch_warnings():
            # It warns if `optimizer.step` was not called through the wrapper that it puts around it.
            warnings.filterwarnings("ignore", message=".*(lr_scheduler.step|optimizer.step)")
            self.scheduler.step(*metrics)

    @contextmanager
    def _plain_rates(self) -> Iterator[None]:
        """Lets the scheduler compute with plain numbers instead of rates on a device, which would synchronize."""
        groups = self.scheduler.optimizer.param_groups
        tensors = {number: group["lr"] for number, group in enumerate(groups) if isinstance(group["lr"], torch.Tensor)}
        for number, tensor in tensors.items():
            version, value = self._known.get(number, (None, 0.0))
            groups[number]["lr"] = value if version == version_of(tensor) else float(tensor)
        try:
            yield
        finally:
            for number, tensor in tensors.items():
                value, groups[number]["lr"] = float(groups[number]["lr"]), tensor
                tensor.fill_(value)
                rounded = float(torch.tensor(value, dtype=tensor.dtype))  # what a resumed run reads from the tensor
                self._known[number] = (version_of(tensor), rounded)

    def _reject(self, key: str, problem: str) -> None:
        raise ConfigError(f"{self._label}.{key}: {problem}", where=self._where)


def accepts_optimizer(target: Callable[..., Any]) -> bool:
    """Returns True for a class or function whose first parameter is the optimizer, as for torch's schedulers."""
    with suppress(TypeError, ValueError):  # a signature that cannot be read
        first = next(iter(inspect.signature(target).parameters), None)
        return first == "optimizer"
    return False


def missing_lengths(target: Callable[..., Any], given: Mapping[str, Any], length: int | None) -> dict[str, int]:
    """Returns the arguments of LENGTHS that a scheduler needs and the config omits, as `length`; none if that is
    None."""
    if length is None:
        return {}
    parameters = inspect.signature(target).parameters
    found = {}
    for name in LENGTHS:
        parameter = parameters.get(name)
        if parameter is None or name in given or "epochs" in given:
            continue
        if parameter.default is parameter.empty or name == "total_steps":
            found[name] = length
    return found


def is_scheduler(value: object) -> bool:
    """Returns True for an object that follows the contract of torch's schedulers."""
    return isinstance(value, LRScheduler) or all(hasattr(value, name) for name in ("optimizer", "step", "state_dict"))
