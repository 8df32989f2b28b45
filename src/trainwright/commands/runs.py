"""`trainwright runs [DIR]`: lists the runs below a folder with their state, step, a metric and its curve.

Reads only small files and parts of metrics.json. compare.py compares some of the runs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import cell_len

from trainwright.commands.terminal import MISSING, AsJson, age_text, show_rows
from trainwright.config.problems import suggest
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.progress import sparkline
from trainwright.safe_text import json_text, safe
from trainwright.watch.listing import METRICS_FILE, RunSummary, find_runs, lines_from_end, open_regular, summarize

_CURVE_COLUMNS = 16
_NUM_PARTS, _PART_BYTES = 32, 4096  # the parts of a large metrics.json from which its curve is drawn, or two lines each
_MAX_LINE = 2**20
_NAME_COLUMNS = 24  # of a terminal; columns that leave less for the names of runs are omitted
_NUM_LAST_LINES = 1000  # the end of the file in which the last value of a metric is searched


@dataclass(frozen=True)
class _Listed:
    """A run, with the last value of the metric that the list shows."""

    folder: Path
    summary: RunSummary
    value: float | None


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
    is_by_metric = sort not in ("age", "name")
    if is_by_metric and metric not in (None, sort):
        raise ConfigError(f"--sort {sort} and --metric {metric}: runs are sorted by the metric that is shown.")
    shown = metric or (sort if is_by_metric else "loss")
    found = [_Listed(path, summarize(path, folder), _last_value(path, shown)) for path in find_runs(folder)]
    if not found and not as_json:
        print(f"There is no run in {folder}.")
        return
    if (metric or is_by_metric) and all(run.value is None for run in found):
        known = sorted({name for run in found for name in _last_names(run.folder)})
        raise ConfigError(f"No run in {folder} has logged {shown!r} recently. {suggest(shown, known) if known else ''}")
    found = _sorted(found, sort, reverse=reverse)
    if as_json:
        rows = [
            {**asdict(run.summary), "folder": str(run.folder), "metric": shown, "value": run.value} for run in found
        ]
        print(json_text({"runs": rows}, indent=2))
    else:
        now = time.time()
        header = ("run", "state", "step", "saved", shown, "curve", "best", "last write")
        _show(header, [_row(run, now, shown) for run in found])
    for run in found:
        for problem in run.summary.problems:
            print(safe(f"warning: {run.summary.name}: {problem}"), file=sys.stderr)


def _show(header: Sequence[str], rows: list[tuple[str, ...]]) -> None:
    """Prints the list. A narrow terminal lacks some columns, and wraps long names."""
    columns = list(zip(header, *rows, strict=True))
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - min(_NAME_COLUMNS, _width(columns[0]))
        for name in ("saved", "best", "curve"):
            if sum(_width(column) for column in columns[1:]) <= room:
                break
            columns = [column for column in columns if column[0] != name]
    shown, *rows = zip(*columns, strict=True)
    show_rows(shown, rows, wrapped=shown[:1])


def _width(column: Sequence[str]) -> int:
    return max(map(cell_len, column)) + 2


def _sorted(found: Sequence[_Listed], sort: str, *, reverse: bool) -> list[_Listed]:
    """Returns the runs in order; those without a finite value of the metric are last, also in reverse."""
    if sort == "name":
        return sorted(found, key=lambda run: run.summary.name, reverse=reverse)
    if sort == "age":
        return sorted(found, key=lambda run: -(run.summary.last_write or 0.0), reverse=reverse)
    valued = [run for run in found if run.value is not None and math.isfinite(run.value)]
    others = [run for run in found if run not in valued]
    return [*sorted(valued, key=lambda run: run.value or 0.0, reverse=reverse), *others]


def _last_value(folder: Path, metric: str) -> float | None:
    """Returns the last value of a metric; NaN for null, None if the last lines have none."""
    for line, _ in zip(lines_from_end(folder / METRICS_FILE), range(_NUM_LAST_LINES), strict=False):
        with suppress(ValueError, TypeError, KeyError):  # incomplete, as the process was killed, or without the metric
            value = json.loads(line)[metric]
            return math.nan if value is None else float(value)
    return None


def _last_names(folder: Path) -> set[str]:
    """Returns the names of the last numbers in metrics.json."""
    names: set[str] = set()
    for line, _ in zip(lines_from_end(folder / METRICS_FILE), range(_NUM_LAST_LINES), strict=False):
        with suppress(ValueError, AttributeError):
            names |= {name for name, value in json.loads(line).items() if isinstance(value, int | float)}
    return names - {"step"}


def _sampled_values(folder: Path, metric: str) -> list[float]:
    """Returns values of a metric in the order of the file: all for a small file, those in some parts for a large
    one."""
    lines: list[bytes] = []
    try:
        with open_regular(folder / METRICS_FILE) as file:
            part_bytes = max(_PART_BYTES, 2 * len(file.readline(_MAX_LINE)))
            size = file.seek(0, os.SEEK_END)
            num_parts = 1 if size <= _NUM_PARTS * _PART_BYTES else _NUM_PARTS
            for number in range(num_parts):
                file.seek(size * number // num_parts)
                lines += file.read(size if num_parts == 1 else part_bytes).splitlines()
    except OSError:
        return []
    values: list[float] = []
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):  # cut, or without the metric
            value = json.loads(line)[metric]
            values.append(math.nan if value is None else float(value))
    return values


def _row(run: _Listed, now: float, metric: str) -> tuple[str, ...]:
    summary = run.summary
    step = MISSING if summary.step is None else str(summary.step)
    # A gap is a dot, so that `cut` finds the columns.
    curve = sparkline(_sampled_values(run.folder, metric), _CURVE_COLUMNS).replace(" ", "·")
    return (
        summary.name,
        summary.state,
        step if summary.max_steps is None else f"{step}/{summary.max_steps}",
        MISSING if summary.saved_step is None else str(summary.saved_step),
        MISSING if run.value is None else f"{run.value:.4g}",
        curve or MISSING,
        summary.best or MISSING,
        MISSING if summary.last_write is None else age_text(now - summary.last_write),
    )
