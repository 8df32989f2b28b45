"""`trainwright runs [DIR]`: a line for each run below a folder: how far it is, how well, and whether it goes on.

Only small files and the end of metrics.json are read, so that it answers at once; nothing is changed or imported.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.checkpoint.manifest import MANIFEST, STEP_NAME, read_manifest
from trainwright.checkpoint.retention import best_step
from trainwright.commands.table import show_rows
from trainwright.config import KeepBest, RunConfig
from trainwright.config.yaml_text import absolute
from trainwright.errors import TrainwrightError

CONFIG_FILE, METRICS_FILE, LOG_FILE, CHECKPOINTS = "config.yaml", "metrics.json", "log.txt", "checkpoints"
"""As checkpoint/folder.py and writers/json_lines.py name them; those import torch. A test compares."""

FINISHED, STOPPED, RUNNING = "finished", "stopped", "running?"
RESUMABLE, EMPTY, DAMAGED = "resumable", "empty", "damaged"

_DEEPEST = 4  # a run's name may hold folders: `name: vision/digits`
_BLOCK = 65_536
_MOST_BLOCKS = 32  # 2 MiB from the end: a line that far back says nothing of how the run does now
_QUIET_SECONDS = 60.0  # a run that wrote within this time, or within three of its own log periods, may be running
_NONE = "–"


@dataclass(frozen=True)
class RunSummary:
    """What a run folder says of its run, without opening a tensor."""

    name: str
    state: str
    step: int | None = None
    max_steps: int | None = None
    saved_step: int | None = None
    """The newest checkpoint, from which the run would go on."""
    loss: float | None = None
    best: str = ""
    last_write: float | None = None
    problems: tuple[str, ...] = field(default=())


def runs(
    folder: Annotated[Path, typer.Argument(help="Where the run folders are.", metavar="DIR")] = Path("runs"),
) -> None:
    """List the runs below a folder: state, step, last loss, best metric, and when each was last written."""
    if not folder.is_dir():
        raise TrainwrightError(
            f"there is no folder {folder}. Runs lie in output_dir, by default `runs` in the folder where train was "
            "started: give it, such as trainwright runs ~/project/runs."
        )
    found = [summarise(path, folder) for path in find_runs(folder)]
    if not found:
        print(f"There is no run in {folder}.")
        return
    now = time.time()
    found.sort(key=lambda run: -(run.last_write or 0.0))
    header = ("run", "state", "step", "saved", "loss", "best", "last write")
    show_rows(header, [_row(run, now) for run in found])
    for run in found:
        for problem in run.problems:
            print(f"warning: {run.name}: {problem}", file=sys.stderr)


def find_runs(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yield the run folders at and below `folder`: those that hold a config, metrics or checkpoints."""
    if any((folder / name).exists() for name in (CONFIG_FILE, METRICS_FILE, CHECKPOINTS)):
        yield folder
    elif depth < _DEEPEST:
        for path in _listed(folder):
            if path.is_dir() and not path.name.startswith("."):
                yield from find_runs(path, depth + 1)


def summarise(path: Path, folder: Path, *, now: float | None = None) -> RunSummary:
    """Return what the run folder at `path` says; whatever is broken in it becomes a problem, never an error."""
    name = path.name if path == folder else path.relative_to(folder).as_posix()
    name = name or absolute(path).name  # "." has no name
    problems: list[str] = []
    config = _read_config(path, problems)
    has_steps, checkpoints = _read_checkpoints(path / CHECKPOINTS, problems)
    last_step, loss, seconds_per_step = _read_last(path / METRICS_FILE)
    last_write = _last_write(path)
    saved_step = max(checkpoints, default=None)
    max_steps = config.trainer.max_steps if config else None
    if config is None or (has_steps and not checkpoints):
        state = DAMAGED
    elif saved_step is not None and max_steps is not None and _has_ended(path, saved_step, max_steps):
        state = FINISHED if saved_step >= max_steps else STOPPED
    else:
        age = (time.time() if now is None else now) - (last_write or 0.0)
        period = config.log.every_steps * (seconds_per_step or 0.0)
        quiet = age > max(_QUIET_SECONDS, 3 * period) or (saved_step is None and last_step is None)
        state = (RESUMABLE if saved_step is not None else EMPTY) if quiet else RUNNING
    return RunSummary(
        name=name,
        state=state,
        step=max((step for step in (last_step, saved_step) if step is not None), default=None),
        max_steps=max_steps,
        saved_step=saved_step,
        loss=loss,
        best=_best(checkpoints, config.checkpoint.keep_best if config else None),
        last_write=last_write,
        problems=tuple(problems),
    )


def _read_config(path: Path, problems: list[str]) -> RunConfig | None:
    try:
        return RunConfig.load(path / CONFIG_FILE)
    except TrainwrightError as error:
        problems.append(f"its settings cannot be read: {error}")
    return None


def _read_checkpoints(folder: Path, problems: list[str]) -> tuple[bool, dict[int, dict[str, float]]]:
    """Return whether there is a step folder, and the metrics of each whole checkpoint by step.

    Sizes are compared, contents are not: hashing them would take as long as reading every tensor.
    """
    metrics: dict[int, dict[str, float]] = {}
    has_steps = False
    for path in _listed(folder):
        match = STEP_NAME.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue  # not ours, or deleted by the run while we look
        has_steps = True
        try:
            manifest = read_manifest(path)
            for name, expected in manifest["files"].items():
                size = (path / name).stat().st_size
                if size != expected["size"]:
                    raise ValueError(f"{name} has {size} bytes instead of {expected['size']}")
            metrics[int(match[1])] = {key: float(value) for key, value in manifest["metrics"].items()}
        except TrainwrightError as error:
            unfinished = not (path / MANIFEST).exists()
            problems.append(f"{path.name} was never finished" if unfinished else str(error).rstrip("."))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problems.append(f"{path.name} is damaged: {error}")
    return has_steps, metrics


def _has_ended(path: Path, step: int, max_steps: int) -> bool:
    """Say whether nothing is left to do: the limit was reached, or the run was stopped under this limit."""
    training: Any = None
    try:
        training = json.loads((path / CHECKPOINTS / f"step-{step:08d}" / "training.json").read_bytes())
        return max(step, training["max_steps_at_end"]) >= max_steps and not training["has_unfinished_step"]
    except (OSError, ValueError, TypeError, KeyError):
        return step >= max_steps


def _read_last(path: Path) -> tuple[int | None, float | None, float | None]:
    """Return the last step, the last loss and the last seconds_per_step of metrics.json, read from its end."""
    step: int | None = None
    for line in _lines_from_end(path):
        try:
            values = json.loads(line)
            step = int(values["step"]) if step is None else step
            if "loss" in values:
                seconds = values.get("seconds_per_step")
                return step, float(values["loss"]), float(seconds) if seconds is not None else None
        except (ValueError, TypeError, KeyError):
            continue  # half-written by a process that died, or not ours
    return step, None, None


def _lines_from_end(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file from the last to the first, as far as a fixed number of blocks reaches."""
    try:
        with path.open("rb") as file:
            position = file.seek(0, os.SEEK_END)
            rest = b""
            for _ in range(_MOST_BLOCKS):
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
    # Not the folder itself: it also changes when somebody else puts a file there.
    times = []
    for name in (METRICS_FILE, LOG_FILE, CHECKPOINTS, CONFIG_FILE):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _best(metrics_by_step: dict[int, dict[str, float]], policy: KeepBest | None) -> str:
    if policy is None:
        return ""
    step = best_step(metrics_by_step, metric=policy.metric, mode=policy.mode)
    return "" if step is None else f"{policy.metric} {metrics_by_step[step][policy.metric]:.4g} at {step}"


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _row(run: RunSummary, now: float) -> tuple[str, ...]:
    step = _NONE if run.step is None else str(run.step)
    return (
        run.name,
        run.state,
        step if run.max_steps is None else f"{step}/{run.max_steps}",
        _NONE if run.saved_step is None else str(run.saved_step),
        _NONE if run.loss is None else f"{run.loss:.4g}",
        run.best or _NONE,
        _NONE if run.last_write is None else ago(now - run.last_write),
    )


def ago(seconds: float) -> str:
    """Return an age in words, in the largest unit of which there is at least one."""
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        number = math.floor(seconds / length)
        if number >= 1:
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "just now"
