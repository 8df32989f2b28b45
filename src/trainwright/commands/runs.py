"""`trainwright runs [DIR]`: lists the runs below a folder with their state, step, loss and best metric."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from trainwright.commands.terminal import MISSING, age_text, show_rows
from trainwright.errors import TrainwrightError
from trainwright.safe_text import safe
from trainwright.watch.listing import RunSummary, find_runs, summarize


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
