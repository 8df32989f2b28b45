"""`trainwright data run.yaml a.b=value …`: shows the data of a run, as training will meet it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainwright.commands.config import load_run


def data(
    run: Annotated[Path, typer.Argument(help="The run's YAML file, or its folder.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to replace, such as data.shuffle=false.", show_default=False)
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="How many samples to show.")] = 3,
    samples: Annotated[int, typer.Option(min=1, help="How many samples to read at most, for their lengths.")] = 1000,
    set_name: Annotated[
        str | None,
        typer.Option("--set", help="Show this set in full, such as valid, instead of train.", metavar="NAME"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as one JSON object.")] = False,
) -> None:
    """Look at the data of a run: what the sets are, samples in training order, a batch, lengths, the mixture.

    Builds no model, trains nothing, and leaves the run's folder alone.
    """
    config = load_run(run, overrides or [])
    from trainwright.analysis.data import look_at
    from trainwright.analysis.data_page import render

    look = look_at(config, run=str(run), show=show, samples=samples, name=set_name)
    if as_json:
        print(json.dumps(look.to_dict(), ensure_ascii=False, indent=2, allow_nan=False))
    else:
        width = shutil.get_terminal_size().columns
        console = Console(highlight=False, width=width, emoji=False)
        for line in render(look, width=width):
            console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    if look.failure is not None:
        raise look.failure
