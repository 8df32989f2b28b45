"""`trainwright report RUN`: a run as one HTML file, or as Markdown for a pull request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.commands.terminal import CONFIG_FILE, named_run
from trainwright.errors import TrainwrightError


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder or name.", show_default=False, callback=named_run)],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a summary for a pull request instead.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="report.html in the run folder")
    ] = None,
) -> None:
    """Write a run as one HTML file: curves, settings, environment, model, checkpoints and samples."""
    from trainwright.watch import report as reports
    from trainwright.watch.listing import METRICS_FILE

    if not any((run / name).is_file() for name in (CONFIG_FILE, METRICS_FILE)):
        why = f"it has neither {CONFIG_FILE} nor {METRICS_FILE}" if run.is_dir() else "the folder does not exist"
        raise TrainwrightError(f"{run} is not a run folder: {why}. Pass runs/NAME; trainwright runs lists them.")
    try:
        if not markdown:
            print(reports.write_report(run, output))
        elif output is None:
            print(reports.markdown(run), end="")
        else:
            output.write_text(reports.markdown(run), encoding="utf-8")
    except OSError as error:
        raise TrainwrightError(f"The report cannot be written: {error}. Choose another file with --output.") from error
