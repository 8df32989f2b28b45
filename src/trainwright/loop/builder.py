"""What a Trainer's `build_*` methods are offered: the defaults, made from the config's sections.

`build.py` fulfils this contract. It is stated here so that the loop knows nothing of how parts are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from trainwright.backends import Backend
from trainwright.checkpoint.open_store import AnyStore
from trainwright.config import BatchPlan, RunConfig
from trainwright.data.stream_loader import EvaluationData
from trainwright.events import EventStorage
from trainwright.loop.hook import Hook
from trainwright.loop.metrics import ConfiguredMetric
from trainwright.loop.task import Task
from trainwright.loop.update import Updater
from trainwright.parallel.collectives import Ranks
from trainwright.writers.writer import Writer


class Builder(Protocol):
    """Offers each part as the config describes it; `config` is the whole of it."""

    config: RunConfig

    def task(self) -> Task:
        """The `task` section, or the default task."""

    def model(self) -> torch.nn.Module:
        """The `model` section, or the task's model; on the CPU, in the run's randomness."""

    def optimizers(self, model: torch.nn.Module) -> Mapping[str, torch.optim.Optimizer]:
        """The `trainer.optimizer` or `trainer.optimizers` section, each over its own parameters."""

    def train_data(self) -> Any:
        """The training dataset."""

    def eval_data(self) -> Mapping[str, Any]:
        """The evaluation datasets by name."""

    def collator(self) -> Callable[[list[Any]], Any]:
        """The `data.collator` section."""

    def hooks(self) -> list[Hook]:
        """The default hooks, then those of the `hooks` section."""

    def writers(self) -> list[Writer]:
        """The `writers` section; empty on all ranks but the first."""


@dataclass(frozen=True)
class Surroundings:
    """What the builder hands a Trainer beside its named arguments. A user's trainer passes it on unread."""

    backend: Backend
    ranks: Ranks
    batch: BatchPlan
    max_steps: int
    updater: Updater
    storage: EventStorage
    hooks: list[Hook]
    writers: list[Writer]
    folder: Path
    store: AnyStore
    metrics: list[ConfiguredMetric] = field(default_factory=list)
    test_data: EvaluationData | None = None
