"""Errors of a run that was described by flags or arguments, in their names and with the line that gave them.

The settings behind them are those of every run, and so are the errors about them. Whoever wrote `--batch-size` is not
told of `trainer.micro_batch_size`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from trainwright.errors import CheckpointError, ComponentError, ConfigError, DataError, shorten_tracebacks
from trainwright.user_code import caller

Given = ParamSpec("Given")
Returned = TypeVar("Returned")

FLAGS: Mapping[str, str] = {
    "trainer.max_steps": "--train-iters",
    "trainer.max_epochs": "--epochs",
    "trainer.global_batch_size": "--batch-size × --gradient-accumulation-steps × ranks",
    "trainer.micro_batch_size": "--batch-size",
    "trainer.accumulation": "--gradient-accumulation-steps",
    "trainer.max_grad_norm": "--clip-grad",
    "trainer.optimizer.lr": "--lr",
    "trainer.optimizer.weight_decay": "--weight-decay",
    "trainer.schedule.warmup_fraction": "--warmup",
    "trainer.schedule.minimum": "--lr-decay-ratio",
    "trainer.schedule.type": "--lr-decay-style",
    "trainer.schedule": "--lr-decay-style",
    "trainer.arguments.train_data": "--train-data",
    "trainer.arguments.train_data_weights": "--train-data-weights",
    "trainer.arguments.split": "--split",
    "data.workers": "--num-workers",
    "data.train": "--train-data",
    "data.eval.valid": "--valid-data",
    "data.eval": "--valid-data",
    "data.test": "--test-data",
    "data.split": "--split",
    "evaluation.every_steps": "--eval-interval",
    "evaluation.max_batches": "--eval-iters",
    "evaluation.batch_size": "--eval-batch-size × ranks",
    "checkpoint.every_steps": "--save-interval",
    "log.every_steps": "--log-interval",
    "runtime.device": "--device",
    "runtime.precision": "--fp16 and --bf16",
    "runtime.mesh.data": "--zero-stage",
    "runtime.mesh": "--zero-stage",
    "runtime.reshard_after_forward": "--zero-stage",
    "trainer.arguments.*": "args.*",
    "output_dir": "--save",
    "name": "--experiment-name",
    "seed": "--seed",
}
"""What training_main's users call each setting."""

ARGUMENTS: Mapping[str, str] = {
    "trainer.max_steps": "max_steps",
    "trainer.global_batch_size": "batch_size",
    "trainer.optimizer.lr": "lr",
    "data.train": "data",
    "data.eval": "eval_data",
    "data.collator": "collator",
    "name": "name",
}
"""What the users of `train` call each setting."""

_BEGINS = ("name", "seed")
"""Settings that are words of every sentence: they are meant only where a line begins with them."""


def explained_in(words: Mapping[str, str]) -> Callable[[Callable[Given, Returned]], Callable[Given, Returned]]:
    """Lets the errors of a function speak in its users' words, and name the line that calls it.

    An error that knows its place is about something else than the function's own arguments, and stays as it is.
    """

    def decorate(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
        @functools.wraps(function)
        def call(*args: Given.args, **options: Given.kwargs) -> Returned:
            shorten_tracebacks()
            try:
                return function(*args, **options)
            except (ConfigError, DataError, CheckpointError) as error:
                is_plain = type(error) in (ConfigError, ComponentError, DataError, CheckpointError)
                if error.where is not None or not is_plain:
                    raise
                raise type(error)(translated(error.problem, words), where=caller()) from error

        return call

    return decorate


def translated(problem: str, words: Mapping[str, str]) -> str:
    """Returns a sentence with every setting called by its user's word; `a.b.*` stands for all below `a.b`."""
    for setting in sorted(words, key=len, reverse=True):
        word = words[setting]
        if setting.endswith("*"):
            problem = problem.replace(setting[:-1], word[:-1])
        elif setting in _BEGINS:
            problem = re.sub(rf"^{setting}(?=:)", word, problem, flags=re.MULTILINE)
        else:
            problem = re.sub(rf"(?<![\w.-]){re.escape(setting)}(?!\w|\.\w)", word, problem)
    return problem
