"""The story of a run on one page: build or resume, train, evaluate, say how it went."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainwright.build import build_evaluator, build_trainer
from trainwright.checkpoint import contents
from trainwright.checkpoint.folder import LOG_FILE, run_folder
from trainwright.checkpoint.resume import pick_step
from trainwright.config import RunConfig
from trainwright.errors import ConfigError
from trainwright.hooks.obey_preemption import Listener
from trainwright.launch.slurm import requeue
from trainwright.log import rank_log, run_log
from trainwright.loop.evaluation import evaluate_sets
from trainwright.loop.trainer import Trainer
from trainwright.parallel import processes
from trainwright.parallel.first_error import note_failure

logger = logging.getLogger(__name__)

START_UP_SECONDS = 5.0
"""How long a process that was told to leave may stay before it trains: there is nothing to save yet."""

MODES = ("train", "eval", "train_and_eval")


class Interrupted(Exception):  # noqa: N818 # not an error: the run is safe and will go on
    """The run was asked to leave, has saved its step, and goes on when the same command is run again."""


class _ToldToLeave(BaseException):
    """Raised from a signal's handler wherever the start-up is. No Exception: somebody's `except` would take it."""


def run_experiment(
    config: RunConfig,
    *,
    mode: str = "train_and_eval",
    model_dir: str | None = None,
    trainer_class: type[Trainer] | None = None,
    fresh: bool = False,
    accept_changes: bool = False,
    step: int | str = "latest",
) -> tuple[torch.nn.Module, dict[str, float]]:
    """Runs an experiment and returns (model, evaluation logs).

    `train` leaves the evaluation sets alone; `eval` evaluates the checkpoint that `step` names ("latest",
    "best" or a number) and trains nothing. `model_dir` replaces output_dir/name. Running it again
    continues the run.
    """
    if mode not in MODES:
        raise ConfigError(f"mode: {mode!r} is unknown. Use one of {', '.join(MODES)}.")
    if model_dir is not None:
        folder = Path(os.path.abspath(model_dir))  # noqa: PTH100  # "." has no name; resolve() would follow links
        config = config.derive({"output_dir": str(folder.parent), "name": folder.name})
    with _start_up() as starting:
        if mode == "eval":
            return _evaluate(config, trainer_class, step)
        with run_log() as open_logs:
            evaluates = mode != "train"
            trainer = build_trainer(
                config, trainer_class, fresh=fresh, accept_changes=accept_changes, evaluates=evaluates
            )
            # A finished run changes nothing, its log included.
            if not trainer.is_finished:
                open_logs(*_log_files(trainer))
            starting.only_note()  # the training listens itself, and what comes after it must not undo it
            logs = trainer.train()
            _say_how_it_ended(trainer)
            trainer.ranks.part()
            if trainer.interrupted and config.preemption.requeue and trainer.ranks.is_first:
                requeue()
        if trainer.interrupted:
            raise Interrupted(trainer.stop_reason)
        return trainer.model, logs


@contextmanager
def _start_up() -> Iterator[Listener]:
    """Lets a signal end the run at once until it trains, and leaves the other processes whatever happens."""
    starting = Listener(_leave, deadline_seconds=START_UP_SECONDS)
    try:
        starting.listen()
        try:
            yield starting
        except Exception as error:
            if not isinstance(error, Interrupted):
                note_failure(error)  # before the others notice that this rank is gone
            raise
        finally:
            starting.only_note()  # the run has ended, one way or the other: a signal must not undo that
            processes.leave()
    except _ToldToLeave as told:
        raise Interrupted(str(told)) from None
    finally:
        starting.close()


def _leave(signal_name: str) -> None:
    """Ends a run that has not begun to train, or has ended: there is nothing to save."""
    raise _ToldToLeave(signal_name)


def _evaluate(
    config: RunConfig, trainer_class: type[Trainer] | None, step: int | str
) -> tuple[torch.nn.Module, dict[str, float]]:
    trainer = build_evaluator(config, trainer_class)
    test = trainer.surroundings.test_data
    sets = trainer.eval_data if test is None else {**trainer.eval_data, test.name: test}
    if not sets:
        raise ConfigError("data.eval: there is no evaluation set. Name one, such as eval: {valid: {type: …}}.")
    store = trainer.surroundings.store
    # The first rank looks for all: a checkpoint may come or go meanwhile.
    chosen = trainer.ranks.broadcast(
        pick_step(store, step, best=config.checkpoint.keep_best) if trainer.ranks.is_first else 0
    )
    contents.restore_model(store, chosen, trainer.model)
    # A hook may evaluate with other weights than the checkpoint's model: the averaged ones.
    contents.restore_hooks(store.read(chosen, "training")["hooks"], trainer.moments.keyed())
    trainer.step = chosen
    logger.info("Evaluating %s", store.path(chosen))
    with trainer.storage:
        return trainer.model, evaluate_sets(trainer, sets)


def _log_files(trainer: Trainer) -> Iterator[Path]:
    if trainer.ranks.is_first:
        yield trainer.folder / LOG_FILE
    if trainer.ranks.size > 1:
        yield rank_log(trainer.folder, trainer.ranks.rank)


def _say_how_it_ended(trainer: Trainer) -> None:
    if not trainer.ranks.is_first:
        return
    if trainer.interrupted:
        logger.info(
            "%s: step %d is finished and saved. Run the same command to go on from there.",
            trainer.stop_reason,
            trainer.step,
        )
    elif trainer.stop_reason is not None:
        logger.info("Stopped at step %d: %s.", trainer.step, trainer.stop_reason)
    else:
        logger.info("Finished at step %d.", trainer.step)
    folder = run_folder(trainer.config)
    if trainer.best.step is not None and trainer.best.step in trainer.surroundings.store.steps():
        where = trainer.surroundings.store.path(trainer.best.step)
        logger.info("Best %s %.4g, at step %d: %s", trainer.best.metric, trainer.best.value, trainer.best.step, where)
    logger.info("Run folder: %s", folder)
    if not trainer.interrupted and trainer.eval_data:
        step = "best" if trainer.best.step is not None else "latest"
        logger.info("Next: trainwright evaluate %s --step %s", folder, step)
