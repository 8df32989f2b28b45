"""From argv to one call into commands/. Imports no torch, so that `--help` answers at once."""

from __future__ import annotations

import logging
import os
import sys

import typer

from trainwright.commands.evaluate import evaluate
from trainwright.commands.train import train
from trainwright.errors import TrainwrightError

app = typer.Typer(
    name="trainwright",
    help="Trains any PyTorch model, lets you change any part of the training, and never loses a step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(evaluate)


@app.callback()
def _root() -> None:
    """Makes `trainwright` a group of commands even while it has few."""


def main() -> None:
    """Runs the command line; an explained error is shown without a traceback and exits with 2."""
    _show_log()
    try:
        app()
    except TrainwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _show_log() -> None:
    package = logging.getLogger("trainwright")
    package.setLevel(logging.INFO)
    # The first rank speaks for all; others are heard when something is wrong.
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
