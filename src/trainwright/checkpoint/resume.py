"""Resumes a run from its folder: which settings may have changed, and which checkpoint is used.

Running the same command again resumes the run. Settings that do not affect the math may change; any other change
raises by name.
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
    *("name", "output_dir", "imports", "evaluation", "checkpoint", "hooks", "writers", "log", "anomalies"),
    *("preemption", "watchdog"),
    *("data.process.num_workers", "data.num_workers", "data.loader", "data.eval", "data.test", "data.on_error"),
    *("data.max_skipped",),
    *("trainer.max_steps", "trainer.max_epochs", "trainer.max_samples", "trainer.max_tokens"),
    *("trainer.micro_batch_size", "trainer.gradient_accumulation_steps", "trainer.optimizer_in_backward"),
    *("model.sharding", "model.activation_checkpointing", "model.compile_repeated_blocks", "model.offload"),
    "model.tile",
    *("runtime.mesh", "runtime.reshard_after_forward", "runtime.accumulate_unsharded", "runtime.mode"),
    *("runtime.compile_backend", "runtime.compile_mode", "runtime.compile_options", "runtime.compile_memory_budget"),
    *("runtime.deterministic", "runtime.max_graph_breaks", "runtime.device"),
)
"""Settings, including all nested ones, that do not affect the losses and weights of later updates."""

_CODE = "trainer.code."
"""The settings that have fingerprints of code: see api/train_arguments.py."""
_ROWS = f"{_CODE}data"
"""The fingerprint of the rows of a dataset in memory."""


def changed_settings(saved: RunConfig, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the settings that affect the math and differ: dotted name → (saved value, current value)."""
    # The saved settings have no credentials, so URLs are compared without them.
    then, now = _with_defaults(saved.masked()), _with_defaults(config.masked())
    return {
        name: (then.get(name), now.get(name))
        for name in dict.fromkeys([*then, *now])
        # By repr as well, because nan is not equal to itself, also within a list.
        if then.get(name) != now.get(name)
        and repr(then.get(name)) != repr(now.get(name))
        and not any(name == free or name.startswith(f"{free}.") for free in FREE_SETTINGS)
        # Hooks may be added and removed, but not edited.
        and not (name.startswith(f"{_CODE}hooks.") and (name not in then or name not in now))
    }


def reject_changes(saved: RunConfig, config: RunConfig, folder: object) -> None:
    """Raises if settings changed; the error lists each with the location where it is set now."""
    changes = changed_settings(saved, config)
    if not changes:
        return
    lines = []
    for name, (then, now) in changes.items():
        where = config.origin(name)
        change = f"{then!r} → {now!r}"
        if name.startswith(_CODE):
            change = _describe_edit(then, now, edit="has other rows" if name == _ROWS else "has been edited")
        lines.append(f"  {'' if where is None else f'{where}: '}{name}: {change}")
    kind = "code" if all(name.startswith(_CODE) for name in changes) else "settings"
    kind = "data" if list(changes) == [_ROWS] else kind
    raise CheckpointError(
        f"{folder} was trained with other {kind}:\n" + "\n".join(lines) + "\n"
        "Set them back, choose another name, keep the new ones with --accept-changes, or start over with --fresh."
    )


def _describe_edit(then: str | None, now: str | None, *, edit: str) -> str:
    """Describes the change between two fingerprints, each a name and a hash; None means that there is no such code."""
    before, after = ((each or "").rpartition(" ")[0] or "none" for each in (then, now))
    return f"{after} {edit}." if before == after else f"was {before}, is {after}."


def reject_unknown_origin(checkpoint: object, folder: object) -> None:
    """Raises for checkpoints with unknown settings, because another run of the same name may have written them."""
    raise CheckpointError(
        f"{checkpoint} exists, but {folder} does not contain the settings that it was trained with. Another run may "
        "have written it. Choose another name, resume from it with --accept-changes, or start over with --fresh."
    )


def reject_weights_only(checkpoint: object) -> None:
    """Raises if the newest checkpoint, from which a run would resume, has only weights."""
    raise CheckpointError(
        "It has only weights (checkpoint.contents: weights), without the optimizers and the data position that a "
        "resumed run needs. Evaluate or export it, begin another run with the export as model.pretrained, or start "
        "over with --fresh.",
        where=checkpoint,
    )


def pick_step(store: AnyStore, step: int | str, *, best: KeepBest | None) -> int:
    """Returns the checkpoint that `step` names: "latest" (the newest intact one), "best", or a number."""
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{store.folder} holds no checkpoint. Train first, or choose another run.")
    if step == "latest":
        newest = store.newest_intact(set_aside=False)
        if newest is None:
            raise CheckpointError(
                f"{store.folder} holds no intact checkpoint. The next training run renames the damaged ones."
            )
        return newest
    if step == "best":
        chosen = None if best is None else best_step(metrics_by_step(store), metric=best.metric, mode=best.mode)
        if chosen is None:
            raise CheckpointError(
                f"{store.folder}: the best checkpoint is not known. Set checkpoint.keep_best, or choose a step: "
                f"{', '.join(map(str, steps))}."
            )
    elif not str(step).isdecimal():
        raise CheckpointError(f"step: {step!r} is not latest, best or a number.")
    elif int(step) not in steps:
        raise CheckpointError(f"{store.folder} has no step {step}. It has {', '.join(map(str, steps))}.")
    else:
        chosen = int(step)
    store.verify(chosen)
    return chosen


def _with_defaults(config: RunConfig) -> dict[str, Any]:
    """Returns all settings by dotted name; settings of the order that are not set have their effective value."""
    settings = {"data.shuffle": True, "data.last_batch": "straddle", **dict(_flatten(config.to_dict()))}
    if config.data.sampler is not None:
        del settings["data.shuffle"]  # false has no effect with a sampler
    return settings


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif value is not None and value != {} and value != []:
        yield prefix, value
