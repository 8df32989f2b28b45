"""`tune_learning_rate`, `tune_micro_batch` and `tune_workers`: measure a run's settings on a copy of it.

The copy starts from the run's first weights in a temporary folder; it has no user hooks, writers, evaluations or
checkpoints. The measurements are in autotune/. commands/tune.py shows the results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.api.run import Interrupted, start_up
from trainwright.autotune.learning_rate import RangeTest, RangeTestResult, ramp
from trainwright.autotune.trial_run import TrialEnded, trial_config
from trainwright.build.components import Build
from trainwright.build.run import build_trainer
from trainwright.config import RunConfig
from trainwright.config.problems import suggest
from trainwright.errors import ConfigError
from trainwright.hooks.preemption import ObeyPreemption
from trainwright.log import outlive_console
from trainwright.loop.hook import Hook
from trainwright.loop.trainer import Builder, Trainer
from trainwright.registry.trust import reject_untrusted
from trainwright.writers.writer import Writer

logger = logging.getLogger(__name__)

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
    without_schedules: dict[str, Any] = {"trainer.schedule": None} if config.trainer.schedule is not None else {}
    without_schedules |= {
        f"trainer.optimizers.{each}.schedule": None
        for each, section in config.trainer.optimizers.items()
        if section.schedule is not None
    }
    trial = trial_config(config, folder, num_steps=num_steps).derive(
        {
            **without_schedules,
            "anomalies.non_finite": "skip",  # a loss that is not finite ends the test
            "anomalies.spike": "ignore",
            "anomalies.max_anomalies": num_steps,
        }
    )
    test = RangeTest(name, ramp(lowest, highest, num_steps), setting=value, progress=progress)
    _run_trial(trial, test)
    return test.result(), setting


def _rate_setting(config: RunConfig, optimizer: str | None) -> tuple[str | None, str | None, float | None]:
    """Returns the name of the optimizer to test, the name of the setting of its rate, and the value of that setting.

    The name of the optimizer is None if the run has one optimizer, whatever it is called.
    """
    section, several = config.trainer, config.trainer.optimizers
    if several:
        names = list(several)
        if optimizer is None and len(names) > 1:
            raise ConfigError(
                f"tune lr: the run has several optimizers. Name one: --optimizer {names[0]}. Known: {', '.join(names)}.",
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
            f"--optimizer {optimizer}: the run has one optimizer, trainer.optimizer. Leave the option out.",
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
