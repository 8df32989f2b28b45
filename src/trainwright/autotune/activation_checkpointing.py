"""`model.activation_checkpointing.budget: auto`: finds how few layers must be recomputed for a step to fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainwright.autotune.micro_batch import (
    HEADROOM,
    TRIAL_DATA,
    TrialSteps,
    config_of_earlier_start,
    find_on_ranks,
    largest_that_fits,
    reject_sharded,
    trial_steps,
)
from trainwright.backends import Backend
from trainwright.compile.regions import EAGER
from trainwright.config import RunConfig, resolve_batch
from trainwright.errors import ConfigError
from trainwright.loop.trainer import Trainer
from trainwright.memory.activation_checkpointing import (
    choose_layers,
    counting_held_bytes,
    has_auto,
    only_auto,
    recomputed_within,
    shares_of,
    with_budget,
    without_auto,
)
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.processes import local_size

logger = logging.getLogger(__name__)

LABEL = "model.activation_checkpointing.budget: auto"


def wants_budget(config: RunConfig) -> bool:
    """Returns True if the number of recomputed layers must be determined."""
    return config.model is not None and has_auto(config.model.reserved.get("activation_checkpointing"))


def settle_activation_checkpointing(
    config: RunConfig,
    assemble: Callable[[RunConfig, Path], Trainer],
    *,
    backend: Backend,
    ranks: Ranks,
    folder: Path | None,
) -> RunConfig:
    """Returns the config with the largest share that fits instead of `budget: auto`, the same on every rank.

    `assemble` and `folder` are as in `settle_micro_batch`.
    """
    where = config.origin("model.activation_checkpointing")
    reject_sharded(LABEL, "Set a share from 0 to 1.", ranks, where)
    if config.trainer.micro_batch_size == "auto":
        raise ConfigError(
            f"{LABEL} cannot be combined with trainer.micro_batch_size: auto, because each would use the memory that "
            "the other leaves. Set one of them to a number.",
            where=where,
        )
    assert config.model is not None
    given = _plain(config.model.reserved["activation_checkpointing"])
    share = _earlier_share(config, given, config_of_earlier_start(folder, backend, ranks))
    if share is not None:
        logger.info("%s: %s, as in the earlier start of this run", LABEL, share)
        return config.derive({"model.activation_checkpointing": with_budget(given, share)})
    logger.info("%s: finding the minimum number of layers to recompute", LABEL)
    plan = resolve_batch(config, ranks.size)
    rank_batch_size = plan.micro_batch_size * plan.gradient_accumulation_steps
    trial = config.derive(
        {
            "trainer.global_batch_size": rank_batch_size,
            "trainer.micro_batch_size": plan.micro_batch_size,
            "model.activation_checkpointing": without_auto(given),
            **EAGER,
            **TRIAL_DATA,
        }
    )

    def find(empty: Path) -> float | None:
        trainer, setting = assemble(trial, empty), only_auto(given)
        with trial_steps(trainer, rank_batch_size, ranks) as steps:
            find_share = _find_by_steps if backend.memory_room() is None else _find_by_counting
            return find_share(steps, trainer, setting, plan.micro_batch_size)

    smallest = config.derive({"model.activation_checkpointing": with_budget(given, 0.0)})
    problem = "with all layers recomputed a step does not fit"
    share = min(find_on_ranks(LABEL, find, problem, smallest, backend=backend, ranks=ranks, where=where))
    logger.info("%s: %s", LABEL, share)
    return config.derive({"model.activation_checkpointing": with_budget(given, share)})


def _earlier_share(config: RunConfig, given: Any, saved: RunConfig | None) -> float | None:
    """Returns the share that was found for the same layers and the same micro-batch size, or None."""
    if saved is None or saved.model is None or saved.trainer.micro_batch_size != config.trainer.micro_batch_size:
        return None
    setting = _plain(saved.model.reserved.get("activation_checkpointing"))
    return next((share for share in _budgets(setting) if with_budget(given, share) == setting), None)


def _budgets(given: Any) -> Iterator[float]:
    if isinstance(given, dict):
        if isinstance(given.get("budget"), int | float):
            yield float(given["budget"])
        for value in given.values():
            yield from _budgets(value)


def _find_by_steps(steps: TrialSteps, trainer: Trainer, given: Any, size: int) -> float | None:
    """Returns the largest share with which a step fits, on a device that raises out-of-memory."""
    shares = shares_of(trainer.model, given)

    def fits(number: int) -> bool:
        trainer.backend.release_memory()
        with recomputed_within(trainer.model, with_budget(given, shares[number])):
            does_fit = steps.run(size)
        logger.debug("With the share %s a step %s", shares[number], "fits" if does_fit else "does not fit")
        return does_fit

    number = largest_that_fits(range(len(shares)), fits)
    return None if number is None else shares[number]


def _find_by_counting(steps: TrialSteps, trainer: Trainer, given: Any, size: int) -> float | None:
    """Returns the largest share for which there is memory, on systems that kill a process that uses too much."""
    model, backend = trainer.model, trainer.backend
    used: list[int] = []
    rooms: list[int] = []

    @contextmanager
    def measuring() -> Iterator[None]:
        backend.release_memory()
        backend.begin_peak()
        rooms.append(backend.memory_room() or 0)
        before = backend.memory().in_use or 0
        yield
        used.append(max((backend.memory().peak or 0) - before, 0))

    with counting_held_bytes(model, given) as held, recomputed_within(model, with_budget(given, 0.0)):
        if not steps.run(size, measuring):
            return None
    room = (1.0 - HEADROOM) * rooms[0] / local_size() - used[0]

    def held_with(share: float) -> int:
        recomputed = choose_layers(model, with_budget(given, share), logs=False)
        return sum(num_bytes for name, num_bytes in held.items() if name not in recomputed)

    logger.debug("The activations of the layers would take %d bytes, and %d are available", sum(held.values()), room)
    shares = shares_of(model, given)
    # Recomputing all layers has just worked, even if the estimate says otherwise.
    return max((share for share in shares if held_with(share) <= room), default=shares[0])


def _plain(given: Any) -> Any:
    """Returns a setting as plain dicts and lists, which can be compared."""
    if hasattr(given, "items"):
        return {key: _plain(value) for key, value in given.items()}
    return [_plain(each) for each in given] if isinstance(given, list | tuple) else given
