"""Writes `metrics.json`: one JSON object per line, each with `step`. Opened for appending at the first line.

Images and histograms go to `media/` (media_files.py), the use of the machine to `system.json` (system_log.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

from trainwright.errors import TrainwrightError
from trainwright.events import EventStorage
from trainwright.safe_text import json_text
from trainwright.writers.media_files import MediaFiles, cut_back_media
from trainwright.writers.system_log import SystemLog
from trainwright.writers.writer import RunInfo, Writer

FILE_NAME = "metrics.json"


class JsonLinesWriter(Writer):
    """Appends each log line to `metrics.json` in the run folder and flushes it, so that a kill loses none.

    A selection of images and histograms is stored in `media/`, within limits.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / FILE_NAME
        self._file: IO[str] | None = None
        self._media = MediaFiles(Path(folder))
        self._system: SystemLog | None = None

    def begin(self, run: RunInfo) -> None:
        """Stores the device; no file is created before the first line."""
        if run.backend is not None:
            self._system = SystemLog(self.path.parent, run.backend, step=run.step)

    def write(self, storage: EventStorage) -> None:
        """Appends the line with its texts. NaN and infinities are written as null."""
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        try:
            self._file.write(json_text({**storage.line, **storage.texts}, default=_as_text) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainwrightError(
                f"{self.path} cannot be written ({error.strerror}). Free some space and run the same command again: "
                "it resumes from the last checkpoint."
            ) from error
        step = storage.line["step"]
        self._media.add(step, storage.images, storage.histograms)
        if self._system is not None:
            self._system.sample(step)

    def close(self) -> None:
        """Closes the file."""
        if self._system is not None:
            self._system.close()
        if self._file is not None:
            self._file.close()
            self._file = None


def cut_back(folder: Path, last_step: int) -> None:
    """Removes lines and media after `last_step` and an incomplete line, because a resumed run writes them again."""
    cut_back_media(folder, last_step)
    path = folder / FILE_NAME
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= last_step]
    if kept == lines:
        return  # a finished run changes nothing
    replacement = path.with_suffix(".json.part")
    replacement.write_text("".join(kept), encoding="utf-8")
    replacement.replace(path)


def read_history(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the numbers in `metrics.json` by name, each with its step; null is NaN. Empty if there is no file."""
    path = folder / FILE_NAME
    histories: dict[str, list[tuple[int, float]]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        if math.isinf(_step_of(text)):
            continue
        line = json.loads(text)
        step = int(line.pop("step"))
        for name, value in line.items():
            number = math.nan if value is None else value
            if isinstance(number, int | float) and not isinstance(number, bool):
                histories.setdefault(name, []).append((step, number))
    return histories


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # incomplete: the process died


def _as_text(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
