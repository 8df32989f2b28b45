"""`trainwright train run.yaml a.b=value …`: trains, or goes on with, the run that a file or an experiment describes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwright.api.experiments import load_experiment, split_overrides
from trainwright.config import RunConfig
from trainwright.errors import ConfigError, TrainwrightError
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

MODES = "train, eval, train_and_eval, train_and_post_eval, continuous_eval"
"""What main.py offers, which is not imported for `--help`."""

_EVALUATING = ("eval", "continuous_eval")
"""The modes that train nothing."""

FAST_DEV_RUN = {
    "checkpoint.folder": None,
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


Run = Annotated[str | None, typer.Argument(help="The YAML or Python file of the run.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to replace, such as trainer.max_steps=500.", show_default=False)
]
Named = Annotated[
    str | None, typer.Option("--experiment", metavar="NAME", help="Instead of a file: what @experiment registered.")
]
Mode = Annotated[str, typer.Option(metavar="MODE", help=f"One of {MODES}.")]
ModelDir = Annotated[
    Path | None, typer.Option("--model-dir", "--model_dir", help="The run's folder, instead of output_dir/name.")
]
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option("--config-file", "--config_file", help="With --experiment: YAML laid over it; may be repeated."),
]
ParamsOverride = Annotated[
    list[str] | None,
    typer.Option("--params-override", "--params_override", metavar="K=V,…", help="Settings to replace, in one word."),
]
Imports = Annotated[
    list[str] | None, typer.Option(metavar="MODULE", help="With --experiment: a module or file that registers some.")
]
Timeout = Annotated[
    float | None,
    typer.Option(min=0, metavar="SECONDS", help="With --mode continuous_eval: how long to wait for a checkpoint."),
]
EvalOnly = Annotated[
    bool, typer.Option("--eval-only", help="Evaluate the newest checkpoint and print the metrics: --mode eval.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where the run was, as without it; say if nothing is there.")
]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="Start the processes again, so often, after one is lost; the run goes on.")
]
Rendezvous = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="With --nnodes: where the machines meet; one of them.")
]
AcceptChanges = Annotated[
    bool, typer.Option("--accept-changes", help="Go on although settings of the mathematics changed.")
]
Profile = Annotated[
    bool, typer.Option("--profile", help="Profile ten steps: a trace in the run folder, and where the time went.")
]
FastDevRun = Annotated[bool, typer.Option("--fast-dev-run", help="Run a few steps of everything and keep nothing.")]


def train(
    run: Run = None,
    overrides: Overrides = None,
    experiment: Named = None,
    mode: Mode = "train_and_eval",
    model_dir: ModelDir = None,
    config_file: ConfigFiles = None,
    params_override: ParamsOverride = None,
    imports: Imports = None,
    timeout: Timeout = None,
    eval_only: EvalOnly = False,
    resume: Resume = False,
    nproc: Annotated[int, typer.Option(min=1, help="How many processes to start on this machine.")] = 1,
    max_restarts: MaxRestarts = 0,
    nnodes: Annotated[int, typer.Option(min=1, help="How many machines run this command together.")] = 1,
    rendezvous: Rendezvous = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; an earlier run is set aside.")] = False,
    accept_changes: AcceptChanges = False,
    fast_dev_run: FastDevRun = False,
    profile: Profile = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the whole config and stop.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show warnings and errors only.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show every frame of a traceback.")] = False,
) -> None:
    """Train the run that a file or an experiment describes. Running it again continues where it was."""
    if quiet and verbose:
        raise ConfigError("--quiet shows less and --verbose shows more. Give one of the two.")
    show_log(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    config = _load(run, overrides or [], experiment, config_file or [], params_override or [], imports or [])
    mode = _settle_mode(mode, eval_only=eval_only, resume=resume, fresh=fresh, fast_dev_run=fast_dev_run)
    is_given = {"--timeout": timeout is not None, "--model-dir": model_dir is not None, "--fresh": fresh}
    is_given |= {"--accept-changes": accept_changes, "--resume": resume}
    _reject_idle(mode, is_given, fast_dev_run=fast_dev_run)
    if profile:
        config = _with_profile(config, mode, fast_dev_run=fast_dev_run)
    if print_config:
        print(config.to_yaml(), end="")
        return
    _check_launch(nproc, max_restarts, nnodes, rendezvous)
    if (nproc > 1 or max_restarts or nnodes > 1) and not is_launched():
        code = launch(nproc, sys.argv[1:], max_restarts=max_restarts, num_nodes=nnodes, rendezvous=rendezvous)
        sys.exit(code)
    fresh = _begin_as_worker() and fresh
    if resume and mode not in _EVALUATING:
        _say_if_nothing_is_there(config, model_dir)
    from trainwright.api.run import run_experiment

    options: dict[str, Any] = {"mode": mode, "model_dir": model_dir, "timeout_seconds": timeout}
    try:
        with _few_steps(config) if fast_dev_run else nullcontext(config) as planned:
            _, logs = run_experiment(planned, fresh=fresh, accept_changes=accept_changes, **options)
    except TrainwrightError:
        note_explained_error()
        raise
    if mode in _EVALUATING and os.environ.get("RANK", "0") == "0":
        print(json.dumps(logs, indent=2))


@contextmanager
def _few_steps(config: RunConfig) -> Iterator[RunConfig]:
    """Yields the config of a few steps of everything, in a folder that is removed afterwards."""
    with _shared_temporary_folder() as folder:
        yield config.derive({**FAST_DEV_RUN, "output_dir": str(folder)})


def _load(
    run: str | None,
    overrides: list[str],
    experiment: str | None,
    config_files: list[Path],
    params_override: list[str],
    imports: list[str],
) -> RunConfig:
    """Reads the file, or the experiment with the files over it; exactly one of the two is given."""
    if experiment is not None and run is not None and "=" in run:
        overrides, run = [run, *overrides], None  # there is no file: the first word is an override as well
    if (run is None) == (experiment is None):
        given = f"got both {run} and {experiment}" if run is not None else "got neither"
        raise ConfigError(f"train needs the file of a run, such as run.yaml, or --experiment NAME; {given}.")
    overrides = [*(each for text in params_override for each in split_overrides(text)), *overrides]
    if experiment is not None:
        return load_experiment(experiment, config_files=config_files, overrides=overrides, imports=imports)
    for name, given_too in (("--config-file", config_files), ("--imports", imports)):
        if given_too:
            raise ConfigError(f"{name} goes with --experiment. Write `extends` or `imports` into {run} instead.")
    assert run is not None
    if any(text.lstrip().startswith("{") for text in overrides):
        raise ConfigError("--params-override: a YAML mapping goes with --experiment. Write a.b=value,c=value instead.")
    return RunConfig.load(Path(run), overrides)


def _settle_mode(mode: str, *, eval_only: bool, resume: bool, fresh: bool, fast_dev_run: bool) -> str:
    """Returns what to do, and rejects flags that contradict each other."""
    if mode in ("eager", "compile", "graph"):
        raise ConfigError(
            f"--mode says what to do, one of {MODES}. How a step runs is a setting: write runtime.mode={mode}."
        )
    if mode not in MODES.split(", "):
        raise ConfigError(f"--mode: {mode!r} is unknown. Use one of {MODES}.")
    if resume and fresh:
        raise ConfigError("--resume goes on with a run and --fresh starts it over. Give one of the two.")
    if eval_only and mode not in ("train_and_eval", "eval"):
        raise ConfigError(f"--eval-only is --mode eval, but --mode is {mode}. Give one of the two.")
    mode = "eval" if eval_only else mode
    if fast_dev_run and mode in _EVALUATING:
        raise ConfigError(
            f"--fast-dev-run trains a few steps and keeps nothing: there is nothing to evaluate ({mode})."
        )
    return mode


def _reject_idle(mode: str, is_given: Mapping[str, bool], *, fast_dev_run: bool) -> None:
    """Rejects flags that are given and have no effect here."""
    idle: dict[str, str] = {}
    if mode != "continuous_eval":
        idle["--timeout"] = f"only --mode continuous_eval waits for checkpoints, and this is {mode}"
    if mode in _EVALUATING:
        # --resume is no mistake here: there is nothing but the newest checkpoint to evaluate.
        idle |= dict.fromkeys(("--fresh", "--accept-changes"), f"--mode {mode} trains nothing")
    if fast_dev_run:
        never_kept = "--fast-dev-run begins in a folder of its own and keeps nothing"
        idle |= dict.fromkeys(("--fresh", "--accept-changes", "--resume", "--model-dir"), never_kept)
    for flag, why in idle.items():
        if is_given[flag]:
            raise ConfigError(f"{flag}: has no effect, for {why}. Leave it out.")


def _with_profile(config: RunConfig, mode: str, *, fast_dev_run: bool) -> RunConfig:
    """Returns the config with the hook that profiles some steps; one that the file names itself is enough."""
    if fast_dev_run:
        raise ConfigError(
            "--profile writes into the run folder, and --fast-dev-run keeps nothing. Give one of the two."
        )
    if mode in _EVALUATING:
        raise ConfigError(f"--profile is for steps of training, and --mode is {mode}. Leave one of them out.")
    hooks = config.to_dict()["hooks"]
    if any(hook["type"] == "profiler" for hook in hooks):
        return config
    return config.derive({"hooks": [*hooks, {"type": "profiler"}]})


def _say_if_nothing_is_there(config: RunConfig, model_dir: Path | None) -> None:
    from trainwright.checkpoint.folder import run_folder
    from trainwright.checkpoint.listing import checkpoints_location, list_checkpoints

    if model_dir is not None:
        config = config.derive({"name": model_dir.absolute().name})
    folder = run_folder(config) if model_dir is None else model_dir
    if not list_checkpoints(checkpoints_location(folder, config)):
        logger.warning("--resume: %s holds no checkpoint, so the run starts at step 0.", folder)


def _begin_as_worker() -> bool:
    """Prepares a process that a launcher may have started; returns whether it is the first attempt at this run."""
    die_with_launcher()
    leave_if_explained()
    if num_restarts():
        # --fresh is not for this one: the first attempt has set the earlier run aside, and this one goes on.
        logger.warning("Restart %d: the run goes on from its newest checkpoint.", num_restarts())
    return num_restarts() == 0


def _check_launch(nproc: int, max_restarts: int, nnodes: int, rendezvous: str | None) -> None:
    """Rejects options of a launcher that cannot do what they say."""
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
