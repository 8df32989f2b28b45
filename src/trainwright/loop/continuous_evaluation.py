"""Evaluating a run that trains in another process: each checkpoint once, as it is committed.

Only reads what the training writes; its own results go to a file of their own. What one evaluation does is
evaluation.py's.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.checkpoint.folder import read_config
from trainwright.checkpoint.manifest import read_manifest
from trainwright.checkpoint.open_store import AnyStore
from trainwright.checkpoint.store import CheckpointStore
from trainwright.data.stream_loader import EvaluationData
from trainwright.errors import CheckpointError
from trainwright.loop.evaluation import evaluate_sets
from trainwright.loop.saving import restore_weights

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

EVALUATIONS_FILE = "evaluations.json"
"""In the run folder: a line of JSON for each checkpoint. metrics.json is the training's."""

Weights = tuple[int, str]
"""A step and the hashes of its weights: a run that was started over has other weights at the same steps."""

POLL_SECONDS = 10.0
"""How often a new checkpoint is looked for."""
_POLLS_PER_LOOK = 6  # whether an idle training was stopped stands in its newest checkpoint, which costs a read


def evaluate_as_they_come(
    trainer: Trainer, sets: Mapping[str, EvaluationData], poll_seconds: float, timeout_seconds: float | None
) -> dict[str, float]:
    """Evaluates each checkpoint once, in order, until the training has ended; returns the logs of the last one."""
    store, ranks = trainer.surroundings.store, trainer.ranks
    results = trainer.folder / EVALUATIONS_FILE
    seen: set[Weights] = set()
    last_step = 0
    logs: dict[str, float] = {}
    last_news, num_polls = time.monotonic(), 0
    logger.info("Waiting for checkpoints in %s", store.folder)
    while True:
        found: Weights | str | None = None
        if ranks.is_first:  # it looks for all: a checkpoint may come or go meanwhile
            found = _find_next(trainer, seen, look=num_polls % _POLLS_PER_LOOK == 0)
            if found is None and timeout_seconds is not None and time.monotonic() - last_news >= timeout_seconds:
                found = "late"
        found = ranks.broadcast(found)
        if isinstance(found, tuple):
            seen.add(found)
            last_step, _ = found
            if _restore_unless_gone(trainer, last_step):
                trainer.step = last_step
                logger.info("Evaluating %s", store.path(last_step))
                with trainer.storage:
                    logs = evaluate_sets(trainer, sets)
                if ranks.is_first:
                    _write_down(results, last_step, logs, is_first=len(seen) == 1)
            last_news, num_polls = time.monotonic(), 0
        elif found == "ended":
            logger.info("The training has ended at step %d: every checkpoint is evaluated.", last_step)
            return logs
        elif found == "late":
            problem = f"{store.folder}: no new checkpoint within {timeout_seconds:g} seconds"
            if not logs:
                raise CheckpointError(f"{problem}. Train first, give another folder, or wait longer.")
            logger.warning("%s; the last one evaluated is step %d.", problem, last_step)
            return logs
        else:
            num_polls += 1
            time.sleep(poll_seconds)


def _find_next(trainer: Trainer, seen: set[Weights], *, look: bool) -> Weights | str | None:
    """Returns the next checkpoint to evaluate, or "ended", or None while the training goes on."""
    steps = trainer.surroundings.store.steps()
    unseen = (weights for step in steps if (weights := _weights_of(trainer.surroundings.store, step)) not in seen)
    if (first := next(unseen, None)) is not None:
        return first
    saved = read_config(trainer.folder)
    max_steps = None if saved is None else saved.trainer.max_steps
    if not steps or max_steps is None:
        return None
    if steps[-1] >= max_steps:
        return "ended"
    if look:  # one that stopped early says so in its last checkpoint, which it may have written twice
        try:
            if trainer.surroundings.store.read_split(steps[-1], "training")["ended_under"] >= max_steps:
                return "ended"
        except CheckpointError as error:
            logger.debug("Not readable yet: %s", error)
    return None


def _weights_of(store: AnyStore, step: int) -> Weights:
    """Returns what tells a checkpoint's weights from others of its step; one that is saved again has the same."""
    if not isinstance(store, CheckpointStore):
        return step, ""  # a run is not started over behind an address that holds checkpoints
    try:
        files = read_manifest(store.path(step))["files"]
    except CheckpointError:
        return step, ""  # gone, or being replaced: what restores it says so
    return step, " ".join(sorted(fact["sha256"] for name, fact in files.items() if name.startswith("model")))


def _restore_unless_gone(trainer: Trainer, step: int) -> bool:
    """Loads a checkpoint's weights; returns False if the training has deleted it meanwhile."""
    failure: Exception | None = None
    try:
        restore_weights(trainer, step)
    except (CheckpointError, OSError) as error:
        failure = error
    failure = next((each for each in trainer.ranks.gather(failure) if each is not None), None)
    if failure is None:
        return True
    if trainer.ranks.broadcast(step in trainer.surroundings.store.steps()):
        raise failure
    logger.warning("Step %d was deleted before it could be evaluated. Keep more with checkpoint.keep_last.", step)
    return False


def _write_down(path: Path, step: int, logs: Mapping[str, float], *, is_first: bool) -> None:
    """Writes a line of the results; those of an earlier `continuous_eval` are replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if is_first else "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **logs}) + "\n")
    logger.info("Step %d: %s", step, ", ".join(f"{name} {value:.4g}" for name, value in logs.items()))
