"""Writes TensorBoard event files into `tensorboard/` in the run folder. Needs the extra `tensorboard`."""

from __future__ import annotations

from numbers import Real
from pathlib import Path
from typing import Any

from trainwright.config import RunConfig
from trainwright.events import EventStorage
from trainwright.writers.writer import RunInfo, Writer

try:
    from torch.utils.tensorboard import SummaryWriter, summary
except ImportError as error:
    raise ImportError(f"{error}. Install it: pip install 'trainwright[tensorboard]'") from error


class TensorBoardWriter(Writer):
    """Adds the numbers, images, histograms and texts of each log line, and the settings of the run as hparams.

    Opened at the first line. Values that an earlier process wrote after the step from which a run resumes are hidden.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder) / "tensorboard"
        self._events: Any = None
        self._run: RunInfo | None = None
        self._session_end: Any = None

    def begin(self, run: RunInfo) -> None:
        """Stores the run; no file is created before the first line."""
        self._run = run

    def write(self, storage: EventStorage) -> None:
        """Adds everything at the line's step."""
        step = storage.line["step"]
        events = self._events = self._events or self._open(step, storage)
        for name, value in storage.line.items():
            if name == "step":
                continue
            if isinstance(value, Real):
                events.add_scalar(name, float(value), step)
            elif isinstance(value, str):
                events.add_text(name, value, step)
        for name, text in storage.texts.items():
            events.add_text(name, text, step)
        for name, image in storage.images.items():
            events.add_image(name, image, step, dataformats="HWC")
        for name, histogram in storage.histograms.items():
            counts, right_edges = histogram.buckets()
            if not len(counts):
                continue  # no finite value
            events.add_histogram_raw(
                name,
                min=histogram.minimum,
                max=histogram.maximum,
                num=histogram.num_values,
                sum=histogram.total,
                sum_squares=histogram.total_squares,
                bucket_limits=right_edges.tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
            )
        events.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._events is not None:
            if self._session_end is not None:
                self._events.file_writer.add_summary(self._session_end)
            self._events.close()
            self._events = None

    def _open(self, step: int, storage: EventStorage) -> Any:
        # purge_step: values that an earlier process wrote at or after this step are hidden.
        first_step = step if self._run is None else self._run.step + 1
        events: Any = SummaryWriter(str(self.folder), purge_step=first_step)
        if self._run is not None:
            # Not add_hparams(), which would add the metrics again as a separate run.
            names = [name for name, value in storage.line.items() if name != "step" and isinstance(value, Real)]
            metrics = dict.fromkeys([*names, *_evaluated_names(self._run.config)], 0.0)
            hparams: Any = summary.hparams  # untyped
            experiment, session, self._session_end = hparams(dict(self._run.settings), metrics)
            events.file_writer.add_summary(experiment)
            events.file_writer.add_summary(session)
        return events


def _evaluated_names(config: RunConfig) -> list[str]:
    """Returns the names of evaluation results according to the config, because the first line may precede an
    evaluation."""
    sets = [*config.data.eval, *config.data.cut_off]
    return [f"{each}/{metric}" for each in sets for metric in ("loss", *config.evaluation.metrics)]
