"""`trainwright check run.yaml a.b=value …`: runs one step of a run on the CPU and reports every problem at once."""

from __future__ import annotations

import os
import sys

import typer

from trainwright.commands.terminal import CONFIG_FILE, Overrides, RunPath, Trust, shown_in_terminal


def check(run: RunPath, overrides: Overrides = None, trust: Trust = False) -> None:
    """Check a run: config, components, one step, one evaluation, one checkpoint, graph safety.

    Everything runs on the CPU in a temporary folder; the run folder is not touched. Exits with 1 if there are errors,
    and with 0 if there are only remarks.
    """
    is_folder = run.is_dir()
    file = run / CONFIG_FILE if is_folder else run
    with shown_in_terminal(f"Checking {run}"):
        from trainwright.analysis.check import check_run

        report = check_run(file, overrides or [], trust=trust or (False if is_folder else None))
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    print(report.render(colour=has_colours))
    if not report.is_ok:
        raise typer.Exit(1)
