"""`run_experiment`: builds or resumes a run, trains, evaluates and logs the result."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
from trainwright.checkpoint.resume import pick_step
from trainwright.checkpoint.run_folder import read_config, read_trainer, run_folder
from trainwright.config import RunConfig
from trainwright.config.yaml_text import absolute
from trainwright.errors import HANG_EXIT_CODE, ConfigError, exit_code_of, shorten_tracebacks
from trainwright.hooks.preemption import SignalListener
from trainwright.launch.slurm import requeue
from trainwright.log import outlive_console, run_log
from trainwright.loop.evaluation import POLL_SECONDS, EvaluatedSet, evaluate_checkpoints
from trainwright.loop.task import Task
from trainwright.loop.trainer import Trainer
from trainwright.parallel import processes
from trainwright.parallel.processes import note_failure
from trainwright.registry.trust import reject_untrusted
from trainwright.writers.benchmark_results import results_folder, table_lines

logger = logging.getLogger(__name__)

START_UP_SECONDS = 5.0
"""Seconds that a process has to exit on a signal before it trains; there is nothing to save yet."""

MODES = ("train", "eval", "train_and_eval", "train_and_post_eval", "continuous_eval")


class Interrupted(SystemExit):  # not an Exception: the run is saved
    """The run was interrupted and has saved its step; the same command resumes it.

    If it is not caught, the program exits like `trainwright train`: without a traceback, and after a signal with 128 +
    its number. `reason` is the signal's name, or the argument of `trainer.interrupt`.
    """

    def __init__(self, reason: str) -> None:
        is_signal = reason in signal.Signals.__members__
        super().__init__(exit_code_of(reason) if is_signal else HANG_EXIT_CODE)  # "temporary failure, try again"
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class _StopRequested(BaseException):
    """Raised by a signal handler before training. Not an Exception, so that user code does not catch it."""


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
    weights: str | None = None,
    poll_seconds: float = POLL_SECONDS,
    timeout_seconds: float | None = None,
    keeps_folder: bool = True,
) -> tuple[torch.nn.Module, dict[str, float]]:
    """Runs an experiment and returns `(model, evaluation logs)`. Running it again resumes the run.

    | mode | what it does |
    |---|---|
    | `train` | trains without evaluation |
    | `eval` | evaluates the checkpoint `step` without training; settings may have changed |
    | `train_and_eval` | evaluates as configured, and at the end |
    | `train_and_post_eval` | evaluates once, at the end |
    | `continuous_eval` | evaluates each new checkpoint of a run that another process trains, until that run has ended |

    Args:
        config: The settings of the run.
        mode: One of the modes above.
        model_dir: Replaces `output_dir/name`.
        trainer: A class that replaces the config's, or the result of `build_trainer` with this config.
        task: Replaces the config's. The run's config.yaml records `trainer` and `task`.
        fresh: Starts over; an earlier run of that name is moved aside.
        accept_changes: Continues although settings that affect the math differ.
        step: The checkpoint for `eval`: "latest", "best" or a number.
        weights: The weights of a checkpoint for `eval` and `continuous_eval`: "ema" (averaged), "raw" (trained), or
            None for those that the run evaluates with.
        poll_seconds: How often `continuous_eval` looks for a checkpoint.
        timeout_seconds: How long `continuous_eval` waits for one; None: no limit.
        keeps_folder: False if the caller deletes the run folder: then the log does not refer to it at the end.

    Raises:
        Interrupted: The run was interrupted and has saved its step.
    """
    shorten_tracebacks()
    reject_untrusted(config)
    config = _config_for_mode(config, mode, model_dir)
    built = trainer if isinstance(trainer, Trainer) else None
    if built is not None:
        _reject_other_arguments(built, config, task=task, fresh=fresh, accept_changes=accept_changes)
    with start_up() as starting, outlive_console():
        kind: type[Trainer] | None = None
        if not isinstance(trainer, Trainer):
            if trainer is not None and not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
                problem = "must be a subclass of Trainer, or the result of build_trainer(config, …)"
                raise ConfigError(f"trainer: {problem}; got {trainer!r}.")
            if task is not None and not isinstance(task, Task):
                raise ConfigError(f"task: must be an instance of Task, such as MyTask(); got {task!r}.")
            config = recorded(config, trainer, task)
            kind = trainer if task is None else _with_task(config, trainer, task)
        if mode in ("eval", "continuous_eval"):
            evaluator = built or build_evaluator(config, kind)
            _warn_if_trained_differently(evaluator)
            sets = sets_of(evaluator)
            if not sets:
                problem = "data.eval: an evaluation set is required, such as eval: {valid: {type: …}}."
                raise ConfigError(problem, where=config.origin("data.eval"))
            if mode == "eval":
                logs = evaluate_checkpoint(evaluator, sets, step, weights)
                _log_benchmarks(evaluator)
                return evaluator.model, logs
            return evaluator.model, evaluate_checkpoints(evaluator, sets, poll_seconds, timeout_seconds, weights)
        if weights is not None:
            raise ConfigError(
                f"weights: mode {mode} loads no checkpoint to evaluate. Use it with eval or continuous_eval."
            )
        with run_log() as open_logs:
            options = {"fresh": fresh, "accept_changes": accept_changes, "evaluates": mode != "train"}
            running = built or build_trainer(config, kind, **options)
            _set_evaluation(running, mode)
            was_finished = running.is_finished
            if not was_finished:  # a finished run changes nothing, including its log
                open_logs(*running.log_files)
            starting.only_note()  # the loop handles signals itself
            logs = running.train()
            if was_finished:
                logs = _evaluate_missing_sets(running, logs)
            _end(running, keeps_folder=keeps_folder)
        if running.interrupted:
            raise Interrupted(running.stop_reason or "interrupted")
        return running.model, logs


def _config_for_mode(config: RunConfig, mode: str, model_dir: str | os.PathLike[str] | None) -> RunConfig:
    if mode not in MODES:
        raise ConfigError(f"mode: {mode!r} is unknown. Use one of {', '.join(MODES)}.")
    values: dict[str, object] = {}
    if model_dir is not None:
        folder = absolute(model_dir)  # "." has no name
        values |= {"output_dir": str(folder.parent), "name": folder.name}
    if mode == "train_and_post_eval" and _evaluates_during_training(config):
        values |= {"evaluation.every_steps": None, "evaluation.every_epochs": None}
    return config.derive(values) if values else config


def _evaluates_during_training(config: RunConfig) -> bool:
    return config.evaluation.every_steps is not None or config.evaluation.every_epochs is not None


def _with_task(config: RunConfig, trainer: type[Trainer] | None, task: Task) -> type[Trainer]:
    """Returns a subclass of the given trainer class, or of the config's, that builds this task."""
    kind = trainer or Build(config).trainer_class()
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}

    def build_task(cls: type[Trainer], build: Build) -> Task:
        if build.config.task is not None and build.config.task == component_of(task, build.config):
            build.used.add("task")  # the section names this task
        return task

    return type(kind.__name__, (kind,), {**names, "build_task": classmethod(build_task)})


def _warn_if_trained_differently(evaluator: Trainer) -> None:
    """Warns if the run was trained with another trainer or task, whose metrics may differ."""
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
            logger.warning("%s: the run was trained with %s, but is evaluated with %s.", section, then, now)


def _reject_other_arguments(
    trainer: Trainer, config: RunConfig, *, task: Task | None, fresh: bool, accept_changes: bool
) -> None:
    """Rejects arguments that a built trainer ignores, and a config from which it was not built."""
    ignored = {"task": task is not None, "fresh": fresh, "accept_changes": accept_changes}
    for name in (name for name, is_given in ignored.items() if is_given):
        raise ConfigError(f"{name}: has no effect on a built trainer. Pass it to build_trainer, or pass the class.")
    own = trainer.config
    resolved = {
        "checkpoint.folder": own.checkpoint.folder,
        "trainer.max_steps": own.trainer.max_steps,
        "trainer.global_batch_size": own.trainer.global_batch_size,
        "trainer.micro_batch_size": own.trainer.micro_batch_size,
        "evaluation.every_steps": own.evaluation.every_steps,  # None for train_and_post_eval
        "evaluation.every_epochs": own.evaluation.every_epochs,
        "runtime.precision": own.runtime.precision if config.runtime.precision == "auto" else config.runtime.precision,
        "name": config.name if trainer.ranks.is_first else own.name,  # chosen by the first rank
    }
    config = recorded(config, type(trainer)) if recorded(own, type(trainer)) == own else config
    if config.derive(resolved) != own:
        raise ConfigError(
            f"trainer: this {type(trainer).__name__} was built from another config, or for another folder "
            f"({trainer.folder}). Pass the config that it was built from: trainer.config."
        )


def _set_evaluation(trainer: Trainer, mode: str) -> None:
    """Makes a trainer that the caller has built evaluate according to the mode."""
    if mode == "train":
        trainer.skip_evaluation()
    elif mode == "train_and_post_eval" and _evaluates_during_training(trainer.config):
        trainer.evaluate_only_at_end()


def _evaluate_missing_sets(trainer: Trainer, logs: Mapping[str, float]) -> dict[str, float]:
    """Evaluates the sets of a finished run that its logs lack, because it was trained without them."""
    missing = {
        name: data
        for name, data in sets_of(trainer).items()
        if not any(metric.startswith(f"{name}/") for metric in logs)
    }
    is_test_missing = trainer.test_data is not None and missing.pop(trainer.test_data.name, None) is not None
    logs = {**logs, **evaluate_checkpoint(trainer, missing, None)}
    with trainer.storage:
        return {**logs, **trainer.evaluate_test()} if is_test_missing else logs


def _end(trainer: Trainer, *, keeps_folder: bool) -> None:
    """Logs how the run ended, closes the process group, and requeues an interrupted SLURM job."""
    if trainer.ranks.is_first:
        _log_end(trainer, keeps_folder=keeps_folder)
    trainer.ranks.part()
    if trainer.interrupted and trainer.config.preemption.requeue and trainer.ranks.is_first:
        requeue()


@contextmanager
def start_up() -> Iterator[SignalListener]:
    """Makes a signal end the process immediately until the run trains, and closes the process group in any case."""
    starting = SignalListener(_stop, deadline_seconds=START_UP_SECONDS)
    try:
        starting.listen()
        try:
            yield starting
        except Exception as error:
            note_failure(error)  # before other ranks detect that this rank has ended
            raise
        finally:
            starting.only_note()  # the run has ended: a signal must not interrupt the rest
            processes.leave()
    except _StopRequested as request:
        raise Interrupted(str(request)) from None
    finally:
        starting.close()


def _stop(signal_name: str) -> None:
    raise _StopRequested(signal_name)


def evaluate_checkpoint(
    trainer: Trainer, sets: Mapping[str, EvaluatedSet], step: int | str | None, weights: str | None = None
) -> dict[str, float]:
    """Evaluates a checkpoint on every set; `step` None evaluates the current weights.

    `weights` is "ema", "raw", or None for those that the run's evaluations use.
    """
    if step is not None:
        store, best = trainer.context.store, trainer.config.checkpoint.keep_best
        # The first rank selects for all, because checkpoints may be added or deleted in the meantime.
        chosen = trainer.ranks.broadcast(pick_step(store, step, best=best) if trainer.ranks.is_first else 0)
        trainer.load_weights(chosen, weights)
        logger.info("Evaluating %s", store.path(chosen))
    with trainer.storage:
        return trainer.evaluate_sets(sets) if sets else {}


def _log_benchmarks(trainer: Trainer) -> None:
    """Logs the results of the benchmarks of the last evaluation as a table."""
    if not trainer.benchmark_results or not trainer.ranks.is_first:
        return
    folder = results_folder(trainer.folder, trainer.step, trainer.loaded_weights)
    logger.info("Benchmarks at step %d (samples in %s):", trainer.step, folder)
    for line in table_lines(trainer.benchmark_results):
        logger.info("%s", line)


def _log_end(trainer: Trainer, *, keeps_folder: bool) -> None:
    reason, step, best = trainer.stop_reason, trainer.step, trainer.best
    if trainer.interrupted and keeps_folder:
        can_resume = trainer.config.checkpoint.contents == "full"
        next_start = "Run the same command to resume" if can_resume else "It has only weights and cannot be resumed"
        logger.info("%s: step %d is finished and saved. %s.", reason, step, next_start)
    elif reason is not None and step < trainer.max_steps:
        logger.info("Stopped at step %d: %s.", step, reason)
    else:
        logger.info("Finished at step %d.", step)
    _log_benchmarks(trainer)
    if not keeps_folder:
        return
    if best.step is not None and best.step in trainer.context.store.steps():
        path = trainer.context.store.path(best.step)
        logger.info("Best %s %.4g, at step %d: %s", best.metric, best.value, best.step, path)
    folder = run_folder(trainer.config)
    logger.info("Run folder: %s", folder)
    is_in_config = not trainer.config.trainer.type.startswith("trainwright.api.") and is_found_again(trainer.config)
    if not trainer.interrupted and trainer.evaluated_sets and is_in_config:
        chosen = "latest" if best.step is None else "best"
        logger.info("Next: trainwright evaluate %s --step %s", folder, chosen)
