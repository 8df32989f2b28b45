"""`trainwright runs [DIR]`: lists the runs below a folder with their state, step, loss and best metric.

Reads only small files and the end of metrics.json; changes nothing and imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from trainwright.checkpoint.listing import CHECKPOINTS, list_checkpoints
from trainwright.checkpoint.retention import best_step
from trainwright.commands.terminal import CONFIG_FILE, MISSING, age_text, show_rows
from trainwright.config import KeepBest, RunConfig
from trainwright.config.yaml_text import absolute
from trainwright.errors import CheckpointError, TrainwrightError
from trainwright.safe_text import safe

METRICS_FILE, LOG_FILE = "metrics.json", "log.txt"
"""As in checkpoint/run_folder.py and writers/json_lines.py, which import torch. A test compares them."""

FINISHED, STOPPED, RUNNING = "finished", "stopped", "running?"
RESUMABLE, EMPTY, DAMAGED = "resumable", "empty", "damaged"

_MAX_DEPTH = 4  # the name of a run may have folders: `name: vision/digits`
_BLOCK = 65_536
_MAX_BLOCKS = 32  # the last 2 MiB of metrics.json
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
    loss: float | None
    best: str
    last_write: float | None
    problems: tuple[str, ...]


def runs(
    folder: Annotated[Path, typer.Argument(help="The folder of the run folders.", metavar="DIR")] = Path("runs"),
) -> None:
    """List the runs below a folder: state, step, last loss, best metric, and when each was last written."""
    if not folder.is_dir():
        raise TrainwrightError(
            f"there is no folder {folder}. Runs are in output_dir, by default `runs` in the folder where train was "
            "started: pass it, such as trainwright runs ~/project/runs."
        )
    found = [summarize(path, folder) for path in find_runs(folder)]
    if not found:
        print(f"There is no run in {folder}.")
        return
    now = time.time()
    found.sort(key=lambda run: -(run.last_write or 0.0))
    show_rows(("run", "state", "step", "saved", "loss", "best", "last write"), [_row(run, now) for run in found])
    for run in found:
        for problem in run.problems:
            print(safe(f"warning: {run.name}: {problem}"), file=sys.stderr)


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


def summarize(path: Path, folder: Path, *, now: float | None = None) -> RunSummary:
    """Returns the state of the run folder at `path`; a file that cannot be read is a problem, not an error."""
    name = path.name if path == folder else path.relative_to(folder).as_posix()
    problems: list[str] = []
    config = None
    try:
        config = RunConfig.load(path / CONFIG_FILE)
    except TrainwrightError as error:
        problems.append(f"its settings cannot be read: {error}")
    has_damage, checkpoints = _read_checkpoints(path / CHECKPOINTS, problems)
    last_step, loss, seconds_per_step = _read_last(path / METRICS_FILE)
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
        loss=loss,
        best=_best(checkpoints, config.checkpoint.keep_best if config else None),
        last_write=last_write,
        problems=tuple(problems),
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


def _read_last(path: Path) -> tuple[int | None, float | None, float | None]:
    """Returns the last step, the last loss and the last seconds_per_step of metrics.json, read from its end."""
    step: int | None = None
    for line in _lines_from_end(path):
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


def _row(run: RunSummary, now: float) -> tuple[str, ...]:
    step = MISSING if run.step is None else str(run.step)
    return (
        run.name,
        run.state,
        step if run.max_steps is None else f"{step}/{run.max_steps}",
        MISSING if run.saved_step is None else str(run.saved_step),
        MISSING if run.loss is None else f"{run.loss:.4g}",
        run.best or MISSING,
        MISSING if run.last_write is None else age_text(now - run.last_write),
    )
