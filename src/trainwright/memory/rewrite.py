"""Applies the memory settings of the model section.

The order is `tile`, `offload`, `activation_checkpointing`, `compile_repeated_blocks`; each has its own file. Names of
modules and parameters do not change, so checkpoints do not depend on the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import nn

from trainwright.errors import ConfigError
from trainwright.memory.activation_checkpointing import choose_layers, recompute_layers
from trainwright.memory.offload import choose_parts, offload_tensors
from trainwright.memory.repeated_blocks import choose_stacks, compile_stacks
from trainwright.memory.tiles import choose_tiled, tile_layers

Origin = Callable[[str], object | None]
"""Returns the location of a setting such as `model.activation_checkpointing`, or None."""


def apply_memory_settings(
    model: nn.Module,
    reserved: Mapping[str, Any],
    *,
    origin: Origin,
    is_whole: bool = True,
    compile_arguments: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Applies the memory settings in place: after tensor parallelism, before FSDP.

    A class, glob or path that matches nothing raises, unless the model is not whole (a pipeline stage): then call
    `check_memory_settings` with the whole model before. `compile_arguments` are further arguments of torch.compile for
    `compile_repeated_blocks`.
    """
    # Innermost, so that a layer in both settings is recomputed as a whole.
    if "tile" in reserved:
        with _located("tile", origin) as where:
            tile_layers(model, reserved["tile"], is_whole=is_whole, where=where)
    if "offload" in reserved:
        with _located("offload", origin) as where:
            offload_tensors(model, reserved["offload"], is_whole=is_whole, where=where)
    # Inside of a compiled block, so that the graph contains the recomputation.
    if "activation_checkpointing" in reserved:
        with _located("activation_checkpointing", origin):
            recompute_layers(model, reserved["activation_checkpointing"], is_whole=is_whole)
    if "compile_repeated_blocks" in reserved:
        with _located("compile_repeated_blocks", origin) as where:
            given, arguments = reserved["compile_repeated_blocks"], compile_arguments
            compile_stacks(model, given, arguments=arguments, is_whole=is_whole, where=where)


def check_memory_settings(model: nn.Module, reserved: Mapping[str, Any], *, origin: Origin) -> None:
    """Raises the errors of `apply_memory_settings` for a whole model, and changes nothing."""
    for key, choose in (
        ("tile", choose_tiled),
        ("offload", choose_parts),
        ("activation_checkpointing", choose_layers),
        ("compile_repeated_blocks", choose_stacks),
    ):
        if key in reserved:
            with _located(key, origin):
                choose(model, reserved[key])


@contextmanager
def _located(key: str, origin: Origin) -> Iterator[object | None]:
    """Yields the location of a setting, and adds it to errors."""
    where = origin(f"model.{key}")
    try:
        yield where
    except ConfigError as error:
        if error.where is not None:
            raise
        raise ConfigError(f"model.{error.problem}", where=where) from error
