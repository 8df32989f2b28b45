"""Builds a run for a trial: on the CPU, in one process, in a temporary folder, without writers or workers.

Parts are built by `build_trainer` itself. Where one fails, the parts that do not need it are still built, one
by one, so that each gets its own finding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from trainwright.build import build_trainer
from trainwright.checking.explain import Case
from trainwright.config import BatchPlan, RunConfig, known_data_ranks, resolve_batch
from trainwright.loop.trainer import Trainer
from trainwright.parts import Build

LABELS: Mapping[str, str] = {
    "task": "task",
    "model": "model",
    "collator": "data.collator",
    "train_data": "data.train",
    "eval_data": "data.eval",
    "optimizers": "trainer.optimizer",
    "hooks": "hooks",
}
"""The parts that a Trainer's `build_*` methods make, in their order, and the setting that each comes from."""

_NEEDS: Mapping[str, str] = {"model": "task", "train_data": "task", "eval_data": "task", "optimizers": "model"}
_SAMPLES_WHERE_UNKNOWN = 4  # of a micro-batch whose size only the run's device can tell
_MOST_MICRO_BATCHES = 2  # enough to see that cutting works; a whole update of a large run would take hours on a CPU


@dataclass
class Assembly:
    """What could be built: all of it as a trainer, or those parts that could."""

    config: RunConfig
    """The trial's config."""
    plan: BatchPlan | None
    """The real run's batch arithmetic."""
    trainer: Trainer | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    build: Build | None = None
    building: str | None = None
    """The part that is being built, or at which building failed."""


def assemble(case: Case, folder: Path) -> Assembly:
    """Builds the trial and notes everything that fails."""
    plan = _plan(case)
    assembly = _attempt(Assembly(_trial_config(case.config, plan, folder), plan), case)
    data: Any = assembly.parts.get("train_data")
    if assembly.trainer is None and _is_too_small(data, assembly):
        # Noted; with a smaller batch the rest can still be tried.
        smaller = {"trainer.global_batch_size": len(data), "trainer.micro_batch_size": len(data)}
        assembly = _attempt(Assembly(assembly.config.derive(smaller), plan), case)
    return assembly


def _attempt(assembly: Assembly, case: Case) -> Assembly:
    try:
        trainer_class = Build(assembly.config).trainer_class()
        assembly.trainer = build_trainer(assembly.config, _recording(trainer_class, assembly))
    except Exception as error:
        failed = assembly.building
        case.note(error, label=LABELS[failed] if failed else "trainer.type")
        if assembly.build is not None:
            _build_rest(assembly, trainer_class, failed, case)
    return assembly


def _is_too_small(data: Any, assembly: Assembly) -> bool:
    return hasattr(data, "__len__") and 0 < len(data) < (assembly.config.trainer.global_batch_size or 0)


def is_found_by_the_run(config: RunConfig) -> bool:
    """Is the micro-batch what the run's device has memory for, so that only the run can tell?"""
    return config.trainer.micro_batch_size == "auto"


def num_steps(config: RunConfig, plan: BatchPlan, data: Any) -> int:
    """Returns how many updates the limits allow with the real run's batch (as build.py counts them)."""
    trainer = config.trainer
    samples = [math.inf if trainer.max_samples is None else trainer.max_samples]
    if trainer.max_epochs is not None and hasattr(data, "__len__"):
        samples.append(round(trainer.max_epochs * len(data)))
    per_sample = getattr(data.dataset, "tokens_per_sample", None)
    if trainer.max_tokens is not None and per_sample:
        samples.append(math.ceil(trainer.max_tokens / per_sample))
    steps = [math.ceil(each / plan.global_batch_size) for each in samples if each != math.inf]
    return min([*steps, *([trainer.max_steps] if trainer.max_steps is not None else [])])


def _plan(case: Case) -> BatchPlan | None:
    try:
        return resolve_batch(case.config, known_data_ranks(case.config))
    except Exception as error:
        case.note(error, label="trainer.global_batch_size")
        return None


def _trial_config(config: RunConfig, plan: BatchPlan | None, folder: Path) -> RunConfig:
    given = config.trainer.micro_batch_size
    micro, micro_batches = given if isinstance(given, int) else 1, 1
    if plan is not None:
        micro, micro_batches = plan.micro_batch_size, min(plan.accumulation, _MOST_MICRO_BATCHES)
    if plan is not None and is_found_by_the_run(config):
        # The whole batch in one forward is for the run's device; here it has only to be cut.
        micro_batches = min(micro, _MOST_MICRO_BATCHES)
        micro = min(micro // micro_batches, _SAMPLES_WHERE_UNKNOWN)
    return config.derive(
        {
            "output_dir": str(folder),
            "runtime.device": "cpu",
            "runtime.mode": "eager",
            "runtime.mesh": {},
            "trainer.global_batch_size": micro * micro_batches,
            "trainer.micro_batch_size": micro,
            "trainer.accumulation": None,
            "data.workers": 0,
            "data.loader": {},
            "evaluation.max_batches": 1,
            "writers": [],
        }
    )


def _recording(trainer_class: type[Trainer], assembly: Assembly) -> type[Trainer]:
    """Returns the trainer's class with `build_*` methods that remember what they made, and no writers."""

    def recorded(part: str) -> Any:
        def build_part(cls: type[Trainer], build: Any, *arguments: Any) -> Any:
            assembly.build, assembly.building = build, part
            inherited: Callable[..., Any] = getattr(super(trial, cls), f"build_{part}")
            assembly.parts[part] = inherited(build, *arguments)
            assembly.building = None
            return assembly.parts[part]

        return classmethod(build_part)

    def build_writers(cls: type[Trainer], build: Any) -> Any:
        return build.writers()  # of the trial's config: none

    methods = {f"build_{part}": recorded(part) for part in LABELS}
    names = {name: getattr(trainer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = {**names, **methods, "build_writers": classmethod(build_writers)}
    trial = cast(type[Trainer], type(trainer_class.__name__, (trainer_class,), body))
    return trial


def _build_rest(assembly: Assembly, trainer_class: type[Trainer], failed: str | None, case: Case) -> None:
    """Builds the parts that were not reached and whose needs are met."""
    assert assembly.build is not None
    if "task" in assembly.parts:
        assembly.build.take_task(assembly.parts["task"])
    for part, label in LABELS.items():
        if part in assembly.parts or part == failed or _NEEDS.get(part, part) not in {part, *assembly.parts}:
            continue
        arguments = [assembly.parts["model"]] if part == "optimizers" else []
        try:
            assembly.parts[part] = getattr(trainer_class, f"build_{part}")(assembly.build, *arguments)
        except Exception as error:
            case.note(error, label=label)
