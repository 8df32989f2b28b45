"""`trainwright train run.yaml a.b=value …`: trains or resumes the run of a file or an experiment."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.api.experiments import load_experiment, split_overrides
from trainwright.commands.terminal import Overrides, Trust, shown_in_terminal, temporary_folder
from trainwright.config import RunConfig
from trainwright.errors import ConfigError, TrainwrightError, WorkerLostError
from trainwright.launch.local import (
    is_launched,
    launch,
    leave_if_explained,
    note_explained_error,
    num_restarts,
)
from trainwright.log import outlive_console, show_log
from trainwright.safe_text import json_text

logger = logging.getLogger(__name__)

MODES = "train, eval, train_and_eval, train_and_post_eval, continuous_eval"
"""As in api/run.py, which is not imported for `--help`."""

_EVALUATING = ("eval", "continuous_eval")
"""The modes without training."""

FAST_DEV_RUN = {
    "checkpoint.folder": None,
    "trainer.max_steps": 3,
    "trainer.max_epochs": None,
    "trainer.max_samples": None,
    "trainer.max_tokens": None,
    "evaluation.every_steps": 2,
    "evaluation.every_epochs": None,
    "evaluation.max_batches": 2,
    "checkpoint.every_steps": 2,
    "checkpoint.every_epochs": None,
    "log.every_steps": 1,
    "log.every_epochs": None,
}
"""A few steps of everything, with other limits and periods than in the file."""


def train(
    run: Annotated[str | None, typer.Argument(help="The YAML or Python file of the run.", show_default=False)] = None,
    overrides: Overrides = None,
    experiment: Annotated[
        str | None, typer.Option(metavar="NAME", help="Instead of a file: a name that @experiment registered.")
    ] = None,
    mode: Annotated[str, typer.Option(metavar="MODE", help=f"One of {MODES}.")] = "train_and_eval",
    model_dir: Annotated[
        Path | None, typer.Option("--model-dir", "--model_dir", help="The run's folder, instead of output_dir/name.")
    ] = None,
    config_file: Annotated[
        list[Path] | None,
        typer.Option("--config-file", "--config_file", help="With --experiment: YAML merged into it; may be repeated."),
    ] = None,
    params_override: Annotated[
        list[str] | None,
        typer.Option("--params-override", "--params_override", metavar="K=V,…", help="Settings to replace."),
    ] = None,
    imports: Annotated[
        list[str] | None, typer.Option(metavar="MODULE", help="With --experiment: a module or file that registers it.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="With --mode continuous_eval: how long to wait for a checkpoint."),
    ] = None,
    eval_only: Annotated[
        bool, typer.Option("--eval-only", help="Evaluate the newest checkpoint and print the metrics: --mode eval.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run, as without it, and warn if there is no checkpoint.")
    ] = False,
    nproc: Annotated[int, typer.Option(min=1, help="The number of processes to start on this machine.")] = 1,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often to start all processes again after one was lost.")
    ] = 0,
    nnodes: Annotated[int, typer.Option(min=1, help="The number of machines that run this command together.")] = 1,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="With --nnodes: the rendezvous, on one of the machines.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; an earlier run is renamed.")] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume although settings that affect the math have changed.")
    ] = False,
    fast_dev_run: Annotated[
        bool, typer.Option("--fast-dev-run", help="Run a few steps of everything and keep nothing.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile ten steps: a trace in the run folder, and a summary.")
    ] = False,
    trust: Trust = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the whole config and stop.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show warnings and errors only.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show every frame of a traceback.")] = False,
) -> None:
    """Train the run of a file or an experiment. Running the same command again resumes it."""
    if quiet and verbose:
        raise ConfigError("--quiet shows less and --verbose shows more. Use one of the two.")
    show_log(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    config = _load(
        run, overrides or [], experiment, config_file or [], params_override or [], imports or [], trust=trust
    )
    mode = _resolve_mode(mode, eval_only=eval_only)
    given = {"--timeout": timeout is not None, "--model-dir": model_dir is not None, "--fresh": fresh}
    given |= {"--accept-changes": accept_changes, "--resume": resume, "--profile": profile}
    _reject_idle(mode, [flag for flag, is_given in given.items() if is_given], fast_dev_run=fast_dev_run)
    if profile and not any(hook.type == "profiler" for hook in config.hooks):
        config = config.derive({"hooks": [*config.to_dict()["hooks"], {"type": "profiler"}]})
    if print_config:
        print(config.to_yaml(), end="")
        return
    starts_processes = nproc > 1 or max_restarts > 0 or nnodes > 1
    _check_launch(nnodes, rendezvous, starts_processes=starts_processes)
    if starts_processes and not is_launched():
        with outlive_console():
            code = launch(nproc, sys.argv[1:], max_restarts=max_restarts, num_nodes=nnodes, rendezvous=rendezvous)
        sys.exit(code)
    leave_if_explained()
    if num_restarts():
        # The first attempt has applied --fresh; this one resumes.
        logger.warning("Restart %d: the run resumes from its newest checkpoint.", num_restarts())
        fresh = False
    if resume and mode not in _EVALUATING:
        _warn_without_checkpoint(config, model_dir)
    with shown_in_terminal("Importing torch"):
        from trainwright.api.run import run_experiment

    options: dict[str, Any] = {"mode": mode, "model_dir": model_dir, "timeout_seconds": timeout}
    options["keeps_folder"] = not fast_dev_run
    try:
        with _temporary_run(config) if fast_dev_run else nullcontext(config) as planned:
            _, logs = run_experiment(planned, fresh=fresh, accept_changes=accept_changes, **options)
    except WorkerLostError:
        raise  # a restart may succeed, as after the loss of a rank
    except TrainwrightError:
        note_explained_error()
        raise
    if mode in _EVALUATING and os.environ.get("RANK", "0") == "0":
        print(json_text(logs, indent=2))


def _load(
    run: str | None,
    overrides: list[str],
    experiment: str | None,
    config_files: list[Path],
    params_override: list[str],
    imports: list[str],
    *,
    trust: bool,
) -> RunConfig:
    """Loads the file, or the experiment with the files merged into it; exactly one of the two is given."""
    if experiment is not None and run is not None and ("=" in run or run.startswith("~")):
        overrides, run = [run, *overrides], None  # without a file, the first argument is an override as well
    overrides = [*(each for text in params_override for each in split_overrides(text)), *overrides]
    if experiment is not None and run is None:
        if trust:
            raise ConfigError("--trust is for the config.yaml of a run folder. Omit it with --experiment.")
        return load_experiment(experiment, config_files=config_files, overrides=overrides, imports=imports)
    if run is None or experiment is not None:
        given = f"got both {run} and {experiment}" if run is not None else "got neither"
        raise ConfigError(f"train needs the file of a run, such as run.yaml, or --experiment NAME; {given}.")
    for name, values in (("--config-file", config_files), ("--imports", imports)):
        if values:
            raise ConfigError(f"{name} goes with --experiment. Write `extends` or `imports` into {run} instead.")
    if any(text.lstrip().startswith("{") for text in overrides):
        raise ConfigError("--params-override: a YAML mapping requires --experiment. Write a.b=value,c=value instead.")
    return RunConfig.load(Path(run), overrides, trust=trust or None)


def _resolve_mode(mode: str, *, eval_only: bool) -> str:
    if mode in ("eager", "compile", "graph"):
        raise ConfigError(f"--mode is one of {MODES}. How a step runs is a setting: write runtime.mode={mode}.")
    if mode not in MODES.split(", "):
        raise ConfigError(f"--mode: {mode!r} is unknown. Use one of {MODES}.")
    if eval_only and mode not in ("train_and_eval", "eval"):
        raise ConfigError(f"--eval-only is --mode eval, but --mode is {mode}. Use one of the two.")
    return "eval" if eval_only else mode


def _reject_idle(mode: str, given: Collection[str], *, fast_dev_run: bool) -> None:
    """Rejects flags that have no effect, or that contradict each other."""
    if {"--resume", "--fresh"} <= {*given}:
        raise ConfigError("--resume continues a run and --fresh starts it over. Use one of the two.")
    if fast_dev_run and mode in _EVALUATING:
        raise ConfigError(f"--fast-dev-run keeps nothing: there is nothing to evaluate (--mode {mode}).")
    idle: dict[str, str] = {}
    if mode != "continuous_eval":
        idle["--timeout"] = f"only --mode continuous_eval waits for checkpoints, and this is {mode}"
    if mode in _EVALUATING:
        idle |= dict.fromkeys(("--fresh", "--accept-changes", "--profile"), f"--mode {mode} trains nothing")
    if fast_dev_run:
        flags = ("--fresh", "--accept-changes", "--resume", "--model-dir", "--profile")
        idle |= dict.fromkeys(flags, "--fast-dev-run uses a temporary folder and keeps nothing")
    for flag in given:
        if flag in idle:
            raise ConfigError(f"{flag}: has no effect, because {idle[flag]}. Omit it.")


def _warn_without_checkpoint(config: RunConfig, model_dir: Path | None) -> None:
    from trainwright.checkpoint.listing import checkpoints_location, list_checkpoints
    from trainwright.checkpoint.run_folder import run_folder

    if model_dir is not None:
        config = config.derive({"name": model_dir.absolute().name})
    folder = run_folder(config) if model_dir is None else model_dir
    if not list_checkpoints(checkpoints_location(folder, config)):
        logger.warning("--resume: %s has no checkpoint, so the run starts at step 0.", folder)


def _check_launch(nnodes: int, rendezvous: str | None, *, starts_processes: bool) -> None:
    if nnodes > 1 and rendezvous is None:
        raise ConfigError(f"--nnodes {nnodes} needs --rendezvous HOST:PORT, the same address on all machines.")
    if rendezvous is not None and nnodes == 1:
        raise ConfigError("--rendezvous is for several machines. Set --nnodes too, or omit it.")
    if rendezvous is not None and not rendezvous.rpartition(":")[2].isdecimal():
        raise ConfigError(f"--rendezvous: {rendezvous!r} is not HOST:PORT, such as node-1:29400.")
    if "WORLD_SIZE" in os.environ and not is_launched() and starts_processes:
        raise ConfigError(
            "--nproc, --nnodes and --max-restarts start processes, but a launcher has started this one: WORLD_SIZE is "
            "set. Omit them, or start the command without the launcher."
        )


@contextmanager
def _temporary_run(config: RunConfig) -> Iterator[RunConfig]:
    """Yields the config of a few steps in a temporary folder, which is the same on all ranks of one launcher."""
    with temporary_folder() as folder:
        yield config.derive({**FAST_DEV_RUN, "output_dir": str(folder)})
