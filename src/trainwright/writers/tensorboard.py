"""Writes TensorBoard event files into `tensorboard/` in the run folder. Needs the extra `tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.errors import ConfigError
from trainwright.events import EventStorage
from trainwright.writers.writer import Writer


class TensorBoardWriter(Writer):
    """Adds the numbers of each log line as scalars. Opened at the first line; a resumed run hides repeated steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder) / "tensorboard"
        self._events: Any = None

    def write(self, storage: EventStorage) -> None:
        """Adds the numbers of the line at its step; texts are only in metrics.json."""
        step = storage.line["step"]
        if self._events is None:
            self._events = self._open(step)
        for name, value in storage.line.items():
            if name != "step" and isinstance(value, int | float):
                self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def _open(self, step: int) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "writers: tensorboard is not installed. Run `pip install 'trainwright[tensorboard]'`."
            ) from error
        # purge_step: values that an earlier process wrote at or after this step are hidden.
        return SummaryWriter(str(self.folder), purge_step=step)
