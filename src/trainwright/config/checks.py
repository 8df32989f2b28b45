"""Rules across keys and sections, which no single field can know.

Each check returns problems in words; schema.py adds where the setting was written and raises them together.
What needs the classes themselves (arguments, metrics) is left to the registry and to build.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.config.component import Component
from trainwright.config.problems import Problem, describe, nearest, suggest
from trainwright.config.sections import DataSection, KeepBest, MeshSection, TrainerSection

BUILT_IN_TRAINERS = ("trainer", "language_model", "classification", "sequence_to_sequence")

# Found on real misspellings: max_step and optimiser are above it, a user's own num_steps or warmup_steps below.
_RESEMBLES = 0.8


def check_trainer_keys(trainer: Any) -> list[Problem]:
    """Reject unknown keys of the trainer's raw section: all with a built-in one, look-alikes with a user's."""
    if not isinstance(trainer, Mapping):
        return []
    known = list(TrainerSection.model_fields)
    built_in = trainer.get("type", "trainer") in BUILT_IN_TRAINERS
    problems = []
    for key in trainer:
        if key in known:
            continue
        match = nearest(key, known, cutoff=_RESEMBLES)
        if built_in:
            text = f"there is no such setting. {suggest(key, known)} Options of your own need a trainer of your own."
            problems.append(Problem(("trainer", key), text))
        elif match is not None:
            text = f'looks like a misspelt "{match}". Use that, or give your own option a name less like it.'
            problems.append(Problem(("trainer", key), text))
    return problems


def check_across(
    *, data: DataSection, trainer: TrainerSection, keep_best: KeepBest | None, mesh: MeshSection, task: Component | None
) -> list[Problem]:
    """Return what is wrong between settings that are each right by themselves."""
    problems = [*_check_optimizers(trainer), *_check_mesh(mesh)]
    if keep_best is not None:
        # Sets may also come from code, which nobody can know here: then build.py has the last word.
        sets_are_known = trainer.type in BUILT_IN_TRAINERS and task is None and data.train is not None
        problems += _check_keep_best(keep_best, data, sets_are_known=sets_are_known)
    return problems


def _check_optimizers(trainer: TrainerSection) -> list[Problem]:
    if not trainer.optimizers:
        return []
    names = ", ".join(trainer.optimizers)
    problems = []
    if trainer.optimizer is not None:
        text = f"is given together with trainer.optimizers ({names}). Keep one of the two."
        problems.append(Problem(("trainer", "optimizer"), text))
    if trainer.schedule is not None:
        text = f"has no effect: each of trainer.optimizers ({names}) has its own schedule. Move it there."
        problems.append(Problem(("trainer", "schedule"), text))
    return problems


def _check_keep_best(keep_best: KeepBest, data: DataSection, *, sets_are_known: bool) -> list[Problem]:
    path = ("checkpoint", "keep_best", "metric")
    set_name, slash, metric = keep_best.metric.partition("/")
    sets = list(data.eval) or [name for name in data.cut_off if name != "test"]
    example = f"{sets[0] if sets else 'valid'}/loss"
    if not slash or not set_name or not metric:
        text = f"must be a set and its metric, such as {example}; got {describe(keep_best.metric)}."
        return [Problem(path, text)]
    if set_name == "test":
        return [Problem(path, f"the test set never chooses a checkpoint. Use an evaluation set, such as {example}.")]
    if set_name in sets or not (sets or sets_are_known):
        return []
    if not sets:
        return [Problem(path, f'there is no evaluation set "{set_name}". Add it to data.eval, or set data.split.')]
    return [Problem(path, f'there is no evaluation set "{set_name}". {suggest(set_name, sets)}')]


def _check_mesh(mesh: MeshSection) -> list[Problem]:
    left_over = [axis for axis, size in mesh if size == -1]
    if len(left_over) <= 1:
        return []
    text = f"only one axis can take what is left (-1), got {' and '.join(left_over)}. Give the others a number."
    return [Problem(("runtime", "mesh", left_over[1]), text)]
