"""Sharding rules as data: which dim of which parameter lies along which axis of the mesh, and how activations do.

    parameters: {model.layers.*.mlp.up_proj.weight: [tensor, null]}     axes per dim; null: not split
    outputs: {model.layers.*.mlp: [null, tensor, null]}                 the layout of what a module returns
    inputs: {model.layers.*: [null, tensor, null]}                      ... and of what it is given first

`*` is one part of a name between dots, `**` is one or more; the first rule that matches decides. Rules come from a
packaged file, a file of the project, or stand in the run file. What they mean for a model is sharding.py's.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from trainwright.config import yaml_text
from trainwright.config.problems import describe, suggest
from trainwright.config.tree import Origin
from trainwright.errors import ConfigError

PARAMETER_AXES = ("data", "tensor")
OUTPUT_AXES = ("replicate", "data", "context", "tensor")
"""Along `tensor` rules split activations; along the others the batch and the sequence are split already."""

SECTIONS = ("parameters", "outputs", "inputs", "fused", "on_parts", "strict")

Axes = tuple[tuple[str, ...], ...]
"""The axes of each dim, none where it is not split."""


@dataclass(frozen=True)
class ShardingRules:
    """What the rules say, before they meet a model.

    `fused` names linear layers whose rows are several projections one below the other, and how many. `on_parts` names
    parameters that are copied, but used on what only a rank has (a norm of its heads): their gradients are summed.
    `flat` has rules that stand under no section: whether one is of parameters or of modules, the model tells.
    `strict` refuses rules that match nothing and parameters that no rule covers, which else are reported.
    `is_packaged` rules are written for all variants of a model, so that some may match nothing.
    """

    parameters: Mapping[str, Axes] = field(default_factory=dict)
    outputs: Mapping[str, Axes] = field(default_factory=dict)
    inputs: Mapping[str, Axes] = field(default_factory=dict)
    fused: Mapping[str, int] = field(default_factory=dict)
    on_parts: tuple[str, ...] = ()
    flat: Mapping[str, Axes] = field(default_factory=dict)
    strict: bool = False
    is_packaged: bool = False


def read_rules(
    setting: str | Mapping[str, Any],
    *,
    project_dir: Path,
    origin: Callable[[str], Origin | None] | Origin | None = None,
) -> ShardingRules:
    """Reads `model.sharding`: a packaged name, a file of the project, or the rules themselves.

    `origin` is where that stands, or tells where a setting stands.
    """
    origin = origin("model.sharding") if callable(origin) else origin
    if isinstance(setting, Mapping):
        return parse_rules(setting, where=origin)
    if not isinstance(setting, str) or not setting:
        raise ConfigError(
            f"model.sharding: must be a packaged name, a file or a mapping of rules, got {describe(setting)}.",
            where=origin,
        )
    packaged = packaged_files()
    if setting in packaged:
        return _read_file(packaged[setting], shown=f"trainwright/configs/sharding/{setting}.yaml", is_packaged=True)
    if setting.endswith((".yaml", ".yml")):
        path = project_dir / setting
        if not path.is_file():
            raise ConfigError(f"model.sharding: there is no file {path}. Paths start from {project_dir}.", where=origin)
        return _read_file(path, shown=setting, is_packaged=False)
    raise ConfigError(
        f"model.sharding: no packaged rules {setting!r}. {suggest(setting, packaged)} "
        "Or give a file such as sharding.yaml.",
        where=origin,
    )


def packaged_rules(model: Any) -> ShardingRules | None:
    """Returns the shipped rules for a shipped model, also for a subclass of one; None where there are none.

    Rules are named as the file is that the model is written in.
    """
    files = packaged_files()
    for one in type(model).__mro__:
        package, _, file = one.__module__.rpartition(".")
        if package == "trainwright.models" and file in files:
            return _read_file(files[file], shown=f"trainwright/configs/sharding/{file}.yaml", is_packaged=True)
    return None


@cache
def packaged_files() -> dict[str, Path]:
    """Returns the shipped files of rules, by name."""
    folder = Path(str(importlib.resources.files("trainwright"))) / "configs" / "sharding"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def parse_rules(setting: Mapping[str, Any], *, where: object = None, is_packaged: bool = False) -> ShardingRules:
    """Returns the rules of a mapping with sections, or of a flat one: glob → axes of each dim."""
    known = {key: value for key, value in setting.items() if key in SECTIONS}
    flat = {key: value for key, value in setting.items() if key not in SECTIONS}
    if flat and set(known) - {"strict"}:
        first = next(iter(flat))
        raise ConfigError(
            f"model.sharding: {first!r} stands beside the sections {', '.join(known)}. Put it under parameters or "
            f"outputs. {suggest(str(first), SECTIONS)}",
            where=where,
        )
    strict = known.get("strict", False)
    if not isinstance(strict, bool):
        raise ConfigError(f"model.sharding.strict: must be true or false, got {describe(strict)}.", where=where)
    return ShardingRules(
        parameters=_axes_by_glob("parameters", known.get("parameters"), PARAMETER_AXES, where),
        outputs=_axes_by_glob("outputs", known.get("outputs"), OUTPUT_AXES, where),
        inputs=_axes_by_glob("inputs", known.get("inputs"), OUTPUT_AXES, where),
        fused=_counts(known.get("fused"), where),
        on_parts=_globs(known.get("on_parts"), where),
        flat=_axes_by_glob("", flat, OUTPUT_AXES, where),
        strict=strict,
        is_packaged=is_packaged,
    )


def compiled(glob: str) -> re.Pattern[str]:
    """Compiles a glob: `*` is any text without a dot, `**` any text.

    >>> bool(compiled("layers.*.up").fullmatch("layers.3.up")), bool(compiled("layers.*").fullmatch("layers.3.up"))
    (True, False)
    """
    wild = {"*": r"[^.]+", "**": r".+"}
    return re.compile("".join(wild.get(piece) or re.escape(piece) for piece in re.split(r"(\*+)", glob)))


def check_axes(label: str, axes: Axes, allowed: Sequence[str], where: object) -> None:
    """Refuses axes that the mesh does not have, or that cannot split this, and an axis on two dims."""
    used = [axis for dim in axes for axis in dim]
    for axis in used:
        if axis not in allowed:
            raise ConfigError(f"model.sharding: {label}: no axis {axis!r} here. {suggest(axis, allowed)}", where=where)
        if used.count(axis) > 1:
            raise ConfigError(f"model.sharding: {label}: the axis {axis} splits two dims. Use it once.", where=where)


def _read_file(path: Path, *, shown: str, is_packaged: bool) -> ShardingRules:
    text = path.read_text(encoding="utf-8")
    settings = yaml_text.parse(text, lambda line: Origin(shown, line)).plain()
    if not isinstance(settings, Mapping):
        raise ConfigError(f"model.sharding: must be a mapping of rules, got {describe(settings)}.", where=shown)
    return parse_rules(settings, where=shown, is_packaged=is_packaged)


def _axes_by_glob(section: str, given: Any, allowed: Sequence[str], where: object) -> dict[str, Axes]:
    rules = {} if given is None else given
    if not isinstance(rules, Mapping):
        raise ConfigError(
            f"model.sharding.{section}: must be a mapping of globs to axes, got {describe(given)}.", where=where
        )
    found = {}
    for glob, value in rules.items():
        axes = _axes(str(glob), value, where)
        check_axes(str(glob), axes, allowed, where)
        found[str(glob)] = axes
    return found


def _axes(glob: str, value: Any, where: object) -> Axes:
    """Reads `[tensor, null]`, `[[data, tensor], null]`, or null for nothing split."""
    dims = () if value is None else value
    if isinstance(dims, Sequence) and not isinstance(dims, str):
        read = [(dim,) if isinstance(dim, str) else () if dim is None else dim for dim in dims]
        if all(isinstance(dim, Sequence) and all(isinstance(axis, str) for axis in dim) for dim in read):
            return tuple(tuple(dim) for dim in read)
    raise ConfigError(
        f"model.sharding: {glob}: must be a list with null, an axis or a list of axes for each dim, such as "
        f"[tensor, null]; got {value!r}.",
        where=where,
    )


def _counts(given: Any, where: object) -> dict[str, int]:
    rules = {} if given is None else given
    are_right = isinstance(rules, Mapping) and all(
        isinstance(count, int) and not isinstance(count, bool) and count > 1 for count in rules.values()
    )
    if not are_right:
        raise ConfigError(
            f"model.sharding.fused: must say of globs how many projections a layer holds, such as {{attn.qkv: 3}}; "
            f"got {given!r}.",
            where=where,
        )
    return {str(glob): count for glob, count in rules.items()}


def _globs(given: Any, where: object) -> tuple[str, ...]:
    globs = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(globs, Sequence) or not all(isinstance(glob, str) for glob in globs):
        raise ConfigError(f"model.sharding.on_parts: must be a list of globs, got {given!r}.", where=where)
    return tuple(globs)
