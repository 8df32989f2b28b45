"""Sends the log to Trackio: to its local dashboard, a Hugging Face Space or a server. Needs the extra `trackio`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainwright.writers.tracker import LogLine, Tracker, without_channel
from trainwright.writers.writer import RunInfo

try:
    import trackio
except ImportError as error:
    raise ImportError(f"{error}. Install it: pip install 'trainwright[trackio]'") from error


class TrackioWriter(Tracker):
    """Logs to Trackio: numbers, images, histograms, texts and the settings of the run.

    Without `space_id` and `server_url` it writes to the local folder that `trackio show` reads. The Trackio run is
    called NAME-ID after the name and id of the run folder, so that it continues when training resumes.
    """

    service = "trackio"

    def __init__(
        self,
        project: str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
        group: str | None = None,
        artifacts: list[str] | str | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        super().__init__(artifacts, timeout_seconds)
        self._project = project
        self._arguments = {"space_id": space_id, "server_url": server_url, "group": group}
        self._run: Any = None

    def start(self, run: RunInfo) -> int:
        """Opens the run, or continues that of an earlier process."""
        self._run = trackio.init(
            project=self._project or os.environ.get("TRACKIO_PROJECT") or "trainwright",
            name=f"{run.name.replace('/', '-')}-{run.id}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
            **{name: value for name, value in self._arguments.items() if value is not None},
        )
        # Trackio has no public name for the last step; a run without steps starts at 0.
        next_step: int | None = getattr(self._run, "_next_step", None)
        return run.step if next_step is None else max(next_step - 1, 0)

    def send(self, line: LogLine) -> None:
        """Logs a line."""
        media = line.media
        values: dict[str, Any] = {**line.numbers}
        values |= {name: trackio.Markdown(text) for name, text in media.texts.items()}
        values |= {name: trackio.Image(without_channel(image)) for name, image in media.images.items()}
        values |= {
            name: trackio.Histogram(np_histogram=histogram.linear()) for name, histogram in media.histograms.items()
        }
        self._run.log(values, step=line.step)

    def upload(self, path: Path, name: str) -> None:
        """Logs a file or folder as an artifact of the run."""
        words = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
        self._run.log_artifact(str(path), name=words, type="run")

    def finish(self, *, failed: bool) -> None:
        """Sends the remaining lines."""
        self._run.finish()
