"""The settings of the trial runs of learning_rate.py and workers.py, and their end without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.config import RunConfig

_LIMITS_AND_PERIODS: Mapping[str, Any] = {
    "trainer.max_epochs": None,
    "trainer.max_samples": None,
    "trainer.max_tokens": None,
    "evaluation.every_steps": None,
    "evaluation.every_epochs": None,
    "checkpoint.folder": None,
    "checkpoint.every_steps": None,
    "checkpoint.every_epochs": None,
    "checkpoint.every_minutes": None,
    "checkpoint.every_samples": None,
    "checkpoint.keep_best": None,
    "log.every_epochs": None,
    "preemption.requeue": False,
}


class TrialEnded(Exception):  # noqa: N818  # not an error
    """Raised by a hook in `after_step` to end the loop before it evaluates or saves."""


def trial_config(config: RunConfig, folder: Path, *, num_steps: int, settings: Mapping[str, Any]) -> RunConfig:
    """Returns the config of a run of a few steps in a temporary folder, with the batches of the run.

    It has no schedule, and evaluates, writes and saves nothing. `settings` replace others.
    """
    schedules = {"trainer.schedule": None} if config.trainer.schedule is not None else {}
    for name, section in config.trainer.optimizers.items():
        if section.schedule is not None:
            schedules[f"trainer.optimizers.{name}.schedule"] = None
    return config.derive(
        {
            **_LIMITS_AND_PERIODS,
            "output_dir": str(folder),
            "trainer.max_steps": num_steps,
            "log.every_steps": num_steps,
            **schedules,
            **settings,
        }
    )
