"""Presets: sizes of the shipped models by name, as data. Needs no torch.

presets.yaml has the constructors' keywords by the file of the model; preset_sizes.yaml has the numbers of weights by
the model's name in a run file, for listing without building.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainwright.config.problems import suggest
from trainwright.errors import ConfigError

_FOLDER = Path(__file__).parent
_PACKAGE = __name__.rpartition(".")[0]

Table = dict[str, dict[str, dict[str, Any]]]


def preset_settings(model_class: type[Any], name: str, **overrides: Any) -> dict[str, Any]:
    """Returns the constructor's keywords of a preset, which belongs to the file in which a class is written.

    A subclass in another file has its parent's presets.
    """
    table = presets()
    modules = [one.__module__.rpartition(".") for one in model_class.__mro__]
    family = next((file for package, _, file in modules if package == _PACKAGE and file in table), None)
    if family is None:
        raise ConfigError(f"{model_class.__name__} has no presets; {', '.join(sorted(table))} have.")
    if not isinstance(name, str):
        raise ConfigError(f"preset must be the name of one, got {name!r}. Known: {', '.join(table[family])}.")
    if name not in table[family]:
        raise ConfigError(f"{family} has no preset {name!r}. {suggest(name, table[family], cutoff=0.5)}")
    return {**table[family][name], **overrides}


@cache
def presets() -> Table:
    """Returns the keywords of each preset, by the file of its model and its name."""
    table: Table = yaml.safe_load((_FOLDER / "presets.yaml").read_text(encoding="utf-8"))
    return table


@cache
def preset_sizes() -> dict[str, dict[str, int]]:
    """Returns the number of weights of each preset, by the model's name in a run file and the preset's name; tied
    weights count once."""
    sizes: dict[str, dict[str, int]] = yaml.safe_load((_FOLDER / "preset_sizes.yaml").read_text(encoding="utf-8"))
    return sizes
