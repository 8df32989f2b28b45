"""Finds the runs below a folder and their state, from small files and the end of metrics.json.

Changes nothing and does not import torch.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

from trainwright.checkpoint.listing import CHECKPOINTS, Listed, list_checkpoints
from trainwright.checkpoint.retention import best_step
from trainwright.config import RunConfig
from trainwright.config.yaml_text import absolute
from trainwright.errors import CheckpointError, TrainwrightError

CONFIG_FILE, METRICS_FILE, LOG_FILE = "config.yaml", "metrics.json", "log.txt"
"""As in checkpoint/run_folder.py and writers/json_lines.py, which import torch. A test compares them."""

FINISHED, STOPPED, RUNNING = "finished", "stopped", "running?"
RESUMABLE, EMPTY, DAMAGED = "resumable", "empty", "damaged"

_MAX_DEPTH = 4  # the name of a run may have folders: `name: vision/digits`
_BLOCK = 65_536
_MAX_BLOCKS = 32  # the last 2 MiB of metrics.json
_QUIET_SECONDS = 60.0  # a run that wrote within this time, or within three of its log periods, may be running


@dataclass(frozen=True)
class RunSummary:
    """The state of a run, determined from the files in its folder."""

    name: str
    state: str
    step: int | None
    max_steps: int | None
    saved_step: int | None
    """The newest checkpoint in the run folder, from which the run would resume."""
    loss: float | None
    best: str
    last_write: float | None
    problems: tuple[str, ...]


def find_runs(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yields the run folders at and below `folder`: those with a config, metrics or checkpoints.

    Folders that this user cannot read are omitted.
    """
    # Not Path.exists and Path.is_dir, which raise PermissionError.
    if any(os.path.exists(folder / name) for name in (CONFIG_FILE, METRICS_FILE, CHECKPOINTS)):  # noqa: PTH110
        yield folder
        return
    try:
        paths = sorted(folder.iterdir()) if depth < _MAX_DEPTH else []
    except OSError:
        return
    for path in paths:
        if os.path.isdir(path) and not path.name.startswith("."):  # noqa: PTH112
            yield from find_runs(path, depth + 1)


@dataclass(frozen=True)
class RunPlan:
    """The settings of a run that its state depends on."""

    max_steps: int | None = None
    log_every_steps: int | None = None
    best_metric: str | None = None
    """`checkpoint.keep_best.metric`."""
    best_mode: Literal["min", "max"] = "min"
    has_own_checkpoints: bool = True
    """False if `checkpoint.folder` is set: the checkpoints are elsewhere, and are not listed."""
    problem: str | None = None
    """The reason why the settings cannot be read."""


def read_plan(path: Path) -> RunPlan:
    """Returns the plan in the run folder at `path`, whose settings are validated."""
    try:
        config = RunConfig.load(path / CONFIG_FILE)
    except TrainwrightError as error:
        return RunPlan(problem=f"its settings cannot be read: {error}")
    best = config.checkpoint.keep_best
    is_own = config.checkpoint.folder is None
    plan = RunPlan(config.trainer.max_steps, config.log.every_steps, has_own_checkpoints=is_own)
    return plan if best is None else replace(plan, best_metric=best.metric, best_mode=best.mode)


def summarize(path: Path, folder: Path, *, now: float | None = None) -> RunSummary:
    """Returns the state of the run folder at `path`; a file that cannot be read is a problem, not an error."""
    return summarize_files(
        path, name_of(path, folder), plan=read_plan(path), checkpoints=read_checkpoints(path), now=now
    )


def name_of(path: Path, folder: Path) -> str:
    """Returns the name of a run below a folder."""
    name = path.name if path == folder else path.relative_to(folder).as_posix()
    return name or absolute(path).name  # "." has no name


def summarize_files(
    path: Path, name: str, *, plan: RunPlan, checkpoints: Checkpoints, now: float | None = None
) -> RunSummary:
    """Returns the state of a run folder whose settings and checkpoints were read before."""
    metrics = {each.step: dict(each.metrics) for each in checkpoints.intact}
    last_step, loss, seconds_per_step = _read_last(path / METRICS_FILE)
    last_write = _last_write(path)
    saved_step = max(metrics, default=None)
    if plan.problem is not None or (checkpoints.problems and not metrics):
        state = DAMAGED
    elif saved_step is not None and plan.max_steps is not None and _has_ended(path, saved_step, plan.max_steps):
        state = FINISHED if saved_step >= plan.max_steps else STOPPED
    elif not plan.has_own_checkpoints and plan.max_steps is not None and (last_step or 0) >= plan.max_steps:
        state = FINISHED
    else:
        age = (time.time() if now is None else now) - (last_write or 0.0)
        period = (plan.log_every_steps or 0) * (seconds_per_step or 0.0)
        has_started = saved_step is not None or last_step is not None or (path / LOG_FILE).exists()
        is_quiet = age > max(_QUIET_SECONDS, 3 * period) or not has_started
        is_resumable = saved_step is not None or (last_step is not None and not plan.has_own_checkpoints)
        state = (RESUMABLE if is_resumable else EMPTY) if is_quiet else RUNNING
    best = None
    if plan.best_metric is not None:
        best = best_step(metrics, metric=plan.best_metric, mode=plan.best_mode)
    return RunSummary(
        name=name,
        state=state,
        step=max((step for step in (last_step, saved_step) if step is not None), default=None),
        max_steps=plan.max_steps,
        saved_step=saved_step,
        loss=loss,
        best="" if best is None else f"{plan.best_metric} {metrics[best][str(plan.best_metric)]:.4g} at {best}",
        last_write=last_write,
        problems=(*([] if plan.problem is None else [plan.problem]), *checkpoints.problems),
    )


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in a run folder."""

    intact: tuple[Listed, ...] = ()
    problems: tuple[str, ...] = ()
    """The damage of the others."""


def read_checkpoints(path: Path) -> Checkpoints:
    """Returns the checkpoints of the run folder at `path`."""
    try:
        found = [each for each in list_checkpoints(path / CHECKPOINTS) if not each.is_set_aside]
    except CheckpointError as error:
        return Checkpoints(problems=(str(error),))
    damaged = tuple(f"{each.name} is damaged: {each.problem}" for each in found if each.problem is not None)
    return Checkpoints(tuple(each for each in found if each.problem is None), damaged)


def _has_ended(path: Path, step: int, max_steps: int) -> bool:
    """Returns True if the limit was reached, or the run was stopped under this limit."""
    try:
        training = json.loads((path / CHECKPOINTS / f"step-{step:08d}" / "training.json").read_bytes())
        return max(step, training["max_steps_at_end"]) >= max_steps and not training["has_unfinished_step"]
    except (OSError, ValueError, TypeError, KeyError):
        return step >= max_steps


def _read_last(path: Path) -> tuple[int | None, float | None, float | None]:
    """Returns the last step, the last loss and the last seconds_per_step of metrics.json, read from its end."""
    step: int | None = None
    for line in lines_from_end(path):
        try:
            values = json.loads(line)
            step = int(values["step"]) if step is None else step
            if "loss" in values:
                seconds = values.get("seconds_per_step")
                loss = math.nan if values["loss"] is None else float(values["loss"])
                return step, loss, float(seconds) if seconds is not None else None
        except (ValueError, TypeError, KeyError):
            continue  # incomplete, as the process was killed, or not written by a run
    return step, None, None


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file to read it.

    Raises OSError for a link, which may point anywhere, and for a device or a pipe, which may block or be endless.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def lines_from_end(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file from the last to the first, within the last `_MAX_BLOCKS` blocks."""
    try:
        with open_regular(path) as file:
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
    # Not the time of the folder itself, which changes with other files.
    times = []
    for name in (METRICS_FILE, LOG_FILE, CHECKPOINTS, CONFIG_FILE):
        with suppress(OSError):  # missing, or deleted in the meantime
            times.append((path / name).stat().st_mtime)
    return max(times, default=None)
