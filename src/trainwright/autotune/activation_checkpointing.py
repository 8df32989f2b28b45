"""`budget: auto`: finds how few layers must be recomputed for a step to fit into memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainwright.autotune.micro_batch import (
    HEADROOM,
    LOADING_ALONE,
    StepTrial,
    config_of_before,
    find_on_ranks,
    largest_that_fits,
    steps_tried,
)
from trainwright.backends import Backend
from trainwright.config import RunConfig, resolve_batch
from trainwright.errors import ConfigError, OutOfMemory
from trainwright.loop.trainer import Trainer
from trainwright.memory.activation_checkpointing import (
    choose_layers,
    counting_held_bytes,
    has_auto,
    num_recomputed,
    only_auto,
    recomputed_within,
    shares_of,
    with_budget,
    without_auto,
)
from trainwright.memory.out_of_memory import advice_for, is_out_of_memory
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.processes import local_size

logger = logging.getLogger(__name__)

LABEL = "model.activation_checkpointing.budget: auto"


def wants_budget(config: RunConfig) -> bool:
    """Does a run leave it open how many layers are recomputed?"""
    return config.model is not None and has_auto(config.model.reserved.get("activation_checkpointing"))


def settle_activation_checkpointing(
    config: RunConfig,
    assemble: Callable[[RunConfig, Path], Trainer],
    *,
    backend: Backend,
    ranks: Ranks,
    folder: Path | None,
) -> RunConfig:
    """Returns the config with the largest share that fits in place of `budget: auto`, the same on every rank.

    `assemble` and `folder` are as in `settle_micro_batch`, which has its turn before.
    """
    _reject(config, ranks)
    assert config.model is not None
    given = _plain(config.model.reserved["activation_checkpointing"])
    share = _share_of_before(config, given, config_of_before(folder, backend, ranks))
    if share is not None:
        logger.info("%s: %s, as the run found before", LABEL, share)
        return config.derive({"model.activation_checkpointing": with_budget(given, share)})
    logger.info("%s: trying how few layers need to be recomputed", LABEL)
    plan = resolve_batch(config, ranks.size)
    rank_batch_size = plan.micro_batch_size * plan.gradient_accumulation_steps
    trial = config.derive(
        {
            "trainer.global_batch_size": rank_batch_size,
            "trainer.micro_batch_size": plan.micro_batch_size,
            "model.activation_checkpointing": without_auto(given),
            "runtime.mode": "eager",
            "runtime.compile_backend": None,
            "runtime.max_graph_breaks": None,
            **LOADING_ALONE,
        }
    )

    def find(empty: Path) -> float | None:
        try:
            with backend.limited_memory(1.0 - HEADROOM):
                return _find(assemble(trial, empty), only_auto(given), ranks)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None  # the model alone, its optimizer or a batch is too much

    shares = find_on_ranks(LABEL, find, backend=backend, ranks=ranks)
    found = [each for each in shares if each is not None]
    if len(found) < len(shares):
        advice = "".join(
            f"\n  - {each}"
            for each in advice_for(config.derive({"model.activation_checkpointing": with_budget(given, 0.0)}))
        )
        raise OutOfMemory(
            f"{LABEL}: with all of them recomputed a step does not fit into the memory of {backend.describe()}, of "
            f"which {HEADROOM:.0%} stay free. What could change:{advice}",
            where=config.origin("model.activation_checkpointing"),
        )
    logger.info("%s: %s", LABEL, min(found))
    return config.derive({"model.activation_checkpointing": with_budget(given, min(found))})


def _reject(config: RunConfig, ranks: Ranks) -> None:
    where = config.origin("model.activation_checkpointing")
    if ranks.mesh.is_split:
        axes = ", ".join(f"{axis} {size}" for axis, size in ranks.mesh.sizes.items() if size > 1)
        raise ConfigError(
            f"{LABEL} is found on one rank alone, but the mesh ({axes}) splits the model. Give a share from 0 to 1.",
            where=where,
        )
    if config.trainer.micro_batch_size == "auto":
        raise ConfigError(
            f"{LABEL} and trainer.micro_batch_size: auto would each take the memory that the other leaves. Give one of "
            "them a number.",
            where=where,
        )


def _share_of_before(config: RunConfig, given: Any, saved: RunConfig | None) -> float | None:
    """Returns the share that was found for the same layers and the same micro-batch."""
    if saved is None or saved.model is None or "activation_checkpointing" not in saved.model.reserved:
        return None
    if saved.trainer.micro_batch_size != config.trainer.micro_batch_size:
        return None
    then = _plain(saved.model.reserved["activation_checkpointing"])
    shares = {each for each in _budgets(then) if with_budget(given, each) == then}
    return shares.pop() if shares else None


def _budgets(given: Any) -> Iterator[float]:
    if isinstance(given, dict):
        if isinstance(given.get("budget"), int | float):
            yield float(given["budget"])
        for value in given.values():
            yield from _budgets(value)


def _find(trainer: Trainer, given: Any, ranks: Ranks) -> float | None:
    """Returns the largest share that fits on this rank; None if nothing does."""
    plan = trainer.context.batch
    with steps_tried(trainer, plan.micro_batch_size * plan.gradient_accumulation_steps, ranks) as trial:
        shares = shares_of(trainer.model, given)
        if trainer.backend.memory_room() is None:
            return _find_by_steps(trial, trainer, given, shares)
        return _find_by_counting(trial, trainer, given, shares)


def _find_by_steps(trial: StepTrial, trainer: Trainer, given: Any, shares: list[float]) -> float | None:
    size = trainer.context.batch.micro_batch_size
    answers: dict[float, bool] = {}

    def fits(share: float) -> bool:
        if share not in answers:
            trainer.backend.release_memory()
            with recomputed_within(trainer.model, with_budget(given, share)):
                answers[share] = trial.steps(size)
            number = num_recomputed(trainer.model, given, share)
            logger.debug("With %d layers recomputed a step %s", number, "fits" if answers[share] else "does not fit")
        return answers[share]

    if not fits(shares[0]):
        return None
    if fits(shares[-1]):  # what one hopes for
        return shares[-1]
    numbers = list(range(len(shares) - 1))
    number = largest_that_fits(numbers, lambda each: fits(shares[each]))
    return None if number is None else shares[number]


def _find_by_counting(trial: StepTrial, trainer: Trainer, given: Any, shares: list[float]) -> float | None:
    model, backend = trainer.model, trainer.backend
    size = trainer.context.batch.micro_batch_size
    taken: list[int] = []
    rooms: list[int] = []

    @contextmanager
    def measuring() -> Iterator[None]:
        backend.release_memory()
        backend.begin_peak()
        rooms.append(backend.memory_room() or 0)
        before = backend.memory().in_use or 0
        yield
        taken.append(max((backend.memory().peak or 0) - before, 0))

    with counting_held_bytes(model, given) as held, recomputed_within(model, with_budget(given, 0.0)):
        if not trial.steps(size, measuring):
            return None
    room = (1.0 - HEADROOM) * rooms[0] / local_size() - taken[0]

    def held_with(share: float) -> int:
        recomputed = choose_layers(model, with_budget(given, share), logs=False)
        return sum(num_bytes for name, num_bytes in held.items() if name not in recomputed)

    logger.debug("The layers would hold %d bytes, and there is room for %d", sum(held.values()), room)
    # One that is recomputed in any case may need more than there seems to be: it has just run.
    return max((share for share in shares if held_with(share) <= room), default=shares[0])


def _plain(given: Any) -> Any:
    """Returns a setting as plain dicts and lists, which compare."""
    if hasattr(given, "items"):
        return {key: _plain(value) for key, value in given.items()}
    return [_plain(each) for each in given] if isinstance(given, list | tuple) else given
