"""Derived settings: the mesh for a world size, and the three batch sizes from those that were given.

Nothing here changes a config: the results are written into the run's copy by `config.derive`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainwright.config.schema import RunConfig
from trainwright.config.yaml_text import Origin
from trainwright.errors import ConfigError

DEFAULT_GLOBAL_BATCH_SIZE = 32


@dataclass(frozen=True)
class BatchPlan:
    """global_batch_size = micro_batch_size × data ranks × gradient_accumulation_steps."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


def resolve_mesh(config: RunConfig, world_size: int) -> dict[str, int]:
    """Return the size of every mesh axis; their product is `world_size`."""
    given = {axis: size for axis, size in config.runtime.mesh if size is not None}
    if not given:
        given = {"replicate": -1}
    sizes = {axis: given.get(axis, 1) for axis in type(config.runtime.mesh).model_fields}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: world_size // fixed if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) == world_size:
        return sizes
    shown = " × ".join(f"{axis} {'?' if size == -1 else size}" for axis, size in given.items())
    rest = next((axis for axis, size in given.items() if size == -1), None)
    if rest is not None:
        problem = f"{shown} cannot be {world_size} ranks: {world_size} is not a multiple of {fixed}."
        advice = f"Run on a multiple of {fixed} ranks, or change the other axes."
    else:
        problem = f"{shown} is {fixed} ranks, but the run has {world_size}."
        free = next((axis for axis in ("replicate", "fsdp") if axis not in given), None)
        spare = free is not None and world_size % fixed == 0
        other = f"set runtime.mesh.{free}: -1 to take what is left" if spare else "change the axes to match"
        advice = f"Run on {fixed} ranks, or {other}."
    raise ConfigError(f"runtime.mesh: {problem} {advice}", where=config.origin("runtime.mesh"))


def known_data_ranks(config: RunConfig) -> int:
    """Return replicate × fsdp as far as the mesh fixes them; an axis that takes what is left counts as one."""
    axes = (config.runtime.mesh.replicate, config.runtime.mesh.fsdp)
    return math.prod(size for size in axes if size is not None and size > 0)


def resolve_batch(config: RunConfig, data_ranks: int) -> BatchPlan:
    """Return the three batch sizes; what was left out is derived, a contradiction is rejected.

    With micro_batch_size: auto it is the largest that could be: the rank's whole batch in one forward.
    """
    trainer = config.trainer
    total, micro, gradient_accumulation_steps = (
        trainer.global_batch_size,
        _given_micro_batch(config),
        trainer.gradient_accumulation_steps,
    )
    if trainer.micro_batch_size == "auto" and gradient_accumulation_steps is not None:
        raise ConfigError(
            f"trainer.gradient_accumulation_steps: {gradient_accumulation_steps} leaves micro_batch_size: auto nothing "
            f"to find. Remove one of them.",
            where=config.origin("trainer.gradient_accumulation_steps"),
        )
    if total is None and micro is not None:
        gradient_accumulation_steps = gradient_accumulation_steps or 1
        return BatchPlan(micro * data_ranks * gradient_accumulation_steps, micro, gradient_accumulation_steps)
    total = total or DEFAULT_GLOBAL_BATCH_SIZE
    if micro is None:
        gradient_accumulation_steps = gradient_accumulation_steps or 1
        micro = total // (data_ranks * gradient_accumulation_steps)
    elif gradient_accumulation_steps is None:
        gradient_accumulation_steps = total // (micro * data_ranks)
    if micro * data_ranks * gradient_accumulation_steps != total:
        raise ConfigError(
            f"trainer.global_batch_size: {_contradiction(config, total, data_ranks)}",
            where=_overridden(config, "global_batch_size", "micro_batch_size", "gradient_accumulation_steps"),
        )
    return BatchPlan(total, micro, gradient_accumulation_steps)


def micro_batch_alone(config: RunConfig) -> int:
    """Return how many samples a forward gets where nothing is accumulated: in an evaluation without training."""
    return _given_micro_batch(config) or config.trainer.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE


def _given_micro_batch(config: RunConfig) -> int | None:
    """Return the number that was given; None where it is derived or to be found."""
    micro = config.trainer.micro_batch_size
    return None if micro == "auto" else micro


def _overridden(config: RunConfig, *names: str) -> Origin | None:
    """Return where the first of these settings of the trainer was given that an override gives; else the first one."""
    places = [place for name in names if (place := config.origin(f"trainer.{name}")) is not None]
    return next((place for place in places if place.is_override), places[0] if places else None)


def _contradiction(config: RunConfig, total: int, data_ranks: int) -> str:
    """Say which arithmetic fails, in terms of the settings that were given."""
    micro, gradient_accumulation_steps = _given_micro_batch(config), config.trainer.gradient_accumulation_steps
    factors = [f"micro_batch_size {micro}"] if micro is not None else []
    factors.append(f"{data_ranks} data rank{'s' if data_ranks > 1 else ''}")
    factors += (
        [f"gradient_accumulation_steps {gradient_accumulation_steps}"]
        if gradient_accumulation_steps is not None
        else []
    )
    unit = (micro or 1) * data_ranks * (gradient_accumulation_steps or 1)
    shown = f"{total}" if config.trainer.global_batch_size is not None else f"the default, {total},"
    if micro is not None and gradient_accumulation_steps is not None:
        return f"{shown} is not {' × '.join(factors)} = {unit}. Use {unit}, or leave one of the three out."
    problem = f"{shown} is not {' × '.join(factors)} × a whole number. Use a multiple of {unit}"
    is_given = config.trainer.global_batch_size is not None
    if config.trainer.micro_batch_size == "auto" or (is_given and total % data_ranks):
        return f"{problem}."  # not even one sample a forward would be a solution
    other = (
        "gradient_accumulation_steps" if is_given and gradient_accumulation_steps is not None else "micro_batch_size"
    )
    return f"{problem}, or set {other}."
