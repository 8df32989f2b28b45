"""A step that ran out of memory, explained with what the run knows; the words are memory/out_of_memory.py's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.errors import OutOfMemory
from trainwright.memory.out_of_memory import out_of_memory

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer


def explain_memory(trainer: Trainer, error: Exception) -> OutOfMemory:
    """Writes what holds the memory and what the config could change, and returns an error that says so."""
    phase, step, _ = trainer.phases.current
    return out_of_memory(
        error,
        step=step,
        folder=trainer.folder,
        model=trainer.model,
        optimizers=trainer.optimizers,
        config=trainer.config,
        backend=trainer.backend,
        rank=trainer.ranks.rank,
        in_evaluation=phase == "evaluate",
    )
