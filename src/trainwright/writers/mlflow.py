"""Sends the log to MLflow. Needs the extra `mlflow`; for a tracking server the package mlflow-skinny suffices."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from trainwright.writers.tracker import LogLine, Tracker
from trainwright.writers.writer import RunInfo

try:
    import mlflow
except ImportError as error:
    raise ImportError(f"{error}. Install it: pip install 'trainwright[mlflow]'") from error


_RUN_ID, _STEP = "trainwright.run_id", "trainwright.step"
_MAX_VALUE, _MAX_PARAMS, _MAX_METRICS = 500, 100, 1000  # limits of servers: a value, and one request


class MlflowWriter(Tracker):
    """Logs to MLflow: numbers as metrics, settings as params, images, and histograms and texts as artifacts.

    The MLflow run has the tag `trainwright.run_id`, by which it is found again when training resumes. The variables
    MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID apply where an argument is not given. A run that the
    program has opened with `mlflow.start_run()` is used and left open. A param cannot be changed, so a setting that
    changes later becomes a tag.
    """

    service = "mlflow"

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        artifacts: list[str] | str | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        super().__init__(artifacts, timeout_seconds)
        self._uri = tracking_uri
        self._experiment = experiment
        self._client: Any = None
        self._run_id = ""
        self._is_own = True
        self._active: str | None = None

    def begin(self, run: RunInfo) -> None:
        """Stores the run that the program has opened, which belongs to its thread, and starts the writer's thread."""
        active = mlflow.active_run()
        self._active = None if active is None else active.info.run_id
        super().begin(run)

    def start(self, run: RunInfo) -> int:
        """Opens the run, or continues that of an earlier process."""
        self._client = mlflow.MlflowClient(tracking_uri=self._uri)
        given = self._active or os.environ.get("MLFLOW_RUN_ID")
        self._is_own = given is None
        found = self._client.get_run(given) if given is not None else self._find_or_create(run)
        self._run_id = found.info.run_id
        if found.info.status != "RUNNING":
            self._client.update_run(self._run_id, status="RUNNING")
        self._log_settings(run, found)
        return int(found.data.tags.get(_STEP, 0)) if found.data.tags.get(_RUN_ID) == run.id else 0

    def send(self, line: LogLine) -> None:
        """Logs a line; the metrics and the tag with its step are one request, unless there are very many."""
        now = int(time.time() * 1000)
        metrics = [mlflow.entities.Metric(_key(name), value, now, line.step) for name, value in line.numbers.items()]
        while len(metrics) > _MAX_METRICS - 1:
            self._client.log_batch(self._run_id, metrics=metrics[: _MAX_METRICS - 1])
            metrics = metrics[_MAX_METRICS - 1 :]
        tag = mlflow.entities.RunTag(_STEP, str(line.step))
        self._client.log_batch(self._run_id, metrics=metrics, tags=[tag])
        for name, image in line.media.images.items():
            self._client.log_image(self._run_id, image, key=_key(name).replace("/", "."), step=line.step)
        for name, text in line.media.texts.items():
            self._client.log_text(self._run_id, text, f"texts/{_key(name)}/step-{line.step:08}.txt")
        for name, histogram in line.media.histograms.items():
            counts, edges = histogram.linear()
            values = {"counts": counts.tolist(), "edges": edges.tolist()}
            self._client.log_dict(self._run_id, values, f"histograms/{_key(name)}/step-{line.step:08}.json")

    def upload(self, path: Path, name: str) -> None:
        """Logs a file or folder as an artifact of the run."""
        if path.is_dir():
            self._client.log_artifacts(self._run_id, str(path), name)
        else:
            self._client.log_artifact(self._run_id, str(path), str(Path(name).parent) if "/" in name else None)

    def finish(self, *, failed: bool) -> None:
        """Ends the run, unless the program has opened it."""
        if self._is_own:
            self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")

    def _find_or_create(self, run: RunInfo) -> Any:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "trainwright"
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = self._client.search_runs([number], filter_string=f"tags.`{_RUN_ID}` = '{run.id}'", max_results=1)
        if found:
            return self._client.get_run(found[0].info.run_id)
        return self._client.create_run(number, run_name=run.name, tags={_RUN_ID: run.id})

    def _log_settings(self, run: RunInfo, found: Any) -> None:
        settings = {_key(name): str(value)[:_MAX_VALUE] for name, value in run.settings.items()}
        known = found.data.params
        params = [mlflow.entities.Param(name, value) for name, value in settings.items() if name not in known]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MAX_PARAMS])
        changed = [(name, value) for name, value in settings.items() if known.get(name, value) != value]
        tags = [mlflow.entities.RunTag(name, value) for name, value in [(_RUN_ID, run.id), *changed]]
        self._client.log_batch(self._run_id, tags=tags)


def _key(name: str) -> str:
    """Returns a name with the characters that MLflow permits."""
    return re.sub(r"[^\w\-. /]", "_", name)
