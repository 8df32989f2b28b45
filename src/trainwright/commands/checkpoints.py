"""`trainwright checkpoints RUN`: a line for each checkpoint: how old, how large, how good, and whether it is whole.

The listing reads manifests and sizes and imports no torch; `--verify` reads every byte; `--prune` deletes by the
policy of the run's config.yaml. What a checkpoint is, checkpoint/store.py says.
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
from trainwright.checkpoint.remote_files import is_address, local_path, without_secrets
from trainwright.checkpoint.retention import Retention, delete_all
from trainwright.commands.runs import CONFIG_FILE, ago
from trainwright.commands.table import show_rows
from trainwright.config import RunConfig
from trainwright.errors import CheckpointError, TrainwrightError

_NONE = "–"


@dataclass(frozen=True)
class CheckpointFolder:
    """Where checkpoints lie, and the run that they are of, where one is known."""

    checkpoints: str | Path
    run: Path | None = None
    config: RunConfig | None = None

    def __str__(self) -> str:
        return without_secrets(str(self.checkpoints))


def checkpoints(
    run: Annotated[
        str, typer.Argument(help="The run's folder, or where its checkpoints are.", metavar="RUN", show_default=False)
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every byte with its hash; exit with 1 if one is damaged.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete what the run's policy (keep_last, keep_best, keep_every) lets go.")
    ] = False,
) -> None:
    """List the checkpoints of a run: step, age, size, metric, and whether each is intact."""
    place = find_checkpoint_folder(run, needs_config=prune)
    found = list_checkpoints(place.checkpoints)
    if not found:
        print(f"There is no checkpoint in {place}.")
        return
    if verify:
        found = _verify(place, found)
    _show(found, place, verified=verify)
    if verify and any(one.problem for one in found):
        rejected = " Nothing was deleted: one that is damaged may be all that is newer." if prune else ""
        print(f"error: {place}: some checkpoints are damaged.{rejected}", file=sys.stderr)
        raise typer.Exit(1)
    if prune:
        print(_prune(place))


def find_checkpoint_folder(run: str, *, needs_config: bool) -> CheckpointFolder:
    """Returns where the checkpoints are that `run` names: a run folder, its checkpoints folder, or an address."""
    if is_address(run):
        place = CheckpointFolder(run)
    else:
        path = local_path(run)
        own, parent = path / CONFIG_FILE, path.absolute().parent / CONFIG_FILE
        if own.exists():
            config = _read_config(own, is_needed=needs_config)
            checkpoints = path / CHECKPOINTS if config is None else checkpoints_location(path, config)
            place = CheckpointFolder(checkpoints, path, config)
        elif path.is_dir() and path.name == CHECKPOINTS and parent.exists():
            place = CheckpointFolder(path, parent.parent, _read_config(parent, is_needed=needs_config))
        elif path.is_dir() and any(STEP_NAME.fullmatch(inner.name) for inner in path.iterdir()):
            place = CheckpointFolder(path)
        else:
            what = "there is no such folder" if not path.exists() else f"it has neither {CONFIG_FILE} nor checkpoints"
            raise CheckpointError(
                f"{run} is no run folder: {what}. Give one such as runs/NAME (`trainwright runs` lists them), "
                "or where its checkpoints are."
            )
    if needs_config and place.config is None:
        raise CheckpointError(f"{place} says no policy: it is not in a run folder. Give the run's folder to --prune.")
    return place


def _read_config(path: Path, *, is_needed: bool) -> RunConfig | None:
    try:
        return RunConfig.load(path)
    except TrainwrightError as error:
        if is_needed:
            raise
        print(f"warning: the run's settings cannot be read: {error}", file=sys.stderr)
    return None


def _verify(place: CheckpointFolder, found: Sequence[Listed]) -> list[Listed]:
    """Returns the checkpoints with what reading them showed; those already known as damaged are not read."""
    from trainwright.checkpoint.remote_store import open_store

    store = open_store(place.checkpoints)
    read = [one for one in found if _counts(one) and one.problem is None]
    problems: dict[int, str] = {}
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("verifying", total=sum(one.size for one in read))
        for one in read:
            progress.update(task, description=one.name)
            try:
                store.verify(one.step)
            except UnreachableError:
                raise
            except CheckpointError as error:
                problems[one.step] = str(error).rstrip(".")
            progress.advance(task, one.size)
    return [replace(one, problem=problems[one.step]) if one in read and one.step in problems else one for one in found]


def _prune(place: CheckpointFolder) -> str:
    """Deletes by policy and returns what went, in a sentence. Checkpoints that are not whole neither count nor go."""
    from trainwright.checkpoint.folder import FolderLock
    from trainwright.checkpoint.remote_store import open_store

    assert place.run is not None
    assert place.config is not None
    # Held, not only looked at: a run that starts meanwhile is told to wait.
    with FolderLock(place.run):
        whole = {one.step: one for one in list_checkpoints(place.checkpoints) if _counts(one) and one.problem is None}
        wanted = Retention.of(place.config.checkpoint).to_delete({step: one.metrics for step, one in whole.items()})
        deleted = delete_all(open_store(place.checkpoints), wanted)
    if not deleted:
        return "Nothing was deleted: the policy keeps them all." if not wanted else "Nothing could be deleted."
    freed = size_text(sum(whole[step].size for step in deleted))
    kept = ", ".join(str(step) for step in whole if step not in deleted)
    return f"Deleted {', '.join(map(str, deleted))}: {freed} freed. Kept {kept}."


def _counts(one: Listed) -> bool:
    return not one.is_set_aside and not one.is_unfinished


def _show(found: Sequence[Listed], place: CheckpointFolder, *, verified: bool) -> None:
    policy = None if place.config is None else Retention.of(place.config.checkpoint)
    metrics = {one.step: one.metrics for one in found if _counts(one) and one.problem is None}
    metric = _metric_shown(metrics, policy)
    best = None if policy is None else policy.best(metrics)
    now = time.time()
    rows = [
        (
            str(one.step),
            _NONE if one.created is None else ago(now - one.created.timestamp()),
            size_text(one.size),
            _metric_cell(one, metric, is_best=one.step == best and _counts(one)),
            _state(one, verified=verified),
        )
        for one in found
    ]
    show_rows(("step", "age", "size", metric or "metric", "state"), rows)


def _metric_shown(metrics: Mapping[int, Mapping[str, float]], policy: Retention | None) -> str | None:
    """The policy's metric; where there is none, the first that the newest checkpoint has."""
    if policy is not None and policy.keep_best is not None:
        return policy.keep_best
    for step in sorted(metrics, reverse=True):
        for name in metrics[step]:
            return name
    return None


def _metric_cell(one: Listed, metric: str | None, *, is_best: bool) -> str:
    value = None if metric is None else one.metrics.get(metric)
    return _NONE if value is None else f"{value:.4g}" + (" (best)" if is_best else "")


def _state(one: Listed, *, verified: bool) -> str:
    if one.is_set_aside:
        return f"set aside as damaged: {one.name}"
    if one.is_unfinished:
        return "not finished"
    if one.problem is not None:
        return f"damaged: {one.problem}"
    return "verified" if verified else "intact"


def size_text(num_bytes: int) -> str:
    """Returns a number of bytes in the largest unit of which there is at least one: 1.2 GB."""
    for unit, length in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= length:
            return f"{num_bytes / length:.1f} {unit}"
    return f"{num_bytes} bytes"
