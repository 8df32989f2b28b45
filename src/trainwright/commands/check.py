"""`trainwright check run.yaml a.b=value …`: tries a run out on the CPU and reports every problem at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def check(
    run: Annotated[Path, typer.Argument(help="The YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to replace, such as trainer.max_steps=500.", show_default=False)
    ] = None,
) -> None:
    """Check a run before it costs anything: config, parts, one step, one evaluation, one checkpoint, graph safety.

    Everything runs on the CPU in a temporary folder; the run's own folder is not touched. Exits with 1 where
    there are errors; remarks alone exit with 0.
    """
    from trainwright.analysis.check import check_run

    report = check_run(run, overrides or [])
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    print(report.render(colour=has_colours))
    if not report.is_ok:
        sys.exit(1)
