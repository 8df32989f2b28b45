"""How a step runs: as it is written, with its forward compiled, or recorded once and replayed. Its meaning is the same.

The compiled forward is compiled_forward.py's, recording recorded_step.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainwright.config import RunConfig
from trainwright.errors import ConfigError
from trainwright.loop.graph_safety import look_before_first_step
from trainwright.loop.recorded_step import RecordedStep
from trainwright.parallel.collectives import Ranks

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer
    from trainwright.loop.update import StepResult


class Step:
    """Makes the updates of one run, in its mode."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._recorded = RecordedStep(trainer) if trainer.config.runtime.mode == "graph" else None
        self.run: Callable[[Any], StepResult] = trainer.train_step
        """Makes one update from one batch."""
        if trainer.config.runtime.mode != "eager":
            self.run = self._run_first

    def forget(self) -> None:
        """Forgets what was recorded: the run has gone back, and its optimizers hold other tensors now."""
        if self._recorded is not None:
            self._recorded.forget()

    def _run_first(self, batch: Any) -> StepResult:
        """Looks for what cannot be compiled before minutes go into compiling."""
        look_before_first_step(self._trainer, batch)
        self.run = self._trainer.train_step if self._recorded is None else self._recorded.run
        return self.run(batch)


def refuse_unrecorded(config: RunConfig, ranks: Ranks) -> None:
    """Refuses what cannot run as one graph."""
    if config.runtime.mode != "graph":
        return
    where = config.origin("runtime.mode")
    if config.runtime.precision == "fp16":
        raise ConfigError(
            "runtime.mode: graph does not go with precision fp16, whose loss scale the host follows. Use bf16, or "
            "mode compile.",
            where=where,
        )
    if ranks.size > 1:
        axes = ", ".join(f"{axis} {size}" for axis, size in ranks.mesh.sizes.items() if size > 1)
        raise ConfigError(
            f"runtime.mode: graph is for one process, and here are {ranks.size} ({axes}): what ranks tell each other "
            "within a step (FSDP2 on streams of its own) is not recorded. Use mode compile.",
            where=where,
        )
