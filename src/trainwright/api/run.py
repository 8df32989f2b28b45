"""A run from start to end: build or resume, train, evaluate, report how it went; `run_experiment` starts here."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from trainwright.build.components import Build
from trainwright.build.run import (
    build_evaluator,
    build_trainer,
    component_of,
    is_found_again,
    recorded,
    sets_of,
    shown_type,
    unnamed_trainer,
)
from trainwright.checkpoint.folder import LOG_FILE, read_config, read_trainer, run_folder
from trainwright.checkpoint.resume import pick_step
from trainwright.config import RunConfig
from trainwright.config.yaml_text import absolute
from trainwright.data.stream_loader import EvaluationData
from trainwright.errors import HANG_EXIT_CODE, ConfigError, exit_code_of, shorten_tracebacks
from trainwright.hooks.preemption import SignalListener
from trainwright.launch.slurm import requeue
from trainwright.log import rank_log, run_log
from trainwright.loop.evaluation import POLL_SECONDS, evaluate_checkpoints
from trainwright.loop.task import Task
from trainwright.loop.trainer import Trainer
from trainwright.parallel import processes
from trainwright.parallel.processes import note_failure

logger = logging.getLogger(__name__)

START_UP_SECONDS = 5.0
"""How long a process that was told to leave may stay before it trains: there is nothing to save yet."""

MODES = ("train", "eval", "train_and_eval", "train_and_post_eval", "continuous_eval")


class Interrupted(SystemExit):  # not an error: the run is safe and will go on
    """The run was asked to leave, has saved its step, and goes on when the same command is run again.

    A program that lets it pass ends as `trainwright train` does: without a traceback, and by a signal with 128 + its
    number. `reason` is the signal's name, or what `trainer.interrupt` was given.
    """

    def __init__(self, reason: str) -> None:
        is_signal = reason in signal.Signals.__members__
        super().__init__(exit_code_of(reason) if is_signal else HANG_EXIT_CODE)  # "temporary failure, try again"
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class _StopRequested(BaseException):
    """Raised from a signal's handler wherever the start-up is. No Exception: somebody's `except` would take it."""


def run_experiment(
    config: RunConfig,
    *,
    mode: str = "train_and_eval",
    model_dir: str | os.PathLike[str] | None = None,
    trainer: type[Trainer] | Trainer | None = None,
    task: Task | None = None,
    fresh: bool = False,
    accept_changes: bool = False,
    step: int | str = "latest",
    poll_seconds: float = POLL_SECONDS,
    timeout_seconds: float | None = None,
) -> tuple[torch.nn.Module, dict[str, float]]:
    """Runs an experiment and returns (model, evaluation logs). Running it again continues the run.

    train                 leaves the evaluation sets alone
    eval                  evaluates the checkpoint that `step` names ("latest", "best" or a number), whatever settings
                          have changed since; trains nothing
    train_and_eval        evaluates as the config says, and at the end
    train_and_post_eval   evaluates once, at the end
    continuous_eval       evaluates each new checkpoint of a run that trains elsewhere, once, until that has ended;
                          `timeout_seconds` is how long it waits for one; None: for ever

    `model_dir` replaces output_dir/name. `trainer` is a class to use instead of the config's, or what `build_trainer`
    made of this config; `task` is used instead of the config's. The run's config.yaml names both. A run that is told
    to leave raises `Interrupted`.
    """
    shorten_tracebacks()
    config = _in_model_dir(config, mode, model_dir)
    built = trainer if isinstance(trainer, Trainer) else None
    if built is not None:
        _reject_other_arguments(built, config, task=task, fresh=fresh, accept_changes=accept_changes)
    with start_up() as starting:
        kind: type[Trainer] | None = None
        if not isinstance(trainer, Trainer):
            _reject_no_parts(trainer, task)
            config = recorded(config, trainer, task)
            kind = trainer if task is None else _with_task(config, trainer, task)
        if mode in ("eval", "continuous_eval"):
            evaluator = built or build_evaluator(config, kind)
            _say_who_trained(evaluator)
            sets = _required_sets(evaluator)
            if mode == "eval":
                return evaluator.model, evaluate_checkpoint(evaluator, sets, step)
            return evaluator.model, evaluate_checkpoints(evaluator, sets, poll_seconds, timeout_seconds)
        with run_log() as open_logs:
            options = {"fresh": fresh, "accept_changes": accept_changes, "evaluates": mode != "train"}
            running = built or build_trainer(config, kind, **options)
            _evaluate_only_in(mode, running)
            was_finished = running.is_finished
            if not was_finished:  # a finished run changes nothing, its log included
                open_logs(*_log_files(running))
            starting.only_note()  # the training listens itself, and what comes after it must not undo it
            logs = running.train()
            logs = _wind_up(running, logs, was_finished=was_finished)
        if running.interrupted:
            raise Interrupted(running.stop_reason or "interrupted")
        return running.model, logs


def _in_model_dir(config: RunConfig, mode: str, model_dir: str | os.PathLike[str] | None) -> RunConfig:
    """Returns the config of a run in `model_dir`; one that is evaluated after training alone has no period."""
    if mode not in MODES:
        raise ConfigError(f"mode: {mode!r} is unknown. Use one of {', '.join(MODES)}.")
    values: dict[str, object] = {}
    if model_dir is not None:
        folder = absolute(model_dir)  # "." has no name
        values |= {"output_dir": str(folder.parent), "name": folder.name}
    if mode == "train_and_post_eval" and config.evaluation.every_steps is not None:
        values["evaluation.every_steps"] = None
    return config.derive(values) if values else config


def _reject_no_parts(trainer: object, task: object) -> None:
    if trainer is not None and not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise ConfigError(
            f"trainer: must be a subclass of Trainer, or what build_trainer(config, …) returned; got {trainer!r}."
        )
    if task is not None and not isinstance(task, Task):
        raise ConfigError(f"task: must be an instance of Task, such as MyTask(); got {task!r}.")


def _with_task(config: RunConfig, trainer: type[Trainer] | None, task: Task) -> type[Trainer]:
    """Returns the class to build, the given one or the config's, with a task of the caller's."""
    kind = trainer or Build(config).trainer_class()
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}

    def build_task(cls: type[Trainer], build: Build) -> Task:
        if build.config.task is not None and build.config.task == component_of(task, build.config):
            build.used.add("task")  # the section names this task
        return task

    return type(kind.__name__, (kind,), {**names, "build_task": classmethod(build_task)})


def _say_who_trained(evaluator: Trainer) -> None:
    """Warns where a run is measured by another trainer or task than it was trained by: their values may differ."""
    saved = read_config(evaluator.folder) if evaluator.ranks.is_first else None
    if saved is None:
        return
    trained_by = read_trainer(evaluator.folder) or shown_type(saved.trainer)
    for section, then, now in (
        (
            "trainer",
            trained_by,
            unnamed_trainer(evaluator.config, type(evaluator)) or shown_type(evaluator.config.trainer),
        ),
        ("task", shown_type(saved.task), shown_type(evaluator.config.task)),
    ):
        if then != now:
            logger.warning("%s: the run was trained by %s, but is evaluated by %s.", section, then, now)


def _reject_other_arguments(
    trainer: Trainer, config: RunConfig, *, task: Task | None, fresh: bool, accept_changes: bool
) -> None:
    """Rejects what was decided when a trainer was built."""
    late = {"task": task is not None, "fresh": fresh, "accept_changes": accept_changes}
    for name in (name for name, is_given in late.items() if is_given):
        raise ConfigError(f"{name}: has no effect on a trainer that is built. Give it to build_trainer, or its class.")
    own = trainer.config
    resolved = {
        "checkpoint.folder": own.checkpoint.folder,
        "trainer.max_steps": own.trainer.max_steps,
        "trainer.global_batch_size": own.trainer.global_batch_size,
        "trainer.micro_batch_size": own.trainer.micro_batch_size,
        "evaluation.every_steps": own.evaluation.every_steps,  # that of a run which is evaluated at its end
        "name": config.name if trainer.ranks.is_first else own.name,  # the first rank's, for all
    }
    config = recorded(config, type(trainer)) if recorded(own, type(trainer)) == own else config
    if config.derive(resolved) != own:
        raise ConfigError(
            f"trainer: this {type(trainer).__name__} was built from another config, or for another folder "
            f"({trainer.folder}). Give the config that it was built from, or its own: trainer.config."
        )


def _evaluate_only_in(mode: str, trainer: Trainer) -> None:
    """Makes a trainer that somebody else has built evaluate as the mode says."""
    if mode == "train":
        trainer.skip_evaluation()
    elif mode == "train_and_post_eval" and trainer.config.evaluation.every_steps is not None:
        trainer.evaluate_only_at_end()


def _wind_up(trainer: Trainer, logs: dict[str, float], *, was_finished: bool) -> dict[str, float]:
    """Says how the training went, and leaves the other ranks; returns the logs of the last evaluation."""
    if was_finished:
        logs = _complete(trainer, logs)
    _say_how_it_ended(trainer)
    trainer.ranks.part()
    if trainer.interrupted and trainer.config.preemption.requeue and trainer.ranks.is_first:
        requeue()
    return logs


def _complete(trainer: Trainer, logs: Mapping[str, float]) -> dict[str, float]:
    """Evaluates the sets of which a run that had ended before knows nothing: it was trained without them."""
    unknown = {
        name: data
        for name, data in sets_of(trainer).items()
        if not any(metric.startswith(f"{name}/") for metric in logs)
    }
    if not unknown:
        return dict(logs)
    with trainer.storage:
        return {**logs, **trainer.evaluate(unknown)}


@contextmanager
def start_up() -> Iterator[SignalListener]:
    """Lets a signal end the run at once until it trains, and leaves the other processes whatever happens."""
    starting = SignalListener(_leave, deadline_seconds=START_UP_SECONDS)
    try:
        starting.listen()
        try:
            yield starting
        except Exception as error:
            note_failure(error)  # before the others notice that this rank is gone
            raise
        finally:
            starting.only_note()  # the run has ended, one way or the other: a signal must not undo that
            processes.leave()
    except _StopRequested as request:
        raise Interrupted(str(request)) from None
    finally:
        starting.close()


def _leave(signal_name: str) -> None:
    """Ends a run that has not begun to train, or has ended: there is nothing to save."""
    raise _StopRequested(signal_name)


def _required_sets(trainer: Trainer) -> dict[str, EvaluationData]:
    sets = sets_of(trainer)
    if not sets:
        problem = "data.eval: there is no evaluation set. Name one, such as eval: {valid: {type: …}}."
        raise ConfigError(problem, where=trainer.config.origin("data.eval"))
    return sets


def evaluate_checkpoint(
    trainer: Trainer, sets: Mapping[str, EvaluationData], step: int | str | None
) -> dict[str, float]:
    """Evaluates the checkpoint that `step` names on every set; None: the weights that the model has been built with."""
    if step is not None:
        _restore(trainer, step)
    with trainer.storage:
        return trainer.evaluate(sets) if sets else {}


def _restore(trainer: Trainer, step: int | str) -> None:
    store = trainer.context.store
    best = trainer.config.checkpoint.keep_best
    # The first rank looks for all: a checkpoint may come or go meanwhile.
    chosen = trainer.ranks.broadcast(pick_step(store, step, best=best) if trainer.ranks.is_first else 0)
    trainer.load_weights(chosen)
    logger.info("Evaluating %s", store.path(chosen))


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
    elif trainer.stop_reason is not None and trainer.step < trainer.max_steps:
        logger.info("Stopped at step %d: %s.", trainer.step, trainer.stop_reason)
    else:
        logger.info("Finished at step %d.", trainer.step)
    folder = run_folder(trainer.config)
    if trainer.best.step is not None and trainer.best.step in trainer.context.store.steps():
        where = trainer.context.store.path(trainer.best.step)
        logger.info("Best %s %.4g, at step %d: %s", trainer.best.metric, trainer.best.value, trainer.best.step, where)
    logger.info("Run folder: %s", folder)
    from_file = not trainer.config.trainer.type.startswith("trainwright.api.")  # functions are in no file
    if not trainer.interrupted and trainer.eval_data and from_file and is_found_again(trainer.config):
        step = "best" if trainer.best.step is not None else "latest"
        logger.info("Next: trainwright evaluate %s --step %s", folder, step)
