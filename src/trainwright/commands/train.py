"""`trainwright train run.yaml a.b=value …`: trains, or goes on with, the run that a file describes."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from trainwright.config import RunConfig
from trainwright.errors import exit_code_of
from trainwright.launch.local import die_with_launcher, launch
from trainwright.log import show_log

FAST_DEV_RUN = {
    "trainer.max_steps": 3,
    "trainer.max_epochs": None,
    "trainer.max_samples": None,
    "trainer.max_tokens": None,
    "evaluation.every_steps": 2,
    "evaluation.max_batches": 2,
    "checkpoint.every_steps": 2,
    "log.every_steps": 1,
}
"""A few steps of everything, whatever the file says of limits and periods."""


def train(
    run: Annotated[Path, typer.Argument(help="The YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to replace, such as trainer.max_steps=500.", show_default=False)
    ] = None,
    nproc: Annotated[int, typer.Option(min=1, help="How many processes to start on this machine.")] = 1,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; an earlier run is set aside.")] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although settings of the mathematics changed.")
    ] = False,
    fast_dev_run: Annotated[
        bool, typer.Option("--fast-dev-run", help="Run a few steps of everything and keep nothing.")
    ] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the whole config and stop.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show warnings and errors only.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show every frame of a traceback.")] = False,
) -> None:
    """Train the run that a YAML file describes. Running it again continues where it was."""
    show_log(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    config = RunConfig.load(run, overrides or [])
    if print_config:
        print(config.to_yaml(), end="")
        return
    if nproc > 1 and "WORLD_SIZE" not in os.environ:
        sys.exit(launch(nproc, sys.argv[1:]))
    die_with_launcher()
    from trainwright.main import Interrupted, run_experiment

    try:
        if fast_dev_run:
            with _shared_temporary_folder() as folder:
                run_experiment(config.derive({**FAST_DEV_RUN, "output_dir": str(folder)}))
        else:
            run_experiment(config, fresh=fresh, accept_changes=accept_changes)
    except Interrupted as interruption:
        sys.exit(exit_code_of(str(interruption)))


@contextmanager
def _shared_temporary_folder() -> Iterator[Path]:
    """A folder that every rank of a launch agrees on, for they have one parent, and that the first rank removes."""
    if "WORLD_SIZE" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="trainwright-") as folder:
            yield Path(folder)
        return
    shared = Path(tempfile.gettempdir()) / f"trainwright-{os.getppid()}"
    try:
        yield shared
    finally:
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(shared, ignore_errors=True)
