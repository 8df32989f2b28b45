"""Maps argv to one function of commands/. Does not import torch, so that `--help` is fast."""

from __future__ import annotations

import logging
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

import trainwright
from trainwright.commands.chat import chat
from trainwright.commands.check import check
from trainwright.commands.checkpoints import checkpoints
from trainwright.commands.compare import compare
from trainwright.commands.components import components
from trainwright.commands.config import config
from trainwright.commands.data import data
from trainwright.commands.doctor import doctor
from trainwright.commands.estimate import estimate
from trainwright.commands.evaluate import evaluate
from trainwright.commands.explain import explain
from trainwright.commands.export import export
from trainwright.commands.generate import generate
from trainwright.commands.launch import launch
from trainwright.commands.new import new
from trainwright.commands.report import report
from trainwright.commands.runs import runs
from trainwright.commands.serve import serve
from trainwright.commands.shard import shard
from trainwright.commands.sweep import sweep
from trainwright.commands.train import train
from trainwright.commands.tune import app as tune
from trainwright.commands.watch import watch
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.log import show_log
from trainwright.safe_text import safe
from trainwright.tracebacks import fold

app = typer.Typer(
    name="trainwright",
    help="Trains any PyTorch model, lets you change any part of the training, and never loses a step.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(launch)
app.command()(evaluate)
app.command()(export)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(new)
app.add_typer(tune, name="tune")
app.command()(sweep)
app.command()(explain)
app.command()(check)
app.command()(data)
app.command()(shard)
app.command()(estimate)
app.command()(components)
app.command()(config)
app.command()(runs)
app.command()(compare)
app.command()(watch)
app.command()(report)
app.command()(checkpoints)
app.command()(doctor)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "not installed"
        print(f"trainwright {trainwright.__version__}")
        print(f"Python {platform.python_version()} ({sys.executable})")
        print(f"torch {torch}")
        print(f"platform {platform.platform()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show versions and platform.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Defines the options before the command."""


def main() -> None:
    """Runs the command line; a TrainwrightError is shown without a traceback and exits with 2."""
    show_log()
    try:
        app()
    except TrainwrightError as error:
        if _is_first_to_fail(error):
            # An error in a file or an override is the same on every rank.
            rank_prefix = "" if isinstance(error, ConfigError) and error.where is not None else _rank_prefix()
            print(safe(f"{rank_prefix}error: {error}"), file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if logging.getLogger("trainwright").level <= logging.DEBUG:
            raise
        if _is_first_to_fail(error):
            print(safe(_lost_rank(error) or _rank_prefix() + fold(error)), end="", file=sys.stderr)
        sys.exit(1)


def _is_first_to_fail(error: Exception) -> bool:
    """Returns True on the rank that shows its error; errors of other ranks are consequences of it, or are the same."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    from trainwright.parallel.processes import note_failure

    return note_failure(error)


def _lost_rank(error: Exception) -> str | None:
    """Returns a message for an error caused by the loss of another rank, which the launcher reports; None otherwise."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    from trainwright.parallel.processes import describe_lost_connection

    reason = describe_lost_connection(error)
    if reason is None:
        return None
    rank = os.environ.get("RANK", "0")
    return (
        f"Rank {rank}: the connection to another rank was lost ({reason}); see logs/rank-{rank}.txt in the run folder. "
        "-v shows the traceback here.\n"
    )


def _rank_prefix() -> str:
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f"rank {rank}: "
