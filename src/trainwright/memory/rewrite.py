"""Rewrites a model by the memory settings of its own section.

The order is `offload`, `activation_checkpointing`, `compile_repeated_blocks`. Each is a file of its own.
Names of modules and parameters stay as they are, so that checkpoints fit with and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from trainwright.errors import ConfigError
from trainwright.memory.activation_checkpointing import choose_layers, recompute_layers
from trainwright.memory.offload import choose_parts, offload_tensors
from trainwright.memory.repeated_blocks import choose_stacks, compile_stacks

Origin = Callable[[str], object | None]
"""Where a setting such as `model.activation_checkpointing` was written, or None."""


def apply_memory_settings(
    model: nn.Module, reserved: Mapping[str, Any], *, origin: Origin, is_whole: bool = True
) -> None:
    """Applies what the model section says, in place: after a model is split by rules, before FSDP splits it.

    A class, glob or path that names nothing is rejected, unless the model is not whole, as a pipeline's stage: then
    have `check_memory_settings` look at the whole model before.
    """
    if "offload" in reserved:
        with _located("offload", origin) as where:
            offload_tensors(model, reserved["offload"], is_whole=is_whole, where=where)
    # Inside of a compiled block, so that the graph knows what is recomputed.
    if "activation_checkpointing" in reserved:
        with _located("activation_checkpointing", origin):
            recompute_layers(model, reserved["activation_checkpointing"], is_whole=is_whole)
    if "compile_repeated_blocks" in reserved:
        with _located("compile_repeated_blocks", origin) as where:
            compile_stacks(model, reserved["compile_repeated_blocks"], is_whole=is_whole, where=where)


def check_memory_settings(model: nn.Module, reserved: Mapping[str, Any], *, origin: Origin) -> None:
    """Rejects what `apply_memory_settings` would reject of a whole model, and changes nothing."""
    for key, choose in (
        ("offload", choose_parts),
        ("activation_checkpointing", choose_layers),
        ("compile_repeated_blocks", choose_stacks),
    ):
        if key in reserved:
            with _located(key, origin):
                choose(model, reserved[key])


@contextmanager
def _located(key: str, origin: Origin) -> Iterator[object | None]:
    """Gives the place of a setting, and says it of errors inside."""
    where = origin(f"model.{key}")
    try:
        yield where
    except ConfigError as error:
        if error.where is not None:
            raise
        raise ConfigError(f"model.{error.problem}", where=where) from error
