"""Derives the mesh from the world size, and the three batch sizes from those that are set.

A config is not changed; build/ puts the results into the run's copy with `config.derive`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainwright.config.schema import RunConfig
from trainwright.errors import ConfigError

DEFAULT_GLOBAL_BATCH_SIZE = 32


@dataclass(frozen=True)
class BatchPlan:
    """global_batch_size = micro_batch_size × data ranks × gradient_accumulation_steps."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    varies: bool = False
    """True if a batch has as many samples as `next_train_inputs` returns; then the sizes are those of evaluations."""
    splits_by_size: bool = False
    """With `varies`, whether a batch is split into micro-batches of at most `micro_batch_size` samples."""

    def num_micro_batches(self, num_samples: int) -> int:
        """Return the number of micro-batches of a rank's batch with this number of samples."""
        if not self.splits_by_size:
            return self.gradient_accumulation_steps
        return max(math.ceil(num_samples / self.micro_batch_size), 1)


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
        problem = f"{shown} cannot have {world_size} ranks: {world_size} is not a multiple of {fixed}."
        advice = f"Run on a multiple of {fixed} ranks, or change the other axes."
    else:
        problem = f"{shown} is {fixed} ranks, but the run has {world_size}."
        free = next((axis for axis in ("replicate", "fsdp") if axis not in given), None)
        spare = free is not None and world_size % fixed == 0
        other = f"set runtime.mesh.{free}: -1 for the remaining ranks" if spare else "change the axes to match"
        advice = f"Run on {fixed} ranks, or {other}."
    raise ConfigError(f"runtime.mesh: {problem} {advice}", where=config.origin("runtime.mesh"))


def known_data_ranks(config: RunConfig) -> int:
    """Return replicate × fsdp as far as the mesh specifies them; an axis that is -1 or not set counts as 1."""
    axes = (config.runtime.mesh.replicate, config.runtime.mesh.fsdp)
    return math.prod(size for size in axes if size is not None and size > 0)


def resolve_batch(config: RunConfig, data_ranks: int, *, makes_batches: bool = False) -> BatchPlan:
    """Return the three batch sizes: missing ones are derived, a contradiction raises.

    With micro_batch_size: auto, the size is the upper limit, the rank's whole batch in one forward. If the trainer
    `makes_batches` without a dataset and the settings do not determine the number of samples, it varies.
    """
    trainer = config.trainer
    total, micro, steps = trainer.global_batch_size, _given_micro_batch(config), trainer.gradient_accumulation_steps
    if trainer.micro_batch_size == "auto" and steps is not None:
        problem = f"trainer.gradient_accumulation_steps: {steps} fixes the size that micro_batch_size: auto searches."
        where = config.origin("trainer.gradient_accumulation_steps")
        raise ConfigError(f"{problem} Remove one of them.", where=where)
    if makes_batches and total is None and (micro is None or steps is None):
        assumed = micro or DEFAULT_GLOBAL_BATCH_SIZE
        return BatchPlan(assumed * data_ranks * (steps or 1), assumed, steps or 1, True, micro is not None)
    if total is None and micro is not None:
        return BatchPlan(micro * data_ranks * (steps or 1), micro, steps or 1)
    total = total or DEFAULT_GLOBAL_BATCH_SIZE
    if micro is None:
        steps = steps or 1
        micro = total // (data_ranks * steps)
    elif steps is None:
        steps = total // (micro * data_ranks)
    if micro * data_ranks * steps != total:
        names = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps")
        origins = [origin for name in names if (origin := config.origin(f"trainer.{name}")) is not None]
        raise ConfigError(
            f"trainer.global_batch_size: {_explain_mismatch(config, total, data_ranks)}",
            where=next((origin for origin in origins if origin.is_override), origins[0] if origins else None),
        )
    return BatchPlan(total, micro, steps)


def micro_batch_alone(config: RunConfig) -> int:
    """Return the number of samples per forward without accumulation, for an evaluation without training."""
    return _given_micro_batch(config) or config.trainer.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE


def _given_micro_batch(config: RunConfig) -> int | None:
    """Return the number that is set; None if it is derived or `auto`."""
    micro = config.trainer.micro_batch_size
    return None if micro == "auto" else micro


def _explain_mismatch(config: RunConfig, total: int, data_ranks: int) -> str:
    micro, steps = _given_micro_batch(config), config.trainer.gradient_accumulation_steps
    is_given = config.trainer.global_batch_size is not None
    factors = [f"micro_batch_size {micro}"] if micro is not None else []
    factors.append(f"{data_ranks} data rank{'s' if data_ranks > 1 else ''}")
    factors += [f"gradient_accumulation_steps {steps}"] if steps is not None else []
    unit = (micro or 1) * data_ranks * (steps or 1)
    shown = f"{total}" if is_given else f"the default, {total},"
    if micro is not None and steps is not None:
        return f"{shown} is not {' × '.join(factors)} = {unit}. Use {unit}, or remove one of the three."
    problem = f"{shown} is not {' × '.join(factors)} × a whole number. Use a multiple of {unit}"
    if config.trainer.micro_batch_size == "auto" or (is_given and total % data_ranks):
        return f"{problem}."  # a micro-batch of one sample would not help
    other = "gradient_accumulation_steps" if is_given and steps is not None else "micro_batch_size"
    return f"{problem}, or set {other}."
