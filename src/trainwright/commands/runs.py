"""`trainwright runs [DIR]`: lists the runs below a folder with their state, step, loss and its curve, and best metric.

Reads only small files and parts of metrics.json; changes nothing and imports no torch. compare.py compares runs.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from trainwright.checkpoint.listing import CHECKPOINTS, list_checkpoints
from trainwright.checkpoint.retention import best_step
from trainwright.commands.terminal import CONFIG_FILE, MISSING, AsJson, age_text, show_rows
from trainwright.config import KeepBest, RunConfig
from trainwright.config.problems import suggest
from trainwright.config.yaml_text import absolute
from trainwright.errors import CheckpointError, ConfigError, TrainwrightError
from trainwright.safe_text import json_text, safe
from trainwright.writers.curves import sparkline

METRICS_FILE, LOG_FILE = "metrics.json", "log.txt"
"""As in checkpoint/run_folder.py and writers/json_lines.py, which import torch. A test compares them."""

FINISHED, STOPPED, RUNNING = "finished", "stopped", "running?"
RESUMABLE, EMPTY, DAMAGED = "resumable", "empty", "damaged"

_MAX_DEPTH = 4  # the name of a run may have folders: `name: vision/digits`
_BLOCK = 65_536
_MAX_BLOCKS = 32  # the last 2 MiB of metrics.json
_SAMPLED_BYTES = 4096  # of each of the parts of a large metrics.json that the curve is drawn from
_CURVE_COLUMNS = 16
_MAX_STEPS_BACK = 100_000  # how far from its end a run's last value of a metric is looked for
_QUIET_SECONDS = 60.0  # a run that wrote within this time, or within three of its log periods, may be running


@dataclass(frozen=True)
class RunSummary:
    """The state of a run, as the files in its folder show it."""

    name: str
    state: str
    step: int | None
    max_steps: int | None
    saved_step: int | None
    """The newest checkpoint, from which the run would resume."""
    value: float | None
    """The last value of the metric that the list shows, by default the loss."""
    best: str
    last_write: float | None
    problems: tuple[str, ...]
    folder: Path


def runs(
    folder: Annotated[Path, typer.Argument(help="The folder of the run folders.", metavar="DIR")] = Path("runs"),
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="The metric to show.", show_default="that of --sort, else loss")
    ] = None,
    sort: Annotated[
        str, typer.Option(metavar="age|name|METRIC", help="The order: newest first, by name, or lowest value first.")
    ] = "age",
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the runs below a folder: state, step, last value and curve of a metric, best metric, and last write."""
    if not folder.is_dir():
        raise TrainwrightError(
            f"there is no folder {folder}. Runs are in output_dir, by default `runs` in the folder where train was "
            "started: pass it, such as trainwright runs ~/project/runs."
        )
    if metric is None:
        metric = sort if sort not in ("age", "name") else "loss"
    found = [summarize(path, folder, metric=metric) for path in find_runs(folder)]
    if not found and not as_json:
        print(f"There is no run in {folder}.")
        return
    if sort not in ("age", "name") and sort != metric:
        raise ConfigError(f"--sort {sort} and --metric {metric}: runs are sorted by the metric that is shown.")
    if found and all(run.value is None for run in found) and metric != "loss":
        names = sorted({name for run in found for name in _last_names(run.folder / METRICS_FILE)})
        raise ConfigError(f"No run in {folder} has logged {metric!r} lately. {suggest(metric, names)}")
    found = _sorted_runs(found, sort, reverse=reverse)
    now = time.time()
    if as_json:
        rows = [{**asdict(run), "folder": str(run.folder), "metric": metric} for run in found]
        print(json_text({"runs": rows}, indent=2))
    else:
        header = ("run", "state", "step", "saved", metric, "curve", "best", "last write")
        show_rows(header, [_row(run, now, metric) for run in found])
    for run in found:
        for problem in run.problems:
            print(safe(f"warning: {run.name}: {problem}"), file=sys.stderr)


def _sorted_runs(found: Sequence[RunSummary], sort: str, *, reverse: bool) -> list[RunSummary]:
    """Returns the runs in order; those without a finite value of the metric are last, also in reverse."""
    if sort == "name":
        return sorted(found, key=lambda run: run.name, reverse=reverse)
    if sort == "age":
        return sorted(found, key=lambda run: -(run.last_write or 0.0), reverse=reverse)
    valued = [run for run in found if run.value is not None and math.isfinite(run.value)]
    others = [run for run in found if run not in valued]
    return [*sorted(valued, key=lambda run: run.value or 0.0, reverse=reverse), *others]


def find_runs(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yields the run folders at and below `folder`: those with a config, metrics or checkpoints."""
    if any((folder / name).exists() for name in (CONFIG_FILE, METRICS_FILE, CHECKPOINTS)):
        yield folder
        return
    try:
        paths = sorted(folder.iterdir()) if depth < _MAX_DEPTH else []
    except OSError:
        return
    for path in paths:
        if path.is_dir() and not path.name.startswith("."):
            yield from find_runs(path, depth + 1)


def summarize(path: Path, folder: Path, *, metric: str = "loss", now: float | None = None) -> RunSummary:
    """Returns the state of the run folder at `path`; a file that cannot be read is a problem, not an error."""
    name = path.name if path == folder else path.relative_to(folder).as_posix()
    problems: list[str] = []
    config = None
    try:
        config = RunConfig.load(path / CONFIG_FILE)
    except TrainwrightError as error:
        problems.append(f"its settings cannot be read: {error}")
    has_damage, checkpoints = _read_checkpoints(path / CHECKPOINTS, problems)
    last_step, value, seconds_per_step = _read_last(path / METRICS_FILE, metric)
    last_write = _last_write(path)
    saved_step = max(checkpoints, default=None)
    max_steps = config.trainer.max_steps if config else None
    if config is None or (has_damage and not checkpoints):
        state = DAMAGED
    elif saved_step is not None and max_steps is not None and _has_ended(path, saved_step, max_steps):
        state = FINISHED if saved_step >= max_steps else STOPPED
    else:
        age = (time.time() if now is None else now) - (last_write or 0.0)
        period = (config.log.every_steps or 0) * (seconds_per_step or 0.0)
        is_quiet = age > max(_QUIET_SECONDS, 3 * period) or (saved_step is None and last_step is None)
        state = (RESUMABLE if saved_step is not None else EMPTY) if is_quiet else RUNNING
    return RunSummary(
        name=name or absolute(path).name,  # "." has no name
        state=state,
        step=max((step for step in (last_step, saved_step) if step is not None), default=None),
        max_steps=max_steps,
        saved_step=saved_step,
        value=value,
        best=_best(checkpoints, config.checkpoint.keep_best if config else None),
        last_write=last_write,
        problems=tuple(problems),
        folder=path,
    )


def _read_checkpoints(folder: Path, problems: list[str]) -> tuple[bool, dict[int, dict[str, float]]]:
    """Returns whether any checkpoint is damaged, and the metrics of each intact one by step."""
    try:
        found = [each for each in list_checkpoints(folder) if not each.is_set_aside]
    except CheckpointError as error:
        problems.append(str(error))
        return True, {}
    damaged = [f"{each.name} is damaged: {each.problem}" for each in found if each.problem is not None]
    problems += damaged
    return bool(damaged), {each.step: dict(each.metrics) for each in found if each.problem is None}


def _has_ended(path: Path, step: int, max_steps: int) -> bool:
    """Returns True if the limit was reached, or the run was stopped under this limit."""
    try:
        training = json.loads((path / CHECKPOINTS / f"step-{step:08d}" / "training.json").read_bytes())
        return max(step, training["max_steps_at_end"]) >= max_steps and not training["has_unfinished_step"]
    except (OSError, ValueError, TypeError, KeyError):
        return step >= max_steps


def _read_last(path: Path, metric: str) -> tuple[int | None, float | None, float | None]:
    """Returns the last step, and the last value of a metric and of seconds_per_step, read from the end of the file."""
    step: int | None = None
    value: float | None = None
    for line in _lines_from_end(path):
        try:
            values = json.loads(line)
            step = int(values["step"]) if step is None else step
            if value is None and metric in values:
                value = math.nan if values[metric] is None else float(values[metric])
            if "loss" in values and (value is not None or step - int(values["step"]) > _MAX_STEPS_BACK):
                seconds = values.get("seconds_per_step")
                return step, value, float(seconds) if seconds is not None else None
        except (ValueError, TypeError, KeyError):
            continue  # incomplete, as the process was killed, or not written by a run
    return step, value, None


def _last_names(path: Path) -> set[str]:
    """Returns the names of the last numbers in the file."""
    names: set[str] = set()
    for line, _ in zip(_lines_from_end(path), range(100), strict=False):
        with suppress(ValueError, AttributeError):
            names |= {name for name, value in json.loads(line).items() if isinstance(value, int | float)}
    return names - {"step"}


def _sampled_values(path: Path, metric: str) -> list[float]:
    """Returns values of a metric in the order of the file: all of a small file, of a large one those in some parts."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            is_small = size <= 2 * _CURVE_COLUMNS * _SAMPLED_BYTES
            num_parts = 1 if is_small else 2 * _CURVE_COLUMNS
            lines: list[bytes] = []
            for number in range(num_parts):
                file.seek(size * number // num_parts)
                if number:
                    file.readline()  # the rest of one
                lines += file.read(size if is_small else _SAMPLED_BYTES).splitlines()
    except OSError:
        return []
    values: list[float] = []
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):  # cut, or without the metric
            value = json.loads(line)[metric]
            values.append(math.nan if value is None else float(value))
    return values


def _lines_from_end(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file from the last to the first, within the last `_MAX_BLOCKS` blocks."""
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END)
            rest = b""
            for _ in range(_MAX_BLOCKS):
                if position == 0:
                    break
                size = min(_BLOCK, position)
                position = file.seek(position - size)
                first, *lines = (file.read(size) + rest).split(b"\n")
                yield from (line for line in reversed(lines) if line.strip())
                rest = first
            if position == 0 and rest.strip():
                yield rest
    except OSError:
        return


def _last_write(path: Path) -> float | None:
    # Not the time of the folder itself, which changes with any other file in it.
    files = [path / name for name in (METRICS_FILE, LOG_FILE, CHECKPOINTS, CONFIG_FILE)]
    return max((file.stat().st_mtime for file in files if file.exists()), default=None)


def _best(metrics_by_step: dict[int, dict[str, float]], policy: KeepBest | None) -> str:
    if policy is None:
        return ""
    step = best_step(metrics_by_step, metric=policy.metric, mode=policy.mode)
    return "" if step is None else f"{policy.metric} {metrics_by_step[step][policy.metric]:.4g} at {step}"


def _row(run: RunSummary, now: float, metric: str) -> tuple[str, ...]:
    step = MISSING if run.step is None else str(run.step)
    return (
        run.name,
        run.state,
        step if run.max_steps is None else f"{step}/{run.max_steps}",
        MISSING if run.saved_step is None else str(run.saved_step),
        MISSING if run.value is None else f"{run.value:.4g}",
        sparkline(_sampled_values(run.folder / METRICS_FILE, metric), _CURVE_COLUMNS).replace(" ", "·") or MISSING,
        run.best or MISSING,
        MISSING if run.last_write is None else age_text(now - run.last_write),
    )
