"""Stops a run whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from trainwright.config.problems import suggest
from trainwright.errors import ConfigError
from trainwright.loop.hook import Hook


class EarlyStopping(Hook):
    """Stops after `patience` evaluations in a row without an improvement of more than `min_delta`.

    A NaN is not an improvement. A stopped run remains stopped when it is started again.
    """

    def __init__(
        self, metric: str, patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"early_stopping.mode: {mode!r} is neither min nor max.")
        if patience < 1:
            raise ConfigError(f"early_stopping.patience: {patience} is not a positive number of evaluations.")
        self.metric = metric
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self.best: float | None = None
        self.num_bad = 0

    def before_train(self) -> None:
        """Stops immediately if the run was stopped before."""
        if self.trainer.evaluated_sets:  # without any set the run does not evaluate
            names, label = self.trainer.metric_names, "early_stopping.metric"
            names.check(self.metric, label=label, mode=self.mode, where=self._where)
        self._stop_if_due()

    def after_eval(self, logs: Mapping[str, Any]) -> None:
        """Counts evaluations without improvement."""
        if self.metric not in logs:
            if any(key.partition("/")[0] == self.metric.partition("/")[0] for key in logs):
                advice = suggest(self.metric, logs, cutoff=0.8)
                raise ConfigError(
                    f"early_stopping.metric: no evaluation returns {self.metric!r}. {advice}", where=self._where
                )
            return  # an evaluation of the test set, or a failed one
        value = float(logs[self.metric])
        if self._improves(value):
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1
        self._stop_if_due()

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and the number of evaluations since."""
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the best value and the count."""
        self.best, self.num_bad = state["best"], state["num_bad"]

    @property
    def _where(self) -> object | None:
        """The source location of the setting; None for a hook that was given in code."""
        config = self.trainer.config
        for number, each in enumerate(config.hooks):
            if each.arguments.get("metric") == self.metric and "early_stopping" in each.type:
                return config.origin(f"hooks.{number}.metric")
        return None

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        return value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta

    def _stop_if_due(self) -> None:
        if self.num_bad >= self.patience:
            self.trainer.stop(f"{self.metric} has not improved on {self.best} for {self.num_bad} evaluations")
