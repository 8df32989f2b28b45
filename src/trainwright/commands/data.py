"""`trainwright data run.yaml a.b=value …`: shows the data of a run as training reads it."""

from __future__ import annotations

import json
import shutil
from typing import Annotated

import typer
from rich.console import Console

from trainwright.commands.terminal import AsJson, Overrides, RunPath, Trust, load_run


def data(
    run: RunPath,
    overrides: Overrides = None,
    show: Annotated[int, typer.Option(min=0, help="The number of samples to show.")] = 3,
    samples: Annotated[int, typer.Option(min=1, help="The maximum number of samples read for lengths.")] = 1000,
    set_name: Annotated[
        str | None,
        typer.Option("--set", help="Show this set in full, such as valid, instead of train.", metavar="NAME"),
    ] = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Show the data of a run: its sets, samples in training order, a batch, lengths, the mixture.

    Does not build a model, train, or access the run folder.
    """
    config = load_run(run, overrides, trust=trust)
    from trainwright.analysis.data import describe_data
    from trainwright.analysis.data_page import render

    found = describe_data(config, run=str(run), show=show, samples=samples, name=set_name)
    if as_json:
        print(json.dumps(found.to_dict(), ensure_ascii=False, indent=2, allow_nan=False))
    else:
        width = shutil.get_terminal_size().columns
        console = Console(highlight=False, width=width, emoji=False)
        for line in render(found, width=width):
            console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    if found.failure is not None:
        raise found.failure
