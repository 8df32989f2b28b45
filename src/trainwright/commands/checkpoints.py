"""`trainwright checkpoints RUN`: lists the checkpoints of a run with their age, size, metric and state.

The listing reads manifests and sizes and imports no torch; `--verify` reads every byte; `--prune` deletes by the
policy of the run's config.yaml. checkpoint/store.py defines what a checkpoint is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from trainwright.checkpoint.listing import CHECKPOINTS, Listed, checkpoints_location, list_checkpoints
from trainwright.checkpoint.manifest import STEP_NAME, UnreachableError
from trainwright.checkpoint.remote_files import is_address, local_path
from trainwright.checkpoint.retention import Retention, delete_all
from trainwright.commands.terminal import CONFIG_FILE, MISSING, age_text, named_run, show_rows, size_text
from trainwright.config import RunConfig
from trainwright.errors import CheckpointError, TrainwrightError
from trainwright.safe_text import mask_secrets, safe


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder or URL of checkpoints, and their run if it is known."""

    checkpoints: str | Path
    run: Path | None = None
    config: RunConfig | None = None

    def __str__(self) -> str:
        return mask_secrets(str(self.checkpoints))


def checkpoints(
    run: Annotated[
        str,
        typer.Argument(
            help="The run's folder or name, or the folder of its checkpoints.",
            metavar="RUN",
            show_default=False,
            callback=named_run,
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every byte with its hash; exit with 1 if one is damaged.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete what the run's policy does not keep (keep_last, keep_best, …).")
    ] = False,
) -> None:
    """List the checkpoints of a run: step, age, size, metric, and whether each is intact."""
    folder = find_checkpoint_folder(run, needs_config=prune)
    found = list_checkpoints(folder.checkpoints)
    if not found:
        print(safe(f"There is no checkpoint in {folder}."))
        return
    if verify:
        found = _verify(folder, found)
    _show(found, folder, is_verified=verify)
    if verify and any(one.problem for one in found):
        rejected = " Nothing was deleted: a damaged checkpoint may be the newest one." if prune else ""
        print(safe(f"error: {folder}: some checkpoints are damaged.{rejected}"), file=sys.stderr)
        raise typer.Exit(1)
    if prune:
        print(_prune(folder))


def find_checkpoint_folder(run: str, *, needs_config: bool) -> CheckpointFolder:
    """Returns the checkpoints of `run`: a run folder, its checkpoints folder, or an address."""
    path = local_path(run)
    own, parent = path / CONFIG_FILE, path.absolute().parent / CONFIG_FILE
    if is_address(run):
        folder = CheckpointFolder(run)
    elif own.exists():
        config = _read_config(own, is_needed=needs_config)
        checkpoints = path / CHECKPOINTS if config is None else checkpoints_location(path, config)
        folder = CheckpointFolder(checkpoints, path, config)
    elif path.is_dir() and path.name == CHECKPOINTS and parent.exists():
        folder = CheckpointFolder(path, parent.parent, _read_config(parent, is_needed=needs_config))
    elif path.is_dir() and any(STEP_NAME.fullmatch(inner.name) for inner in path.iterdir()):
        folder = CheckpointFolder(path)
    else:
        problem = f"it has neither {CONFIG_FILE} nor checkpoints" if path.exists() else "it does not exist"
        raise CheckpointError(
            f"{run} is not a run folder: {problem}. Pass a folder such as runs/NAME (`trainwright runs` lists them), "
            "or the folder of its checkpoints."
        )
    if needs_config and folder.config is None:
        raise CheckpointError(f"{folder} has no policy: it is not in a run folder. Pass the run's folder to --prune.")
    return folder


def _read_config(path: Path, *, is_needed: bool) -> RunConfig | None:
    try:
        return RunConfig.load(path)
    except TrainwrightError as error:
        if is_needed:
            raise
        print(safe(f"warning: the run's settings cannot be read: {error}"), file=sys.stderr)
    return None


def _verify(folder: CheckpointFolder, found: Sequence[Listed]) -> list[Listed]:
    """Returns the checkpoints with the problems that reading them shows; reads only those without a problem."""
    from trainwright.checkpoint.remote_store import open_store

    store = open_store(folder.checkpoints)
    console = Console(stderr=True)
    verified = []
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("verifying", total=sum(one.size for one in found if _is_intact(one)))
        for one in found:
            problem = one.problem
            if _is_intact(one):
                progress.update(task, description=one.name)
                try:
                    store.verify(one.step)
                except UnreachableError:
                    raise
                except CheckpointError as error:
                    problem = str(error).rstrip(".")
                progress.advance(task, one.size)
            verified.append(replace(one, problem=problem))
    return verified


def _prune(folder: CheckpointFolder) -> str:
    """Deletes by policy and returns a sentence for the user; damaged checkpoints do not count and are kept."""
    from trainwright.checkpoint.folder_lock import FolderLock
    from trainwright.checkpoint.remote_store import open_store

    assert folder.run is not None
    assert folder.config is not None
    with FolderLock(folder.run):  # a run that starts now waits
        intact = {one.step: one for one in list_checkpoints(folder.checkpoints) if _is_intact(one)}
        metrics = {step: one.metrics for step, one in intact.items()}
        selected = Retention.of(folder.config.checkpoint).to_delete(metrics)
        deleted = delete_all(open_store(folder.checkpoints), selected)
    if not deleted:
        return "Nothing was deleted: the policy keeps them all." if not selected else "Nothing could be deleted."
    freed = size_text(sum(intact[step].size for step in deleted))
    kept = ", ".join(str(step) for step in intact if step not in deleted)
    return f"Deleted {', '.join(map(str, deleted))}: {freed} freed. Kept {kept}."


def _is_intact(one: Listed) -> bool:
    return not one.is_set_aside and not one.is_unfinished and one.problem is None


def _show(found: Sequence[Listed], folder: CheckpointFolder, *, is_verified: bool) -> None:
    policy = None if folder.config is None else Retention.of(folder.config.checkpoint)
    metrics = {one.step: one.metrics for one in found if _is_intact(one)}
    metric = _metric_shown(metrics, policy)
    best = None if policy is None else policy.best(metrics)
    now = time.time()
    rows = []
    for one in found:
        value = None if metric is None else one.metrics.get(metric)
        is_best = one.step == best and not one.is_set_aside and not one.is_unfinished
        shown = MISSING if value is None else f"{value:.4g}" + (" (best)" if is_best else "")
        age = MISSING if one.created is None else age_text(now - one.created.timestamp())
        rows.append((str(one.step), age, size_text(one.size), shown, _state(one, is_verified=is_verified)))
    show_rows(("step", "age", "size", metric or "metric", "state"), rows)


def _metric_shown(metrics: Mapping[int, Mapping[str, float]], policy: Retention | None) -> str | None:
    """Returns the policy's metric, or otherwise the first metric of the newest checkpoint that has one."""
    if policy is not None and policy.keep_best is not None:
        return policy.keep_best
    return next((name for step in sorted(metrics, reverse=True) for name in metrics[step]), None)


def _state(one: Listed, *, is_verified: bool) -> str:
    if one.is_set_aside:
        return f"set aside as damaged: {one.name}"
    if one.is_unfinished:
        return "not finished"
    if one.problem is not None:
        return f"damaged: {one.problem}"
    return "verified" if is_verified else "intact"
