"""Sharding rules, and what they make of a model: which rank holds which shard, before anything is sharded."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.config import yaml_text
from trainwright.config.problems import describe, suggest
from trainwright.config.yaml_text import Origin
from trainwright.errors import ConfigError

PARAMETER_AXES = ("fsdp", "tensor")
OUTPUT_AXES = ("replicate", "fsdp", "context", "tensor")
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
    `strict` rejects rules that match nothing and parameters that no rule covers, which else are reported.
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
    """Rejects axes that the mesh does not have, or that cannot split this, and an axis on two dims."""
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
    """Reads `[tensor, null]`, `[[fsdp, tensor], null]`, or null for nothing split."""
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


__all__ = ["AxisLayout", "ShardingPlan", "ShardingRules", "packaged_rules", "plan_sharding", "read_rules"]

MOST_SHOWN = 8


@dataclass(frozen=True)
class AxisLayout:
    """The axes of each dim of one parameter, and the rule that says so; None: no rule does."""

    axes: Axes
    rule: str | None = None

    @property
    def tensor_dim(self) -> int | None:
        """The dim that is split along the tensor axis; None: every rank along it has a copy."""
        return next((dim for dim, axes in enumerate(self.axes) if "tensor" in axes), None)

    @property
    def data_dim(self) -> int | None:
        """The dim that FSDP splits; None: no rule says which."""
        return next((dim for dim, axes in enumerate(self.axes) if "fsdp" in axes), None)


@dataclass(frozen=True)
class ShardingPlan:
    """What becomes of each parameter and of the activations.

    `outputs` maps a module to the layout of what it returns: {None: the only output} or {number: that one of several}.
    `uncovered` are parameters of which no rule speaks: copied along tensor, split by FSDP in their first dim.
    `unmatched` are rules that speak of nothing in the model.
    """

    layouts: dict[str, AxisLayout]
    outputs: dict[str, dict[int | None, Axes]] = field(default_factory=dict)
    inputs: dict[str, Axes] = field(default_factory=dict)
    fused: dict[str, int] = field(default_factory=dict)
    on_parts: frozenset[str] = frozenset()
    uneven: frozenset[str] = frozenset()
    uncovered: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    def data_dim(self, name: str) -> int | None:
        """Returns the dim of a parameter that FSDP splits; None: the first."""
        layout = self.layouts.get(name)
        if layout is None or layout.data_dim is not None:
            return None if layout is None else layout.data_dim
        # A vocabulary that does not divide is split unevenly along tensor; FSDP then takes the other dim.
        return 1 if name in self.uneven and len(layout.axes) > 1 else None

    def remarks(self) -> list[str]:
        """Returns what a user should know: rules without effect, parameters without rules."""
        found = []
        if self.unmatched:
            found.append(f"these rules match nothing in the model: {_some(self.unmatched)}.")
        if self.uncovered:
            found.append(f"no rule covers these parameters, which are copied along tensor: {_some(self.uncovered)}.")
        return found


def plan_sharding(model: nn.Module, rules: ShardingRules | None, sizes: Mapping[str, int]) -> ShardingPlan:
    """Returns what the rules make of a model on a mesh of these sizes; what cannot be is rejected by name."""
    num_parts = sizes.get("tensor", 1)
    if rules is None:
        if num_parts > 1:
            raise ConfigError(
                f"runtime.mesh: tensor is {num_parts}, but {type(model).__name__} has no sharding rules, so that every "
                "rank would do the same. Give rules in model.sharding, or use the axis fsdp."
            )
        rules = ShardingRules()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    rules, lost = _sort_flat(rules, parameters, modules)
    plan = ShardingPlan(
        layouts=_layouts(rules, parameters, modules),
        outputs=_outputs(rules, modules),
        inputs={name: axes for name, _, axes in _matches(rules.inputs, modules)},
        fused={name: count for name, _, count in _matches(rules.fused, modules)},
        on_parts=frozenset(name for name, _, _ in _matches(dict.fromkeys(rules.on_parts), parameters)),
        uneven=_uneven(rules, parameters, modules, num_parts),
    )
    plan.unmatched.extend([*lost, *_unmatched(rules, parameters, modules, sizes)])
    plan.uncovered.extend(_uncovered(rules, plan, parameters))
    if rules.strict and plan.remarks():
        raise ConfigError(f"model.sharding: strict is true, but {' Also, '.join(plan.remarks())} Change the rules.")
    if num_parts > 1:
        _check_sizes(model, plan, parameters, modules, num_parts)
    return plan


def _sort_flat(
    rules: ShardingRules, parameters: Mapping[str, Any], modules: Mapping[str, Any]
) -> tuple[ShardingRules, list[str]]:
    """Returns the rules with the flat ones under parameters or outputs, and those that name neither."""
    if not rules.flat:
        return rules, []
    of_parameters, of_outputs, lost = dict(rules.parameters), dict(rules.outputs), []
    for glob, axes in rules.flat.items():
        if any(compiled(glob).fullmatch(name) for name in parameters):
            check_axes(glob, axes, PARAMETER_AXES, None)
            of_parameters[glob] = axes
        elif any(compiled(_path_of(glob)[0]).fullmatch(name) for name in modules):
            of_outputs[glob] = axes
        else:
            lost.append(glob)
    return ShardingRules(parameters=of_parameters, outputs=of_outputs, strict=rules.strict), lost


def _matches(rules: Mapping[str, Any], names: Iterable[str]) -> Iterable[tuple[str, str, Any]]:
    """Yields each name with the first rule that matches it and what that says."""
    patterns = [(compiled(glob), glob, said) for glob, said in rules.items()]
    for name in names:
        for pattern, glob, said in patterns:
            if pattern.fullmatch(name):
                yield name, glob, said
                break


def _path_of(glob: str) -> tuple[str, int | None]:
    """Splits `path[2]`, the third of several outputs, into path and number; None: there is one output."""
    path, bracket, number = glob.partition("[")
    if not bracket:
        return glob, None
    if not number.removesuffix("]").isdigit():
        raise ConfigError(f"model.sharding: {glob}: one of several outputs is named path[0], path[1] and so on.")
    return path, int(number.removesuffix("]"))


def _outputs(rules: ShardingRules, modules: Mapping[str, Any]) -> dict[str, dict[int | None, Axes]]:
    found: dict[str, dict[int | None, Axes]] = {}
    for glob, axes in rules.outputs.items():
        path, number = _path_of(glob)
        pattern = compiled(path)
        for name in modules:
            if pattern.fullmatch(name):
                found.setdefault(name, {}).setdefault(number, axes)
    return found


def _layouts(
    rules: ShardingRules, parameters: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module]
) -> dict[str, AxisLayout]:
    """Returns the layout of each parameter; one that has several names is laid out as its first name with a rule."""
    named = {}
    for name, glob, axes in _matches(rules.parameters, parameters):
        dims = parameters[name].dim()
        if axes and len(axes) != dims:
            shape = list(parameters[name].shape)
            raise ConfigError(
                f"model.sharding: {glob}: has {len(axes)} dims, but {name} has the shape {shape}. Give null or an axis "
                "for each dim."
            )
        named[name] = AxisLayout(axes or ((),) * dims, glob)
    by_identity: dict[int, AxisLayout] = {}
    for name, layout in named.items():
        earlier = by_identity.setdefault(id(parameters[name]), layout)
        if earlier.axes != layout.axes:
            raise ConfigError(
                f"model.sharding: {earlier.rule} and {layout.rule} lay out one tied parameter ({name}) in two ways. "
                "Make them equal."
            )
    layouts = {}
    for name, parameter in parameters.items():
        found = by_identity.get(id(parameter)) or _adapter_layout(name, named, modules)
        layouts[name] = found or AxisLayout(((),) * parameter.dim())
    return layouts


def _adapter_layout(name: str, named: Mapping[str, AxisLayout], modules: Mapping[str, nn.Module]) -> AxisLayout | None:
    """Returns how an adapter beside a split weight is split: B by rows as the weight is, A by columns as it is."""
    path, _, last = name.rpartition(".")
    weight = named.get(f"{path}.weight")
    if weight is None or last not in ("lora_a", "lora_b") or not isinstance(modules[path], nn.Linear):
        return None
    dim = 0 if last == "lora_b" else 1
    is_split = weight.tensor_dim == dim
    return AxisLayout(tuple(("tensor",) if is_split and each == dim else () for each in range(2)), weight.rule)


def _uneven(
    rules: ShardingRules, parameters: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module], num_parts: int
) -> frozenset[str]:
    """Returns the tables and heads whose vocabulary may be split unevenly, and is: nothing is counted by their rows."""
    outputs = _outputs(rules, modules)
    free = set()
    for path, module in modules.items():
        said = outputs.get(path, {}).get(None, ())
        is_head = isinstance(module, nn.Linear) and bool(said) and "tensor" in said[-1]
        if is_head or isinstance(module, nn.Embedding):
            free |= {id(each) for each in module.parameters(recurse=False) if each.shape[0] % num_parts}
    layouts = _layouts(rules, parameters, modules)
    return frozenset(name for name, one in parameters.items() if id(one) in free and layouts[name].tensor_dim == 0)


def _unmatched(
    rules: ShardingRules,
    parameters: Mapping[str, nn.Parameter],
    modules: Mapping[str, nn.Module],
    sizes: Mapping[str, int],
) -> list[str]:
    if rules.is_packaged or sizes.get("pipeline", 1) > 1:
        return []  # written for all variants of a model; or the layers that a rule speaks of are on another stage
    sections = ((rules.parameters, parameters), (rules.outputs, modules), (rules.inputs, modules))
    more = ((rules.fused, modules), (rules.on_parts, parameters))
    return [
        glob
        for globs, names in (*sections, *more)
        for glob in globs
        if not any(compiled(_path_of(glob)[0]).fullmatch(name) for name in names)
    ]


def _uncovered(rules: ShardingRules, plan: ShardingPlan, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    if not (rules.parameters or rules.outputs):
        return []
    covered = {id(parameters[name]) for name, layout in plan.layouts.items() if layout.rule is not None}
    covered |= {id(parameters[name]) for name in plan.on_parts}
    missing: dict[int, str] = {}
    for name, one in parameters.items():
        if id(one) not in covered:
            missing.setdefault(id(one), name)
    return list(missing.values())


def _check_sizes(
    model: nn.Module,
    plan: ShardingPlan,
    parameters: Mapping[str, nn.Parameter],
    modules: Mapping[str, nn.Module],
    num_parts: int,
) -> None:
    """Rejects dims and heads that the tensor axis does not divide, and parameters that could be meant in two ways."""
    if all(layout.tensor_dim is None for layout in plan.layouts.values()):
        raise ConfigError(
            f"runtime.mesh: tensor is {num_parts}, but model.sharding splits no parameter along it, so that every rank "
            "would do the same. Give rules such as **.up_proj.weight: [tensor, null], or use the axis fsdp."
        )
    for name, layout in plan.layouts.items():
        dim, (path, _, _) = layout.tensor_dim, name.rpartition(".")
        if dim is None or name in plan.uneven:
            continue
        size = parameters[name].shape[dim]
        parent = modules[path.rpartition(".")[0]] if isinstance(modules[path], nn.Linear) else None
        head_size, count = getattr(parent, "head_size", None), plan.fused.get(path, 1)
        heads = size // head_size // count if isinstance(head_size, int) and size % (head_size * count) == 0 else None
        if heads is not None and heads % num_parts:
            raise ConfigError(
                f"{_setting_of(model, heads)} is {heads}, which tensor: {num_parts} ranks cannot share "
                f"({name}). Use a tensor axis that divides {heads}, or another number of heads."
            )
        if size % (num_parts * count):
            raise ConfigError(
                f"model.sharding: {layout.rule}: dim {dim} of {name} {list(parameters[name].shape)} does not divide "
                f"over tensor: {num_parts} ranks. Use another axis size, or another size of the model."
            )
    _reject_doubtful(plan, modules)


def _setting_of(model: nn.Module, heads: int) -> str:
    settings = getattr(model, "settings", None)
    settings = settings if isinstance(settings, Mapping) else {}
    names = [name for name in ("num_heads", "num_kv_heads") if settings.get(name) == heads]
    return f"model.{names[0]}" if names else "the number of heads"


def _reject_doubtful(plan: ShardingPlan, modules: Mapping[str, nn.Module]) -> None:
    """Rejects parameters between split layers of which no rule says whether they meet whole states or a rank's part."""
    for path, module in modules.items():
        dims = {child: _split_dim(plan, _join(path, child)) for child, _ in module.named_children()}
        if not {0, 1} <= set(dims.values()):
            continue
        beside = ["", *(child for child, dim in dims.items() if dim is None)]
        names = [
            _join(_join(path, child), last)
            for child in beside
            for last, _ in module.get_submodule(child).named_parameters(recurse=False)
        ]
        for name in names:
            if plan.layouts[name].rule is None and name not in plan.on_parts:
                raise ConfigError(
                    f"model.sharding: {name} stands between layers that are split along tensor, and no rule speaks "
                    "of it. If it is used on what one rank has (such as its heads), name it under on_parts, so "
                    "that its gradients are summed; else give it a rule of its own, such as [null]."
                )


def _split_dim(plan: ShardingPlan, path: str) -> int | None:
    layout = plan.layouts.get(f"{path}.weight")
    return None if layout is None else layout.tensor_dim


def _join(path: str, child: str) -> str:
    return f"{path}.{child}" if path and child else path or child


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more
