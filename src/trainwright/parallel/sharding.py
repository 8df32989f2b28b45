"""Sharding rules, and the plan that they define for a model before it is sharded."""

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
"""Rules shard activations along `tensor`; along the other axes, the batch and the sequence are already split."""

SECTIONS = ("parameters", "outputs", "inputs", "fused", "on_parts", "strict")

Axes = tuple[tuple[str, ...], ...]
"""The axes of each dim; empty for a dim that is not sharded."""


@dataclass(frozen=True)
class ShardingRules:
    """Parsed rules, independent of a model.

    `fused` maps linear layers with several stacked projections to their number. `on_parts` are replicated parameters
    that are used only on this rank's shard (a norm of its heads); their gradients are summed. `flat` are rules without
    a section; the model determines whether they refer to parameters or to modules. `strict` rejects rules that match
    nothing and parameters without a rule, which are otherwise logged. `is_packaged` rules cover all variants of a
    model, so some may match nothing.
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
    origin: Callable[[str], object | None] = lambda setting: None,
) -> ShardingRules:
    """Reads `model.sharding`: a packaged name, a file of the project, or the rules themselves.

    `origin` returns the location of a setting.
    """
    where = origin("model.sharding")
    if isinstance(setting, Mapping):
        return parse_rules(setting, where=where)
    if not isinstance(setting, str) or not setting:
        raise ConfigError(
            f"model.sharding: must be a packaged name, a file or a mapping of rules, got {describe(setting)}.",
            where=where,
        )
    packaged = packaged_files()
    if setting in packaged:
        return _read_file(packaged[setting], shown=f"trainwright/configs/sharding/{setting}.yaml", is_packaged=True)
    if setting.endswith((".yaml", ".yml")):
        path = project_dir / setting
        if not path.is_file():
            raise ConfigError(f"model.sharding: {path} does not exist. Paths start at {project_dir}.", where=where)
        return _read_file(path, shown=setting, is_packaged=False)
    raise ConfigError(
        f"model.sharding: no packaged rules {setting!r}. {suggest(setting, packaged)} "
        "Or use a file such as sharding.yaml.",
        where=where,
    )


def packaged_rules(model: Any) -> ShardingRules | None:
    """Returns the packaged rules for a shipped model or its subclass; None if there are none.

    A rules file has the name of the file that defines the model.
    """
    files = packaged_files()
    for kind in type(model).__mro__:
        package, _, file = kind.__module__.rpartition(".")
        if package == "trainwright.models" and file in files:
            return _read_file(files[file], shown=f"trainwright/configs/sharding/{file}.yaml", is_packaged=True)
    return None


@cache
def packaged_files() -> dict[str, Path]:
    """Returns the packaged files of rules, by name."""
    folder = Path(str(importlib.resources.files("trainwright"))) / "configs" / "sharding"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def parse_rules(setting: Mapping[str, Any], *, where: object = None, is_packaged: bool = False) -> ShardingRules:
    """Returns the rules of a mapping with sections, or of a flat one: glob → axes of each dim."""
    known = {key: value for key, value in setting.items() if key in SECTIONS}
    flat = {key: value for key, value in setting.items() if key not in SECTIONS}
    if flat and set(known) - {"strict"}:
        first = next(iter(flat))
        raise ConfigError(
            f"model.sharding: {first!r} is next to the sections {', '.join(known)}. Move it to parameters or "
            f"outputs. {suggest(str(first), SECTIONS)}",
            where=where,
        )
    strict = known.get("strict", False)
    if not isinstance(strict, bool):
        raise ConfigError(f"model.sharding.strict: must be true or false, got {describe(strict)}.", where=where)
    fused = {} if known.get("fused") is None else known["fused"]
    if not isinstance(fused, Mapping) or not all(type(count) is int and count > 1 for count in fused.values()):
        problem = f"must map globs to the number of projections of a layer, such as {{attn.qkv: 3}}; got {fused!r}"
        raise ConfigError(f"model.sharding.fused: {problem}.", where=where)
    globs = () if known.get("on_parts") is None else known["on_parts"]
    globs = (globs,) if isinstance(globs, str) else globs
    if not isinstance(globs, Sequence) or not all(isinstance(glob, str) for glob in globs):
        raise ConfigError(f"model.sharding.on_parts: must be a list of globs, got {globs!r}.", where=where)
    return ShardingRules(
        parameters=_axes_by_glob("parameters", known.get("parameters"), PARAMETER_AXES, where),
        outputs=_axes_by_glob("outputs", known.get("outputs"), OUTPUT_AXES, where),
        inputs=_axes_by_glob("inputs", known.get("inputs"), OUTPUT_AXES, where),
        fused=fused,
        on_parts=tuple(globs),
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
    """Rejects axes that are not allowed here, and an axis on two dims."""
    used = [axis for dim in axes for axis in dim]
    for axis in used:
        if axis not in allowed:
            raise ConfigError(f"model.sharding: {label}: no axis {axis!r} here. {suggest(axis, allowed)}", where=where)
        if used.count(axis) > 1:
            raise ConfigError(f"model.sharding: {label}: the axis {axis} is on two dims. Use it once.", where=where)


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
        found[str(glob)] = _axes(str(glob), value, where)
        check_axes(str(glob), found[str(glob)], allowed, where)
    return found


def _axes(glob: str, value: Any, where: object) -> Axes:
    """Reads `[tensor, null]`, `[[fsdp, tensor], null]`, or null for no sharding."""
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


MOST_SHOWN = 8


@dataclass(frozen=True)
class AxisLayout:
    """The axes of each dim of one parameter, and the rule; None if there is no rule."""

    axes: Axes
    rule: str | None = None

    @property
    def tensor_dim(self) -> int | None:
        """The dim that is sharded along the tensor axis; None: replicated."""
        return next((dim for dim, axes in enumerate(self.axes) if "tensor" in axes), None)

    @property
    def data_dim(self) -> int | None:
        """The dim that FSDP shards; None: not set by a rule."""
        return next((dim for dim, axes in enumerate(self.axes) if "fsdp" in axes), None)


@dataclass(frozen=True)
class ShardingPlan:
    """The layout of each parameter and of the activations.

    `outputs` maps a module to the layouts of its outputs: {None: the only output} or {number: one of several}.
    `uncovered` are parameters without a rule, which are replicated along tensor and sharded by FSDP along dim 0.
    `unmatched` are rules that match nothing in the model.
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
        """Returns the dim of a parameter that FSDP shards; None means dim 0."""
        layout = self.layouts.get(name)
        if layout is None or layout.data_dim is not None:
            return None if layout is None else layout.data_dim
        # A vocabulary that is not divisible is sharded unevenly along tensor; FSDP then shards the other dim.
        return 1 if name in self.uneven and len(layout.axes) > 1 else None

    def remarks(self) -> list[str]:
        """Returns warnings for the user: rules without effect, parameters without rules."""
        found = []
        if self.unmatched:
            found.append(f"these rules match nothing in the model: {_some(self.unmatched)}.")
        if self.uncovered:
            found.append(f"no rule covers these parameters, replicated along tensor: {_some(self.uncovered)}.")
        return found


def plan_sharding(model: nn.Module, rules: ShardingRules | None, sizes: Mapping[str, int]) -> ShardingPlan:
    """Returns the plan of the rules for a model on a mesh of these sizes; rejects impossible rules by name."""
    num_shards = sizes.get("tensor", 1)
    if rules is None:
        if num_shards > 1:
            raise ConfigError(
                f"runtime.mesh: tensor is {num_shards}, but {type(model).__name__} has no sharding rules, so every "
                "rank would compute the same. Set rules in model.sharding, or use the axis fsdp."
            )
        rules = ShardingRules()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    rules, unmatched = _sort_flat(rules, parameters, modules)
    layouts, outputs = _layouts(rules, parameters, modules), _outputs(rules, modules)
    plan = ShardingPlan(
        layouts=layouts,
        outputs=outputs,
        inputs={name: axes for name, _, axes in _matches(rules.inputs, modules)},
        fused={name: count for name, _, count in _matches(rules.fused, modules)},
        on_parts=frozenset(name for name, _, _ in _matches(dict.fromkeys(rules.on_parts), parameters)),
        uneven=_uneven(layouts, outputs, parameters, modules, num_shards),
    )
    plan.unmatched.extend([*unmatched, *_unmatched(rules, parameters, modules, sizes)])
    plan.uncovered.extend(_uncovered(rules, plan, parameters))
    if rules.strict and plan.remarks():
        raise ConfigError(f"model.sharding: strict is true, but {' Also, '.join(plan.remarks())} Change the rules.")
    if num_shards > 1:
        _check_sizes(model, plan, parameters, modules, num_shards)
    return plan


def _sort_flat(
    rules: ShardingRules, parameters: Mapping[str, Any], modules: Mapping[str, Any]
) -> tuple[ShardingRules, list[str]]:
    """Returns the rules with the flat ones moved to parameters or outputs, and those that match neither."""
    if not rules.flat:
        return rules, []
    of_parameters, of_outputs, unmatched = dict(rules.parameters), dict(rules.outputs), []
    for glob, axes in rules.flat.items():
        if any(compiled(glob).fullmatch(name) for name in parameters):
            check_axes(glob, axes, PARAMETER_AXES, None)
            of_parameters[glob] = axes
        elif any(compiled(_path_of(glob)[0]).fullmatch(name) for name in modules):
            of_outputs[glob] = axes
        else:
            unmatched.append(glob)
    return ShardingRules(parameters=of_parameters, outputs=of_outputs, strict=rules.strict), unmatched


def _matches(rules: Mapping[str, Any], names: Iterable[str]) -> Iterable[tuple[str, str, Any]]:
    """Yields each name with the first rule that matches it and the value of the rule."""
    patterns = [(compiled(glob), glob, value) for glob, value in rules.items()]
    for name in names:
        for pattern, glob, value in patterns:
            if pattern.fullmatch(name):
                yield name, glob, value
                break


def _path_of(glob: str) -> tuple[str, int | None]:
    """Splits `path[2]`, the third of several outputs, into path and number; the number is None for a single output."""
    path, bracket, number = glob.partition("[")
    if not bracket:
        return glob, None
    if not number.removesuffix("]").isdigit():
        raise ConfigError(f"model.sharding: {glob}: write one of several outputs as path[0], path[1] and so on.")
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
    """Returns the layout of each parameter; one with several names has the layout of its first name with a rule."""
    named = {}
    for name, glob, axes in _matches(rules.parameters, parameters):
        dims = parameters[name].dim()
        if axes and len(axes) != dims:
            shape = list(parameters[name].shape)
            raise ConfigError(
                f"model.sharding: {glob}: has {len(axes)} dims, but {name} has the shape {shape}. Use null or an axis "
                "for each dim."
            )
        named[name] = AxisLayout(axes or ((),) * dims, glob)
    by_identity: dict[int, AxisLayout] = {}
    for name, layout in named.items():
        earlier = by_identity.setdefault(id(parameters[name]), layout)
        if earlier.axes != layout.axes:
            raise ConfigError(
                f"model.sharding: {earlier.rule} and {layout.rule} differ for one tied parameter ({name}). "
                "Make them equal."
            )
    layouts = {}
    for name, parameter in parameters.items():
        found = by_identity.get(id(parameter)) or _adapter_layout(name, named, modules)
        layouts[name] = found or AxisLayout(((),) * parameter.dim())
    return layouts


def _adapter_layout(name: str, named: Mapping[str, AxisLayout], modules: Mapping[str, nn.Module]) -> AxisLayout | None:
    """Returns the layout of a LoRA adapter of a sharded weight: B by rows or A by columns, like the weight."""
    path, _, last = name.rpartition(".")
    weight = named.get(f"{path}.weight")
    if weight is None or last not in ("lora_a", "lora_b") or not isinstance(modules[path], nn.Linear):
        return None
    dim = 0 if last == "lora_b" else 1
    return AxisLayout(tuple(("tensor",) if weight.tensor_dim == dim == each else () for each in range(2)), weight.rule)


def _uneven(
    layouts: Mapping[str, AxisLayout],
    outputs: Mapping[str, Mapping[int | None, Axes]],
    parameters: Mapping[str, nn.Parameter],
    modules: Mapping[str, nn.Module],
    num_shards: int,
) -> frozenset[str]:
    """Returns the embeddings and heads whose vocabulary is sharded unevenly."""
    free = set()
    for path, module in modules.items():
        axes = outputs.get(path, {}).get(None, ())
        is_head = isinstance(module, nn.Linear) and bool(axes) and "tensor" in axes[-1]
        if is_head or isinstance(module, nn.Embedding):
            free |= {id(each) for each in module.parameters(recurse=False) if each.shape[0] % num_shards}
    return frozenset(name for name, each in parameters.items() if id(each) in free and layouts[name].tensor_dim == 0)


def _unmatched(
    rules: ShardingRules,
    parameters: Mapping[str, nn.Parameter],
    modules: Mapping[str, nn.Module],
    sizes: Mapping[str, int],
) -> list[str]:
    if rules.is_packaged or sizes.get("pipeline", 1) > 1:
        return []  # rules for all variants of a model, or for layers of another stage
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
    for name, parameter in parameters.items():
        if id(parameter) not in covered:
            missing.setdefault(id(parameter), name)
    return list(missing.values())


def _check_sizes(
    model: nn.Module,
    plan: ShardingPlan,
    parameters: Mapping[str, nn.Parameter],
    modules: Mapping[str, nn.Module],
    num_shards: int,
) -> None:
    """Rejects dims and numbers of heads that are not divisible by the tensor axis, and ambiguous parameters."""
    if all(layout.tensor_dim is None for layout in plan.layouts.values()):
        raise ConfigError(
            f"runtime.mesh: tensor is {num_shards}, but model.sharding shards no parameter along it, so every rank "
            "would compute the same. Set rules such as **.up_proj.weight: [tensor, null], or use the axis fsdp."
        )
    for name, layout in plan.layouts.items():
        dim, (path, _, _) = layout.tensor_dim, name.rpartition(".")
        if dim is None or name in plan.uneven:
            continue
        size = parameters[name].shape[dim]
        parent = modules[path.rpartition(".")[0]] if isinstance(modules[path], nn.Linear) else None
        head_size, count = getattr(parent, "head_size", None), plan.fused.get(path, 1)
        heads = size // head_size // count if isinstance(head_size, int) and size % (head_size * count) == 0 else None
        if heads is not None and heads % num_shards:
            raise ConfigError(
                f"{_setting_of(model, heads)} is {heads}, which {num_shards} tensor ranks cannot share "
                f"({name}). Use a tensor axis that divides {heads}, or another number of heads."
            )
        if size % (num_shards * count):
            raise ConfigError(
                f"model.sharding: {layout.rule}: dim {dim} of {name} {list(parameters[name].shape)} is not a "
                f"multiple of {num_shards} tensor ranks. Use another axis size, or another size of the model."
            )
    _reject_ambiguous(plan, modules)


def _setting_of(model: nn.Module, heads: int) -> str:
    settings = getattr(model, "settings", None)
    settings = settings if isinstance(settings, Mapping) else {}
    names = [name for name in ("num_heads", "num_kv_heads") if settings.get(name) == heads]
    return f"model.{names[0]}" if names else "the number of heads"


def _reject_ambiguous(plan: ShardingPlan, modules: Mapping[str, nn.Module]) -> None:
    """Rejects parameters without a rule between sharded layers, which may be used on full activations or on a shard."""
    for path, module in modules.items():
        weights = {child: plan.layouts.get(f"{_join(path, child)}.weight") for child, _ in module.named_children()}
        dims = {child: None if layout is None else layout.tensor_dim for child, layout in weights.items()}
        if not {0, 1} <= set(dims.values()):
            continue
        others = ["", *(child for child, dim in dims.items() if dim is None)]
        names = [
            _join(_join(path, child), last)
            for child in others
            for last, _ in module.get_submodule(child).named_parameters(recurse=False)
        ]
        for name in names:
            if plan.layouts[name].rule is None and name not in plan.on_parts:
                raise ConfigError(
                    f"model.sharding: {name} is between layers that are sharded along tensor, and has no rule. If "
                    "it is used on one rank's shard (such as its heads), list it under on_parts, so that its gradients "
                    "are summed; otherwise set a rule, such as [null]."
                )


def _join(path: str, child: str) -> str:
    return f"{path}.{child}" if path and child else path or child


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more
