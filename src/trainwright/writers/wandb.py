"""Sends the log to Weights & Biases. Needs the extra `wandb`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from trainwright.safe_text import mask_secrets
from trainwright.writers.tracker import LogLine, Tracker, without_channel
from trainwright.writers.writer import RunInfo

try:
    import wandb
except ImportError as error:
    raise ImportError(f"{error}. Install it: pip install 'trainwright[wandb]'") from error

logger = logging.getLogger(__name__)

_NO_NETWORK = ("offline", "disabled", "dryrun")


class WandbWriter(Tracker):
    """Logs to Weights & Biases: numbers, images, histograms, texts and the settings of the run.

    The run has the id of the run folder, so that it continues when training resumes. Variables such as WANDB_PROJECT,
    WANDB_ENTITY and WANDB_MODE apply where an argument is not given. A run that the program has opened with
    `wandb.init()` is used and left open. If the service cannot be reached, the run is recorded in `wandb/` in the run
    folder, for `wandb sync`.
    """

    service = "wandb"

    def __init__(
        self,
        folder: Path,
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: str | None = None,
        artifacts: list[str] | str | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        super().__init__(artifacts, timeout_seconds)
        self._folder = Path(folder)
        self._arguments = {"entity": entity, "group": group, "tags": tags}
        self._project = project
        self._mode = mode
        self._run: Any = None
        self._is_own = True

    def begin(self, run: RunInfo) -> None:
        """Asks for an API key in a terminal if there is none, and starts the thread."""
        mode = self._mode or os.environ.get("WANDB_MODE", "online")
        if mode not in _NO_NETWORK and wandb.run is None and sys.stdin is not None and sys.stdin.isatty():
            try:
                wandb.login(timeout=60)  # here, because a thread must not read from the terminal
            except Exception as error:
                logger.warning("wandb could not log in: %s", mask_secrets(str(error)))
        super().begin(run)

    def start(self, run: RunInfo) -> int:
        """Opens the run, or continues that of an earlier process."""
        if wandb.run is not None:
            self._run, self._is_own = wandb.run, False
            self._run.config.update(dict(run.settings), allow_val_change=True)
        else:
            self._run = self._open(run)
        # Not wandb's own step, which wandb.log() in user code advances.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step", step_sync=True)
        # Offline, earlier processes are unknown, so each folder has the whole history, and the newest replaces the
        # others when they are synchronized.
        return int(self._run.summary.get("step", 0)) if self._run.resumed else 0

    def send(self, line: LogLine) -> None:
        """Logs a line."""
        values: dict[str, Any] = {"step": line.step, **line.numbers, **line.media.texts}
        values |= {name: wandb.Image(without_channel(image)) for name, image in line.media.images.items()}
        values |= {
            name: wandb.Histogram(np_histogram=histogram.linear()) for name, histogram in line.media.histograms.items()
        }
        self._run.log(values)

    def upload(self, path: Path, name: str) -> None:
        """Logs a file or folder as an artifact of the run."""
        words = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
        artifact = wandb.Artifact(f"{self._run.id}-{words}", type="run")
        artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self, *, failed: bool) -> None:
        """Ends the run, unless the program has opened it."""
        if self._is_own:
            self._run.finish(exit_code=int(failed))

    def _open(self, run: RunInfo) -> Any:
        arguments: dict[str, Any] = {
            **{name: value for name, value in self._arguments.items() if value is not None},
            "project": self._project or os.environ.get("WANDB_PROJECT") or "trainwright",
            "name": os.environ.get("WANDB_NAME") or run.name,
            "id": os.environ.get("WANDB_RUN_ID") or run.id,  # a sweep's agent sets it
            "resume": "allow",
            "config": dict(run.settings),
            "dir": os.environ.get("WANDB_DIR") or str(self._folder),
        }
        # A short run that ends in the meantime must have time to be recorded offline.
        limits = {"init_timeout": self.timeout_seconds / 3, "finish_timeout": self.timeout_seconds}
        settings = wandb.Settings(**{name: value for name, value in limits.items() if hasattr(wandb.Settings(), name)})
        try:
            return wandb.init(**arguments, mode=self._mode, settings=settings)
        except wandb.errors.Error as error:
            reason = mask_secrets(str(error)).strip().split("\n", 1)[0]
            logger.warning(
                "wandb cannot be reached (%s). The run is recorded in %s; upload it later with `wandb sync`.",
                reason,
                self._folder / "wandb",
            )
            wandb.teardown()  # otherwise the id counts as in use
            return wandb.init(**arguments, mode="offline", settings=settings)
