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
from trainwright.errors import ConfigError, TrainwrightError, exit_code_of
from trainwright.launch.local import (
    die_with_launcher,
    is_launched,
    launch,
    leave_if_explained,
    note_explained_error,
    num_restarts,
)
from trainwright.log import show_log

logger = logging.getLogger(__name__)

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
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Start the processes again, so often, after one is lost; the run goes on.")
    ] = 0,
    nnodes: Annotated[int, typer.Option(min=1, help="How many machines run this command together.")] = 1,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="With --nnodes: where the machines meet; one of them.")
    ] = None,
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
    _check_launch(nproc, max_restarts, nnodes, rendezvous)
    if (nproc > 1 or max_restarts or nnodes > 1) and not is_launched():
        code = launch(nproc, sys.argv[1:], max_restarts=max_restarts, num_nodes=nnodes, rendezvous=rendezvous)
        sys.exit(code)
    fresh = _begin_as_worker() and fresh
    from trainwright.main import Interrupted, run_experiment

    try:
        if fast_dev_run:
            with _shared_temporary_folder() as folder:
                run_experiment(config.derive({**FAST_DEV_RUN, "output_dir": str(folder)}))
        else:
            run_experiment(config, fresh=fresh, accept_changes=accept_changes)
    except Interrupted as interruption:
        sys.exit(exit_code_of(str(interruption)))
    except TrainwrightError:
        note_explained_error()
        raise


def _begin_as_worker() -> bool:
    """Prepares a process that a launcher may have started; returns whether it is the first attempt at this run."""
    die_with_launcher()
    leave_if_explained()
    if num_restarts():
        # --fresh is not for this one: the first attempt has set the earlier run aside, and this one goes on.
        logger.warning("Restart %d: the run goes on from its newest checkpoint.", num_restarts())
    return num_restarts() == 0


def _check_launch(nproc: int, max_restarts: int, nnodes: int, rendezvous: str | None) -> None:
    """Refuses options of a launcher that cannot do what they say."""
    if nnodes > 1 and rendezvous is None:
        raise ConfigError(f"--nnodes {nnodes} needs --rendezvous HOST:PORT, the same on all: where the machines meet.")
    if rendezvous is not None and nnodes == 1:
        raise ConfigError("--rendezvous is for several machines. Give --nnodes too, or leave it out.")
    if rendezvous is not None and not rendezvous.rpartition(":")[2].isdecimal():
        raise ConfigError(f"--rendezvous: {rendezvous!r} is not HOST:PORT, such as node-1:29400.")
    if "WORLD_SIZE" in os.environ and not is_launched() and (nproc > 1 or max_restarts or nnodes > 1):
        raise ConfigError(
            "--nproc, --nnodes and --max-restarts start processes, but a launcher has started this one: WORLD_SIZE is "
            "set. Leave them out, or start the command without the launcher."
        )


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
