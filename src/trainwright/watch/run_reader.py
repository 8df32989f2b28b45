"""Reads one run folder for a page: its state, curves, marks, media, settings and log.

Files are read again after changes, and never written. They may be missing, damaged or deleted at any time, and
may have been written by others: a file that cannot be read is empty, and nothing outside of the run folder is opened.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import yaml

from trainwright.checkpoint.listing import CHECKPOINTS
from trainwright.checkpoint.retention import best_step
from trainwright.config import Component
from trainwright.config.sections import benchmark_name
from trainwright.errors import TrainwrightError
from trainwright.safe_text import flat_settings, safe
from trainwright.watch.listing import (
    CONFIG_FILE,
    LOG_FILE,
    METRICS_FILE,
    Checkpoints,
    RunPlan,
    RunSummary,
    open_regular,
    read_checkpoints,
    summarize_files,
)
from trainwright.watch.series import BLOCK, Curve, MetricsFile

logger = logging.getLogger(__name__)

SYSTEM_FILE, MEDIA_FOLDER, MEDIA_INDEX = "system.json", "media", "index.json"
"""As in writers/system_log.py and writers/media_files.py, which import torch. A test compares them."""
ENVIRONMENT_FILE, MODEL_FILE, ANOMALIES_FOLDER = "environment.json", "model.json", "anomalies"
"""As in checkpoint/run_folder.py and anomaly/reports.py."""
SYSTEM_PREFIX = "system/"
"""Before the names of system.json, such as `system/memory`."""

_INLINE_BYTES = 2**21
"""The amount of metrics.json that is read within a request; more is read by a thread, while a sample is shown."""
_MAX_FILE = 2**22  # of a small file
_MAX_SYSTEM_FILE = 2**25  # of system.json: a line per minute for three months
_MAX_LOG = 2**17  # of the log per request
_MAX_SETTINGS = 5000
_MAX_DEPTH = 50  # of nested settings
_MAX_ANOMALIES = 200
_MAX_MAP_POINTS = 400  # of the maps from steps to seconds and tokens
_IMAGE_NAME = re.compile(r"\d{8,}-\d+\.png")
_LOWER_IS_BETTER = re.compile(
    r"loss|perplexity|error|(^|[/_])(mse|mae|rmse|nll|wer|cer|ter|bpb|bpc|fid)($|[/_])|bits_per", re.I
)
_T = TypeVar("_T")

FileKey = tuple[int, int, int]
"""The inode, size and modification time of a file; zeros if there is none."""


@dataclass(frozen=True)
class System:
    """The contents of system.json: the starts of processes, and the use of the machine."""

    starts: tuple[tuple[int, float], ...] = ()
    """(step, time) at which each process started."""
    seconds: Curve = field(default_factory=lambda: Curve(np.zeros(0), np.zeros(0)))
    """Seconds of training by step, without the time between processes."""
    curves: Mapping[str, Curve] = field(default_factory=dict)


class Loader:
    """A thread that reads long files in order, block by block."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], bool]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="watch-loader").start()

    def add(self, read_more: Callable[[], bool]) -> None:
        """Adds a function that is called until it returns False."""
        self._queue.put(read_more)

    def _work(self) -> None:
        while True:
            read_more = self._queue.get()
            try:
                while read_more():
                    time.sleep(0.0005)  # lets requests run
            except Exception:  # such as a MemoryError; the other files are still read
                logger.exception("A file cannot be read.")


class RunReader:
    """One run folder. Methods may be called from several threads."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.metrics = MetricsFile(path / METRICS_FILE)
        self._loading: MetricsFile | None = None
        self._cache: dict[str, tuple[Any, Any]] = {}
        self._lock = threading.RLock()

    # The state of the run.

    def version(self) -> dict[str, Any]:
        """Returns a text per part of the page that changes when the part does; `loading` is True while curves load."""
        loading = self._loading is not None
        parts = {
            "curves": (METRICS_FILE, SYSTEM_FILE, ANOMALIES_FOLDER, CHECKPOINTS, CONFIG_FILE),
            "media": (METRICS_FILE, f"{MEDIA_FOLDER}/{MEDIA_INDEX}"),
            "log": (LOG_FILE,),
            "about": (CONFIG_FILE, ENVIRONMENT_FILE, MODEL_FILE, ANOMALIES_FOLDER, CHECKPOINTS),
        }
        keys = {file: self._key(file) for files in parts.values() for file in files}
        found = {part: f"{hash(tuple(keys[file] for file in files)):x}" for part, files in parts.items()}
        return {
            **found,
            "curves": f"{found['curves']}{'-sample' * (loading or self.metrics.is_sample)}",
            "loading": loading,
        }

    def summary(self) -> RunSummary:
        """Returns the state of the run."""
        return summarize_files(self.path, self.name, plan=self.plan(), checkpoints=self.checkpoints())

    def checkpoints(self) -> Checkpoints:
        """Returns the checkpoints in the run folder."""
        return self._cached("checkpoints", self._key(CHECKPOINTS), lambda: read_checkpoints(self.path))

    def plan(self) -> RunPlan:
        """Returns the plan of the run from its settings, which are not validated."""
        settings = self.raw_settings()
        if not settings:
            return RunPlan(problem=f"{CONFIG_FILE} cannot be read")
        trainer, log = _section(settings, "trainer"), _section(settings, "log")
        checkpoint = _section(settings, "checkpoint")
        best = _section(checkpoint, "keep_best")
        metric = best.get("metric")
        return RunPlan(
            max_steps=_whole(trainer.get("max_steps")),
            log_every_steps=_whole(log.get("every_steps")),
            best_metric=metric if isinstance(metric, str) else None,
            best_mode="max" if best.get("mode") == "max" else "min",
            has_own_checkpoints=checkpoint.get("folder") is None,
        )

    # Settings and facts.

    def raw_settings(self) -> dict[str, Any]:
        """Returns config.yaml as plain values; empty if it cannot be read."""
        return self._cached("settings", self._key(CONFIG_FILE), self._read_settings)

    def _read_settings(self) -> dict[str, Any]:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # validating all settings takes twenty times as long
        text, depth = self.read_text(CONFIG_FILE), 0
        try:
            # Saved settings have no aliases, which may multiply without bound, and libyaml crashes the process for
            # thousands of nested brackets.
            for event in yaml.parse(text, loader):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if depth > _MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                    return {}
            found = loader(text).get_single_data()
        except (yaml.YAMLError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def settings(self) -> dict[str, Any]:
        """Returns the settings as flat names and values; secrets are masked."""
        flat = list(flat_settings(self.raw_settings()).items())[:_MAX_SETTINGS]
        return {safe(name): safe(value) if isinstance(value, str) else value for name, value in flat}

    def environment(self) -> dict[str, str]:
        """Returns the versions and hardware of the last start."""
        found = self._read_json(ENVIRONMENT_FILE)
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    def model(self) -> dict[str, Any]:
        """Returns the summary of the model: class, num_parameters, num_frozen, modules; empty if there is none."""
        found = self._read_json(MODEL_FILE)
        if not isinstance(found, dict):
            return {}
        rows = [row for row in _list(found.get("modules")) if isinstance(row, list) and len(row) == 4]
        return {
            "class": str(found.get("class", "")),
            "num_parameters": _whole(found.get("num_parameters")) or 0,
            "num_frozen": _whole(found.get("num_frozen")) or 0,
            "modules": [[str(name), str(kind), _whole(size) or 0, _whole(own) or 0] for name, kind, size, own in rows],
        }

    # Curves.

    def load(self, loader: Loader | None = None) -> None:
        """Reads the new lines of metrics.json. The loader reads a long file, while a sample of it is shown."""
        with self._lock:
            if self._loading is not None:
                return
            if loader is None or self.metrics.unread_bytes() <= _INLINE_BYTES:
                self.metrics.update()
                return
            if not self.metrics.num_values:
                self.metrics.sample()
            loading = self._loading = MetricsFile(self.path / METRICS_FILE)

        def read_more() -> bool:
            if loading.update(max_bytes=BLOCK):
                return True
            with self._lock:
                self.metrics, self._loading = loading, None
            return False

        loader.add(read_more)

    def names(self) -> list[str]:
        """Returns the names of all curves."""
        return [*self.metrics.names, *self.system().curves]

    def curve(self, name: str) -> Curve:
        """Returns a curve of metrics.json, or with the prefix `system/` of system.json."""
        if name not in self.metrics.names and name.startswith(SYSTEM_PREFIX):
            return self.system().curves.get(name, System().seconds)
        return self.metrics.curve(name)

    def describe(self, loader: Loader | None = None) -> dict[str, Any]:
        """Returns the names of the curves with their last and best values, the marks and the axes."""
        self.load(loader)
        sets, names = self.evaluation_sets(), []
        for name in self.names():
            mode, curve = self.best_mode(name, sets), self.curve(name)
            best = None if mode is None else curve.best(mode)
            names.append({"name": safe(name), "mode": mode, "last": curve.last(), "best": best})
        return {"names": names, "sets": sets, "marks": self.marks(), "axes": self.axes()}

    def evaluation_sets(self) -> list[str]:
        """Returns the names of the evaluation sets and benchmarks, which are the prefixes of their metrics."""
        data, evaluation = _section(self.raw_settings(), "data"), _section(self.raw_settings(), "evaluation")
        benchmarks = [each for each in _list(evaluation.get("benchmarks")) if isinstance(each, dict)]
        names = list(_section(data, "eval"))
        for each in benchmarks:
            with suppress(TrainwrightError):  # not a component
                names.append(benchmark_name(Component.from_mapping(each)))
        return list(dict.fromkeys([*map(str, names), "eval", "valid", "test"]))  # the last ones are those of a split

    def best_mode(self, name: str, sets: list[str]) -> str | None:
        """Returns whether a smaller (`min`) or larger (`max`) value is better; None for other metrics."""
        prefix, _, metric = name.partition("/")
        if not metric or prefix not in sets:
            return None
        plan = self.plan()
        if name == plan.best_metric:
            return plan.best_mode
        return "min" if _LOWER_IS_BETTER.search(metric) else "max"

    def system(self) -> System:
        """Returns the contents of system.json."""
        return self._cached(
            "system",
            self._key(SYSTEM_FILE),
            lambda: read_system(self.read_text(SYSTEM_FILE, max_bytes=_MAX_SYSTEM_FILE)),
        )

    def axes(self) -> dict[str, list[list[float]]]:
        """Returns maps from steps to `seconds` of training and to `tokens`, each as [steps, values], where known."""
        rates = {name: self.metrics.curve(name) for name in ("seconds_per_step", "tokens_per_second", "tokens_seen")}
        seconds, per_step = self.system().seconds, rates["seconds_per_step"]
        if len(seconds.steps) < 2 and len(per_step.steps):
            seconds = _total(per_step.steps, np.nan_to_num(per_step.values))
        tokens = rates["tokens_seen"]
        per_second = rates["tokens_per_second"]
        if not len(tokens.steps) and len(per_second.steps) and len(per_step.steps):
            duration = np.interp(per_second.steps, per_step.steps, np.nan_to_num(per_step.values))
            tokens = _total(per_second.steps, np.nan_to_num(per_second.values) * duration)
        found = {}
        for name, curve in (("seconds", seconds), ("tokens", tokens)):
            if len(curve.steps):
                index = np.unique(np.linspace(0, len(curve.steps) - 1, _MAX_MAP_POINTS).astype(int))
                values = np.maximum.accumulate(np.nan_to_num(curve.values[index]))
                found[name] = [[0.0, *curve.steps[index].tolist()], [0.0, *values.tolist()]]
        return found

    def marks(self) -> list[dict[str, Any]]:
        """Returns the events of the run by step: anomalies, restarts and checkpoints."""
        found = [{"kind": "anomaly", "step": each["step"], "text": each["message"]} for each in self.anomalies()]
        found += [
            {"kind": "restart", "step": step, "text": f"resumed after step {step}", "time": moment}
            for number, (step, moment) in enumerate(self.system().starts)
            if number or step
        ]
        best = self.best_checkpoint()
        for each in self.checkpoints().intact:
            text = f"{each.name}{', the best' if each.step == best else ''}"
            found.append({"kind": "best" if each.step == best else "checkpoint", "step": each.step, "text": text})
        return found

    def best_checkpoint(self) -> int | None:
        """Returns the step of the best checkpoint by the run's `checkpoint.keep_best`."""
        plan, metrics = self.plan(), {each.step: dict(each.metrics) for each in self.checkpoints().intact}
        if plan.best_metric is None:
            return None
        return best_step(metrics, metric=plan.best_metric, mode=plan.best_mode)

    def anomalies(self) -> list[dict[str, Any]]:
        """Returns the reports of anomalies by step: `step`, `kind`, `message`."""
        return self._cached("anomalies", self._key(ANOMALIES_FOLDER), self._read_anomalies)

    def _read_anomalies(self) -> list[dict[str, Any]]:
        found = []
        for folder in self._folders(ANOMALIES_FOLDER)[-_MAX_ANOMALIES:]:
            facts = self._read_json(f"{ANOMALIES_FOLDER}/{folder}/anomaly.json")
            step = _whole(facts.get("step")) if isinstance(facts, dict) else None
            if isinstance(facts, dict) and step is not None:
                message = safe(str(facts.get("message", "")))
                found.append({"step": step, "kind": str(facts.get("kind", "")), "message": message})
        return sorted(found, key=lambda each: each["step"])

    # Media and log.

    def media(self) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """Returns `images`, `histograms` and `texts` by name, each a list by step."""
        index = f"{MEDIA_FOLDER}/{MEDIA_INDEX}"
        found: dict[str, dict[str, list[dict[str, Any]]]] = {"images": {}, "histograms": {}}
        entries = self._cached("media", self._key(index), lambda: _read_media(self.read_text(index)))
        for entry in entries:
            found[entry["kind"] + "s"].setdefault(entry["name"], []).append(entry)
        texts = {
            name: [{"step": step, "text": safe(text)} for step, text in values]
            for name, values in self.metrics.texts().items()
        }
        return {**found, "texts": texts}

    def image(self, file: str) -> bytes | None:
        """Returns an image of the media folder; None if there is none with this name."""
        if not _IMAGE_NAME.fullmatch(file):
            return None
        content = self.read_bytes(f"{MEDIA_FOLDER}/{file}")
        return content if content.startswith(b"\x89PNG\r\n\x1a\n") else None

    def log(self, offset: int | None = None) -> dict[str, Any]:
        """Returns the log from an offset, or its end: `text`, the `offset` after it, and `begins` where it begins."""
        try:
            with open_regular(self.path / LOG_FILE) as file:
                size = file.seek(0, 2)
                first = max(size - _MAX_LOG, 0)
                begin = offset if offset is not None and first <= offset <= size else first
                file.seek(begin)
                content = file.read(_MAX_LOG)
        except OSError:
            return {"text": "", "offset": 0, "begins": 0}
        if begin and begin != offset:
            begin += content.find(b"\n") + 1
            content = content[content.find(b"\n") + 1 :]
        content = content[: content.rfind(b"\n") + 1]  # an incomplete line is read later
        text = safe(content.decode("utf-8", errors="replace"))
        return {"text": text, "offset": begin + len(content), "begins": begin}

    # Files.

    @cached_property
    def _real_path(self) -> Path:
        return self.path.resolve()

    def _inside(self, name: str) -> Path | None:
        """Returns the path of a file; None if a link points outside of the run folder, which others may have
        written."""
        path = self.path / name
        return path if path.resolve().is_relative_to(self._real_path) else None

    def read_bytes(self, name: str, *, max_bytes: int = _MAX_FILE) -> bytes:
        """Returns a file; empty if there is none, or if it is larger."""
        path = self._inside(name)
        try:
            if path is None or not path.is_file() or path.stat().st_size > max_bytes:
                return b""
            return path.read_bytes()
        except OSError:
            return b""

    def read_text(self, name: str, *, max_bytes: int = _MAX_FILE) -> str:
        """Returns a text file; empty if there is none, or if it is larger."""
        return self.read_bytes(name, max_bytes=max_bytes).decode("utf-8", errors="replace")

    def _read_json(self, name: str) -> Any:
        try:
            return json.loads(self.read_text(name))
        except (ValueError, RecursionError):
            return None

    def _folders(self, name: str) -> list[str]:
        try:
            return sorted(each.name for each in (self.path / name).iterdir() if each.is_dir())
        except OSError:
            return []

    def _key(self, name: str) -> FileKey:
        try:
            status = (self.path / name).stat()
        except OSError:
            return 0, 0, 0
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _cached(self, part: str, key: Any, read: Callable[[], _T]) -> _T:
        with self._lock:
            if part not in self._cache or self._cache[part][0] != key:
                self._cache[part] = (key, read())
            found: _T = self._cache[part][1]
            return found


def read_system(text: str) -> System:
    """Returns the contents of system.json. Lines of steps that a later process has repeated are omitted."""
    starts: list[tuple[int, float]] = []
    lines: list[tuple[int, float, dict[str, float]]] = []
    process_start, base = 0.0, 0.0
    for line in text.splitlines():
        try:
            facts = json.loads(line)
            step, moment = int(facts["step"]), float(facts["time"])
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            continue
        if not math.isfinite(moment):
            continue
        if facts.get("start") is True:
            starts.append((step, moment))
            lines = [each for each in lines if each[0] <= step]
            process_start, base = moment, lines[-1][1] if lines else 0.0
            continue
        numbers = {name: value for name, value in facts.items() if type(value) in (int, float)}
        lines.append((step, base + max(moment - process_start, 0.0), numbers))
    steps = np.array([each[0] for each in lines], float)
    names = dict.fromkeys(name for each in lines for name in each[2] if name not in ("step", "time"))
    curves = {}
    for name in names:
        has = [number for number, each in enumerate(lines) if name in each[2]]
        curves[SYSTEM_PREFIX + name] = Curve(steps[has], np.array([lines[number][2][name] for number in has], float))
    return System(tuple(starts), Curve(steps, np.array([each[1] for each in lines])), curves)


def _read_media(text: str) -> list[dict[str, Any]]:
    """Returns the valid entries of the index."""
    found = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            kind, name, step = entry["kind"], str(entry["name"]), int(entry["step"])
            if kind == "image" and _IMAGE_NAME.fullmatch(entry["file"]):
                facts = {"file": entry["file"], "width": int(entry["width"]), "height": int(entry["height"])}
            elif kind == "histogram":
                numbers = ("low", "high", "num_values", "num_not_finite", "mean", "deviation")
                facts = {each: float(entry[each]) for each in numbers}
                facts["counts"] = [max(int(count), 0) for count in entry["counts"]][:1000]
            else:
                continue
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            continue
        found.append({"kind": kind, "name": name, "step": step, **facts})
    return found


def _total(steps: np.ndarray, per_step: np.ndarray) -> Curve:
    return Curve(steps, np.cumsum(np.diff(steps, prepend=0.0) * per_step))


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None
