"""`tune_learning_rate`, `tune_micro_batch` and `tune_workers`: measure a run's settings on a copy of it.

The copy starts from the run's first weights in a temporary folder; it has no user hooks, writers, evaluations or
checkpoints. The measurements are in autotune/. commands/tune.py shows the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainwright.api.run import Interrupted, start_up
from trainwright.autotune.activation_checkpointing import wants_budget
from trainwright.autotune.learning_rate import RangeTest, RangeTestResult, ramp
from trainwright.autotune.micro_batch import TRIAL_DATA, MicroBatchTime, measure_micro_batches
from trainwright.autotune.trial_run import TrialEnded, trial_config
from trainwright.autotune.workers import WARMUP_STEPS, DataWait, WorkerTime
from trainwright.build.components import Build
from trainwright.build.run import build_alone, build_trainer
from trainwright.config import RunConfig, resolve_batch
from trainwright.config.problems import suggest
from trainwright.errors import ConfigError, DataError
from trainwright.hooks.preemption import ObeyPreemption
from trainwright.log import outlive_console
from trainwright.loop.hook import Hook
from trainwright.loop.trainer import Builder, Trainer
from trainwright.registry.trust import reject_untrusted
from trainwright.writers.writer import Writer

MEMORY_HEADROOM = 0.1
"""The fraction of the memory that a suggested micro-batch leaves free."""
_ABOUT_EQUAL = 1.03
_FOR_WORKERS = ("prefetch_factor", "timeout", "multiprocessing_context")
"""Arguments of the DataLoader that it accepts with worker processes only."""

Progress = Callable[[int, float, float], None]


def tune_learning_rate(
    config: RunConfig,
    folder: Path,
    *,
    lowest: float = 1e-8,
    highest: float = 10.0,
    num_steps: int = 200,
    optimizer: str | None = None,
    progress: Progress | None = None,
) -> tuple[RangeTestResult, str | None]:
    """Runs the learning-rate range test of a run; returns its curve and the name of the setting of the rate.

    `folder` is empty, the same on every rank, and deleted by the caller. `optimizer` names one of several; the rates
    of the others stay as configured. The name of the setting is None if the program creates the optimizer.
    """
    reject_untrusted(config)
    name, setting, value = _rate_setting(config, optimizer)
    settings = {
        "anomalies.non_finite": "skip",  # a loss that is not finite ends the test
        "anomalies.spike": "ignore",
        "anomalies.max_anomalies": num_steps,
    }
    trial = trial_config(config, folder, num_steps=num_steps, settings=settings)
    test = RangeTest(name, ramp(lowest, highest, num_steps), setting=value, progress=progress)
    _run_trial(trial, test)
    return test.result(), setting


def tune_micro_batch(
    config: RunConfig,
    folder: Path,
    *,
    largest: int | None = None,
    progress: Callable[[MicroBatchTime], None] | None = None,
) -> list[MicroBatchTime]:
    """Measures steps with micro-batches of doubling size, up to the first that does not fit into memory.

    `largest` is the last size; default: the samples of one rank in an update. Sizes that leave less than a tenth of
    the memory free do not fit. A step of several ranks additionally sums gradients.
    """
    reject_untrusted(config)
    if wants_budget(config):
        raise ConfigError(
            "tune batch: model.activation_checkpointing.budget: auto depends on the micro-batch size. Set a number.",
            where=config.origin("model.activation_checkpointing"),
        )
    if config.trainer.optimizer_in_backward:
        raise ConfigError(
            "tune batch: trainer.optimizer_in_backward needs one micro-batch per update, so there is no choice.",
            where=config.origin("trainer.optimizer_in_backward"),
        )
    if largest is None:
        plan = resolve_batch(config, 1)
        largest = plan.micro_batch_size * plan.gradient_accumulation_steps
    settings = {
        "trainer.global_batch_size": largest,
        "trainer.micro_batch_size": largest,
        "trainer.gradient_accumulation_steps": None,
        **TRIAL_DATA,
    }
    trial = trial_config(config, folder, num_steps=1, settings=settings)
    with start_up():
        trainer = build_alone(trial, folder)
        return measure_micro_batches(trainer, largest, headroom=MEMORY_HEADROOM, progress=progress)


def best_micro_batch(times: Sequence[MicroBatchTime]) -> MicroBatchTime | None:
    """Returns the size with the shortest time per sample, the smallest among about equal ones; None if nothing fits."""
    fitting = [(each.seconds_per_sample, each) for each in times if each.seconds_per_sample is not None]
    if not fitting:
        return None
    shortest = min(seconds for seconds, _ in fitting)
    return next(each for seconds, each in fitting if seconds <= _ABOUT_EQUAL * shortest)


def tune_workers(
    config: RunConfig,
    folder: Path,
    *,
    counts: Sequence[int],
    num_steps: int = 30,
    progress: Callable[[WorkerTime], None] | None = None,
) -> list[WorkerTime]:
    """Measures how long the steps of a run wait for data with each number of loader processes."""
    reject_untrusted(config)
    found = []
    for count in counts:
        settings: dict[str, Any] = {"data.num_workers": count}
        if count == 0:
            settings["data.loader"] = {
                name: value for name, value in config.data.loader.items() if name not in _FOR_WORKERS
            }
        trial = trial_config(config, folder / str(count), num_steps=WARMUP_STEPS + num_steps, settings=settings)
        hook = DataWait(count, num_steps)
        _run_trial(trial, hook)
        if hook.time is None:
            raise DataError(
                f"tune workers: the training data ended before {WARMUP_STEPS + num_steps} steps. Use fewer --steps."
            )
        found.append(hook.time)
        if progress is not None:
            progress(hook.time)
    return found


def _rate_setting(config: RunConfig, optimizer: str | None) -> tuple[str | None, str | None, float | None]:
    """Returns the name of the optimizer to test, the name of the setting of its rate, and the value of that setting.

    The name of the optimizer is None if the run has a single optimizer.
    """
    section, several = config.trainer, config.trainer.optimizers
    if several:
        names = list(several)
        if optimizer is None and len(names) > 1:
            raise ConfigError(
                f"tune lr: the run has several optimizers ({', '.join(names)}). Name one: --optimizer {names[0]}.",
                where=config.origin("trainer.optimizers"),
            )
        name = optimizer or names[0]
        if name not in several:
            raise ConfigError(
                f"--optimizer: there is no optimizer {name!r}. {suggest(name, names)}",
                where=config.origin("trainer.optimizers"),
            )
        component, path = several[name].optimizer, f"trainer.optimizers.{name}.optimizer.lr"
        return name, path, _number(component.arguments.get("lr"))
    if section.optimizer is not None and optimizer is not None:
        raise ConfigError(
            f"--optimizer {optimizer}: the run has one optimizer, trainer.optimizer. Omit the option.",
            where=config.origin("trainer.optimizer"),
        )
    if section.optimizer is None:
        return optimizer, None, None
    return None, "trainer.optimizer.lr", _number(section.optimizer.arguments.get("lr"))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _run_trial(config: RunConfig, hook: Hook) -> None:
    """Builds the copy with the hook and trains it until the hook ends it."""
    with start_up() as starting, outlive_console():
        trainer = build_trainer(config, _trial_class(config, hook), evaluates=False)
        starting.only_note()  # the loop handles signals itself
        try:
            trainer.train()
        except TrialEnded:
            pass
        finally:
            trainer.ranks.part()
    if trainer.stop_reason is not None:
        raise Interrupted(trainer.stop_reason)


def _trial_class(config: RunConfig, hook: Hook) -> type[Trainer]:
    """Returns the run's trainer without its own hooks and writers, which may have effects outside of the copy."""
    kind = Build(config).trainer_class()
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}

    def build_hooks(cls: type[Trainer], build: Builder) -> list[Hook]:
        build.used.add("hooks")  # type: ignore[attr-defined]
        return [ObeyPreemption(config.preemption), hook]

    def build_writers(cls: type[Trainer], build: Builder) -> list[Writer]:
        build.used.add("writers")  # type: ignore[attr-defined]
        return []

    methods = {"build_hooks": classmethod(build_hooks), "build_writers": classmethod(build_writers)}
    return type(kind.__name__, (kind,), {**names, **methods})
