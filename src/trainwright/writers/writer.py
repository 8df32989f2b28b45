"""The contract of a writer, and the facts about its run that a writer receives. Writers exist only on the first rank.

A writer that uploads to a service derives from `Tracker` (tracker.py).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from trainwright.backends.backend import Backend
from trainwright.config import RunConfig
from trainwright.events import EventStorage
from trainwright.safe_text import flat_settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInfo:
    """The facts about a run for its writers."""

    config: RunConfig
    """The config without the credentials of URLs."""
    name: str
    id: str
    """Created once for a run folder. It stays the same when the run resumes; `--fresh` creates another."""
    folder: Path
    step: int
    """The step at which training starts. Lines up to it were written by an earlier process."""
    is_resumed: bool
    """True if the run continues from a checkpoint."""
    backend: Backend | None = None
    """The device, for a writer that records its use."""

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The config as flat names and plain values (`trainer.optimizer.lr`: 0.001), for a service.

        Settings that are None are omitted. Values of settings whose name is that of a secret (`token`, `password`) are
        masked.
        """
        return flat_settings(self.config.to_dict())


class Writer:
    """Receives each log line: override `write`."""

    stores: ClassVar[Collection[str]] = ("images", "histograms", "texts")
    """The kinds of values that it writes in addition to numbers. The log warns about values that no writer of the run
    stores."""

    def begin(self, run: RunInfo) -> None:
        """Called once, before the first line."""

    def write(self, storage: EventStorage) -> None:
        """Called at each log line.

        `storage.line` is that line: `step`, then name → value. `storage.images`, `storage.histograms` and
        `storage.texts` are the values that were put since the previous line.
        """
        raise NotImplementedError(f"{type(self).__name__} must override write(storage).")

    def close(self) -> None:
        """Called once at the end, also after an error."""


def unstored_media(storage: EventStorage, writers: Iterable[Writer], *, warned: Collection[str]) -> set[str]:
    """Returns the kinds of media (images, histograms, texts) of a line that no writer stores; warns unless in
    `warned`."""
    writers = list(writers)
    missing = set()
    for kind in ("images", "histograms", "texts"):
        if writers and getattr(storage, kind) and not any(kind in each.stores for each in writers):
            missing.add(kind)
            if kind not in warned:
                names = ", ".join(getattr(storage, kind))
                advice = "Add json, tensorboard, wandb, mlflow or trackio to writers."
                logger.warning("No writer of this run stores %s (%s): they are dropped. %s", kind, names, advice)
    return missing
