"""`trainwright compare A B …`: what differs between runs, their metrics, and their curves in one chart."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.commands.terminal import CONFIG_FILE, MISSING, AsJson, load_run, named_run, show_rows
from trainwright.config import KeepBest
from trainwright.config.problems import suggest
from trainwright.errors import ConfigError
from trainwright.safe_text import flat_settings, json_text, safe

if TYPE_CHECKING:
    from trainwright.writers.curves import Points

ENVIRONMENT_FILE = "environment.json"
"""As in checkpoint/run_folder.py, which imports torch. A test compares them."""

_OWN = ("name", "output_dir")
"""Settings that differ between any two runs."""
_CHART_ROWS = 16
_MAX_RUNS = 6  # as many as there are colors


@dataclass(frozen=True)
class _Run:
    name: str
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    curves: Mapping[str, Points]
    keep_best: KeepBest | None


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run folders, or names of runs in runs/.")],
    metric: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A metric to draw; may be repeated. Default: loss.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs: the settings that differ, the last and best metrics, and curves in one chart."""
    if len(runs) < 2:
        raise ConfigError(f"compare needs two or more runs; got {', '.join(runs)}.")
    if len(runs) > _MAX_RUNS:
        raise ConfigError(f"compare shows at most {_MAX_RUNS} runs; got {len(runs)}.")
    folders = [_find(run) for run in runs]
    found = [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    known = dict.fromkeys(name for run in found for name in run.curves)
    for name in metric or ():
        if name not in known:
            raise ConfigError(f"--metric: no run has logged {name!r}. {suggest(name, known)}")
    settings = _differences([run.settings for run in found], without=_OWN)
    environments = _differences([run.environment for run in found], without=("run_id",))
    if as_json and metric:
        raise ConfigError("--metric has no effect with --json, which has all metrics. Remove one of them.")
    if as_json:
        metrics = {name: {run.name: _values(run, name) for run in found} for name in known}
        print(json_text({"settings": settings, "metrics": metrics, "environment": environments}, indent=2))
        return
    names = [run.name for run in found]
    _show_differences("setting", names, settings, same="All settings are the same.")
    print()
    rows = [(name, *(_cell(_values(run, name)) for run in found)) for name in known]
    show_rows(("metric: last (best)", *names), rows)
    print()
    _show_differences("environment", names, environments, same="The environments are the same.")
    if metric or sys.stdout.isatty():
        for name in metric or ("loss",):
            _draw(name, found)


def _find(run: str) -> Path:
    """Returns the folder of a run, given by its path or its name."""
    folder = named_run(Path(run))
    if (folder / CONFIG_FILE).is_file():
        return folder
    raise ConfigError(
        f"{run} is not a run folder: neither {run}/{CONFIG_FILE} nor runs/{run}/{CONFIG_FILE} exists. "
        "`trainwright runs` lists the runs of a folder."
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Returns short names of the folders that differ."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _read(folder: Path, name: str) -> _Run:
    from trainwright.writers.json_lines import read_history

    config = load_run(folder)
    try:
        environment = json.loads((folder / ENVIRONMENT_FILE).read_bytes())
    except (OSError, ValueError):
        environment = {}
    settings = flat_settings(config.to_dict())
    return _Run(name, settings, environment, read_history(folder), config.checkpoint.keep_best)


def _differences(facts: Sequence[Mapping[str, Any]], *, without: Sequence[str]) -> dict[str, list[Any]]:
    """Returns the names whose values differ, with the value of each run; None if it has none."""
    names = dict.fromkeys(name for each in facts for name in each if name not in without)
    values = {name: [each.get(name) for each in facts] for name in names}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def _values(run: _Run, metric: str) -> dict[str, Any] | None:
    """Returns the last value of a metric, and the best one with its step if it is known whether lower is better."""
    points = run.curves.get(metric)
    if not points:
        return None
    from trainwright.writers.curves import better_mode

    found: dict[str, Any] = {"step": points[-1][0], "last": points[-1][1]}
    mode = better_mode(metric, run.keep_best)
    finite = [point for point in points if math.isfinite(point[1])]
    if mode is not None and finite:
        step, value = (min if mode == "min" else max)(finite, key=lambda point: point[1])
        found |= {"best": value, "best_step": step}
    return found


def _cell(values: Mapping[str, Any] | None) -> str:
    if values is None:
        return MISSING
    best = f" ({values['best']:.4g} at {values['best_step']})" if "best" in values else ""
    return f"{values['last']:.4g}{best}"


def _show_differences(what: str, names: Sequence[str], found: Mapping[str, Sequence[Any]], *, same: str) -> None:
    if not found:
        print(same)
        return
    rows = [(name, *(MISSING if value is None else safe(str(value)) for value in each)) for name, each in found.items()]
    show_rows((what, *names), rows)


def _draw(metric: str, runs: Sequence[_Run]) -> None:
    """Prints the chart of a metric, in the width of the terminal."""
    from trainwright.writers.terminal_chart import COLORS, chart_lines, styled

    curves = {run.name: run.curves.get(metric, []) for run in runs}
    if not any(curves.values()):
        return
    has_colors = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    columns = min(120, shutil.get_terminal_size().columns - 1)
    legend = "   ".join(
        styled(f"━━ {safe(name)}", COLORS[number], has_colors=has_colors) for number, name in enumerate(curves)
    )
    print(f"\n{safe(metric)}   {legend}")
    print("\n".join(chart_lines(curves, columns=columns, rows=_CHART_ROWS, has_colors=has_colors)))
