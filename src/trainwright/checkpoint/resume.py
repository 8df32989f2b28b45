"""Whether a run goes on from its folder: which settings may have changed, and from which checkpoint.

Running the same command again continues the run. What leaves the mathematics alone may change; any other
change is rejected by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from trainwright.checkpoint.remote_store import AnyStore
from trainwright.checkpoint.retention import best_step, metrics_by_step
from trainwright.config import KeepBest, RunConfig
from trainwright.errors import CheckpointError

logger = logging.getLogger(__name__)

FREE_SETTINGS = (
    "name",
    "output_dir",
    "imports",
    "trainer.max_steps",
    "trainer.max_epochs",
    "trainer.max_samples",
    "trainer.max_tokens",
    "trainer.micro_batch_size",
    "trainer.gradient_accumulation_steps",
    "data.process.num_workers",
    "data.num_workers",
    "data.loader",
    "data.eval",
    "data.test",
    "data.on_error",
    "data.max_skipped",
    "evaluation",
    "checkpoint",
    "hooks",
    "writers",
    "log",
    "anomalies",
    "preemption",
    "watchdog",
    "model.sharding",
    "model.activation_checkpointing",
    "model.compile_repeated_blocks",
    "model.offload",
    "runtime.mesh",
    "runtime.reshard_after_forward",
    "runtime.accumulate_unsharded",
    "runtime.mode",
    "runtime.compile_backend",
    "runtime.compile_memory_budget",
    "runtime.deterministic",
    "runtime.max_graph_breaks",
    "runtime.device",
)
"""Settings, with all below them, that change no loss and no weight of the updates to come."""


def changed_settings(saved: RunConfig, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the settings that change the mathematics and differ: dotted name → (then, now)."""
    then, now = dict(_flatten(saved.to_dict())), dict(_flatten(config.to_dict()))
    return {
        name: (then.get(name), now.get(name))
        for name in dict.fromkeys([*then, *now])
        if _differ(then.get(name), now.get(name)) and not _is_free(name)
    }


def reject_changes(saved: RunConfig, config: RunConfig, folder: object) -> None:
    """Raises an error that lists every changed setting with where it is written now."""
    changes = changed_settings(saved, config)
    if not changes:
        return
    lines = []
    for name, (then, now) in changes.items():
        where = config.origin(name)
        lines.append(f"  {'' if where is None else f'{where}: '}{name}: {then!r} → {now!r}")
    raise CheckpointError(
        f"{folder} was trained with other settings:\n" + "\n".join(lines) + "\n"
        "Set them back, choose another name, go on with the new ones by --accept-changes, or start over with --fresh."
    )


def reject_strangers(checkpoint: object, folder: object) -> None:
    """Raises an error for checkpoints that no settings are known of: they may be another run's of the same name."""
    raise CheckpointError(
        f"{checkpoint} is there, but {folder} does not say with which settings it was trained: maybe by another run. "
        "Choose another name, go on from it by --accept-changes, or start over with --fresh."
    )


def pick_step(store: AnyStore, step: int | str, *, best: KeepBest | None) -> int:
    """Returns the checkpoint that `step` names: "latest" (the newest intact one), "best", or a number."""
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{store.folder} holds no checkpoint. Train first, or give another run.")
    if step == "latest":
        newest = store.newest_intact(set_aside=False)
        if newest is None:
            raise CheckpointError(
                f"{store.folder} holds no intact checkpoint. The next training sets the damaged ones aside."
            )
        return newest
    if step == "best":
        chosen = None
        if best is not None:
            chosen = best_step(metrics_by_step(store), metric=best.metric, mode=best.mode)
        if chosen is None:
            raise CheckpointError(
                f"{store.folder}: no checkpoint is known as the best. Set checkpoint.keep_best, or name a step: "
                f"{', '.join(map(str, steps))}."
            )
    elif not str(step).isdecimal():
        raise CheckpointError(f"step: {step!r} is neither latest, nor best, nor a number.")
    elif int(step) not in steps:
        raise CheckpointError(f"{store.folder} has no step {step}. It has {', '.join(map(str, steps))}.")
    else:
        chosen = int(step)
    store.verify(chosen)
    return chosen


def _differ(then: Any, now: Any) -> bool:
    """Are these two settings? A nan is no change of a nan, though it is not equal to itself; nor one in a list."""
    return bool(then != now) and repr(then) != repr(now)


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in FREE_SETTINGS)


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif value is not None and value != {} and value != []:
        yield prefix, value
