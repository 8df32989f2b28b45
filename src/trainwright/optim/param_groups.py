"""Parameter groups: which settings of an optimizer apply to which parameters, and the valid values of settings.

Also the kinds of parameters, and a pipeline stage's description of the full model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from trainwright.config.problems import suggest
from trainwright.errors import ConfigError
from trainwright.models.names import as_globs, unmatched
from trainwright.optim.sharded import has_shards
from trainwright.parallel.pipeline import stages_of

HEAD_NAMES = frozenset({"lm_head", "head", "classifier", "score", "qa_outputs", "output_projection"})
"""Common names of the module that maps the last hidden state to the prediction."""

EMBEDDING_NAMES = frozenset({"wte", "wpe", "cls_token", "mask_token", "dist_token"})


def classify_parameters(model: nn.Module) -> dict[str, str]:
    """Returns the kind of every parameter, by name.

    - `vector`: fewer than two dims longer than 1: biases, gains, scales
    - `embedding`: the weight of an Embedding, or a bare parameter that is named like one; a head that is tied to an
      embedding is one too
    - `head`: the weight of a Linear whose name is one of HEAD_NAMES, or of the model's last Linear if there is none
    - `convolution`: the weight of a Conv1d, Conv2d or Conv3d
    - `matrix`: any other parameter of two dims
    - `tensor`: any other parameter
    """
    linears = dict(_weights_of(model, (nn.Linear,)))
    heads = [weight for name, weight in linears.items() if HEAD_NAMES.intersection(name.split("."))]
    known: dict[int, str] = {}
    for kind, weights in (
        ("matrix", list(linears.values())),
        ("convolution", [weight for _, weight in _weights_of(model, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]),
        ("head", heads or list(linears.values())[-1:]),
        ("embedding", [weight for _, weight in _weights_of(model, (nn.Embedding, nn.EmbeddingBag))]),
    ):
        known |= {id(weight): kind for weight in weights}  # the last kind applies
    kinds = {}
    for name, parameter in model.named_parameters():
        by_name = "tensor" if parameter.ndim > 2 else kind_by_name(name, parameter)
        kinds[name] = "vector" if _is_vector(parameter) else known.get(id(parameter), by_name)
    return kinds


def kind_by_name(name: str | None, parameter: torch.Tensor) -> str:
    """Guesses the kind from a name, if there is one, and the shape: four dims mean a convolution."""
    if _is_vector(parameter):
        return "vector"
    parts = () if name is None else tuple(name.split("."))
    if any("embed" in part or part in EMBEDDING_NAMES for part in parts):
        return "embedding"
    if HEAD_NAMES.intersection(parts):
        return "head"
    return {2: "matrix", 4: "convolution"}.get(parameter.ndim, "tensor")


def uses_muon(name: str | None, parameter: torch.Tensor, kinds: Mapping[str, str] | None) -> bool:
    """Returns True if Muon steps the parameter: by its attribute `no_muon` if it has one, else by its kind."""
    marked = getattr(parameter, "no_muon", None)
    if marked is not None:
        return not marked and parameter.ndim >= 2
    known = None if kinds is None or name is None else kinds.get(name)
    return (known or kind_by_name(name, parameter)) in ("matrix", "convolution")


def _weights_of(model: nn.Module, types: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None) if isinstance(module, types) else None
        if isinstance(weight, nn.Parameter):
            yield name, weight


def _is_vector(parameter: torch.Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) < 2


Origin = Callable[[str], object | None]
"""Returns the source location of a setting such as `trainer.optimizer.lr`, or None."""


def _reject(setting: str, problem: str, origin: Origin) -> NoReturn:
    raise ConfigError(f"{setting}: {problem}", where=origin(setting))


class _Range(NamedTuple):
    """The valid numbers of a setting: in words that follow "a number", and as a predicate, False for nan."""

    words: str
    holds: Callable[[float], bool]


_AT_LEAST_0 = _Range("of at least 0", lambda value: 0.0 <= value < math.inf)
_ABOVE_0 = _Range("above 0", lambda value: 0.0 < value < math.inf)
_BELOW_1 = _Range("from 0 to below 1", lambda value: 0.0 <= value < 1.0)
_COUNT = _Range("that is whole and at least 1", lambda value: 1 <= value < math.inf and value == int(value))

RANGES: Mapping[str, _Range] = {
    **dict.fromkeys(("lr", "adamw_lr", "weight_decay", "adamw_weight_decay"), _AT_LEAST_0),
    **dict.fromkeys(("eps", "adamw_eps"), _ABOVE_0),
    **dict.fromkeys(("betas", "adamw_betas", "momentum"), _BELOW_1),
    "ns_steps": _COUNT,
}
"""The valid values of settings of any optimizer; for a list, those of each number."""

_RATES = ("lr", "adamw_lr")

WORDS: Mapping[str, str] = {"master_weights": "stochastic"}
"""The string that a boolean setting also accepts."""


def reject_impossible(**settings: Any) -> None:
    """Rejects settings outside of RANGES by name. A rate of 0 is valid, as in torch."""
    for name, value in settings.items():
        problem = None if value is None or name not in RANGES else _range_problem(value, RANGES[name])
        if problem is not None:
            raise ConfigError(f"{name}: {problem}")


def check_settings(
    target: Callable[..., Any],
    settings: Mapping[str, Any],
    *,
    label: str,
    origin: Origin = lambda setting: None,
    provided: Iterable[str] = (),
) -> None:
    """Rejects invalid settings of an optimizer's section in the config; `label` is its dotted name.

    `provided` are the arguments that the builder passes itself. For the optimizers of torch and this package, values
    must have the form of their defaults; a custom optimizer may differ.
    """
    for name in provided:
        if name in settings:
            _reject(f"{label}.{name}", "is derived from the model and cannot be set in a run file. Remove it.", origin)
    defaults = {}
    with suppress(TypeError, ValueError):  # a signature that cannot be read
        parameters = inspect.signature(target).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    is_strict = getattr(target, "__module__", "").split(".")[0] in ("torch", "trainwright")
    _check_values(settings, defaults, label=label, origin=origin, has_strict_forms=is_strict)


def _check_values(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], *, label: str, origin: Origin, has_strict_forms: bool
) -> None:
    """Rejects values outside of RANGES or, with `has_strict_forms`, with another form than their default."""
    for name, value in settings.items():
        default = defaults.get(name)
        if value is None and default is None:
            continue
        problem = _form_problem(value, default, WORDS.get(name)) if has_strict_forms else None
        if problem is None and name in RANGES and not isinstance(default, str):
            problem = _range_problem(value, _ABOVE_0 if name in _RATES else RANGES[name])
            if problem is not None and name in _RATES and value == 0:
                problem += " To keep parameters fixed, use model.freeze."
        if problem is not None:
            _reject(f"{label}.{name}", problem, origin)


def is_number(value: object) -> bool:
    """Returns True for an int or a float, but not for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _range_problem(value: Any, known: _Range) -> str | None:
    if isinstance(value, list | tuple):
        # None in a list stands for a number that the optimizer derives (Adafactor's eps).
        is_valid = bool(value) and all(one is None or (is_number(one) and known.holds(one)) for one in value)
    else:
        number = float(value) if isinstance(value, Tensor) else value
        is_valid = is_number(number) and known.holds(number)
    form = "list of numbers" if isinstance(value, list | tuple) else "number"
    return None if is_valid else f"must be a {form} {known.words}, got {_shown(value)}."


def _form_problem(value: Any, default: Any, word: str | None = None) -> str | None:
    wanted = None
    if isinstance(default, tuple) and default:
        if not (isinstance(value, list | tuple) and len(value) == len(default)):
            wanted = f"a list of {len(default)}"
        elif all(map(is_number, default)) and not all(map(is_number, value)):
            wanted = f"a list of {len(default)} numbers"
    elif isinstance(default, bool) and not isinstance(value, bool) and (word is None or value != word):
        wanted = "true or false" if word is None else f"true, false or {word}"
    elif is_number(default) and not is_number(value):
        wanted = "a number"
    elif isinstance(default, str) and not isinstance(value, str):
        wanted = "text"
    return None if wanted is None else f"must be {wanted}, got {_shown(value)}."


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value!r}"
    return repr(list(value) if isinstance(value, tuple) else value)


@dataclass(frozen=True)
class WholeModel:
    """A pipeline stage's description of the full model; build/parallelize.py sets it as the attribute `whole`."""

    parameters: Mapping[str, Tensor]
    """The parameters under all of their names, on the meta device; a tied one is one object."""
    kinds: Mapping[str, str]
    """What `classify_parameters` returns for the full model."""
    stages: Mapping[str, tuple[int, ...]]
    """The stages that have each of the parameters."""
    num_stages: int


def describe_whole(model: nn.Module, num_stages: int) -> WholeModel:
    """Describes a model before it is divided into stages."""
    known: dict[int, Tensor] = {}
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in known:
            known[id(parameter)] = _stand_in(parameter, torch.device("meta"))
        parameters[name] = known[id(parameter)]
    return WholeModel(parameters, classify_parameters(model), stages_of(model, num_stages), num_stages)


def whole_of(model: nn.Module) -> WholeModel | None:
    """Returns a stage's description of the full model; None for a model without stages."""
    whole = getattr(model, "whole", None)
    return whole if isinstance(whole, WholeModel) else None


def parameters_of_all_stages(model: nn.Module) -> dict[str, Tensor]:
    """Returns the full model's parameters under all of their names: this rank's, and placeholders for the others."""
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    whole = whole_of(model)
    if whole is None:
        return own
    device = next((each.device for each in own.values()), torch.device("cpu"))
    # On a stage, a tied weight may lack one of its names; it is used under all of them.
    objects = {id(whole.parameters[name]): parameter for name, parameter in own.items() if name in whole.parameters}
    for each in whole.parameters.values():
        if id(each) not in objects:
            objects[id(each)] = _stand_in(each, device)
    return {**{name: objects[id(each)] for name, each in whole.parameters.items()}, **own}


def drop_other_stages(optimizer: Any, model: nn.Module) -> None:
    """Removes the parameters of other stages from an optimizer, in place."""
    own = {id(parameter) for parameter in model.parameters()}
    optimizer.device_of_stage = next((parameter.device for parameter in model.parameters()), None)
    for group in optimizer.param_groups:
        is_own = [id(parameter) in own for parameter in group["params"]]
        for parameter, stays in zip(group["params"], is_own, strict=True):
            if not stays:
                optimizer.state.pop(parameter, None)
        for key in ("params", "param_names"):
            if key in group:
                # In place: an optimizer may keep a reference to the list.
                group[key][:] = [each for each, stays in zip(group[key], is_own, strict=True) if stays]


def first_idle_stage(model: nn.Module, trainable: Mapping[str, Tensor]) -> int | None:
    """Returns the first stage that has none of the parameters; None if each has some or there are no stages."""
    whole = whole_of(model)
    if whole is None:
        return None
    busy = {stage for name in trainable for stage in whole.stages.get(name, ())}
    return next((stage for stage in range(whole.num_stages) if stage not in busy), None)


def _stand_in(parameter: Tensor, device: torch.device) -> Tensor:
    """Returns a parameter of the same form and attributes (such as `lr_scale`) with memory for one value at most."""
    value = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    stand_in = nn.Parameter(value, requires_grad=parameter.requires_grad)
    stand_in.__dict__.update(vars(parameter))
    return stand_in


MOST_SHOWN = 4
_MARKS = ("lr_scale", "no_weight_decay")


class GroupRule(NamedTuple):
    """One entry of `groups`: globs over parameter names, and the settings of the matching parameters."""

    globs: tuple[str, ...]
    settings: dict[str, Any]


class _GroupKey(NamedTuple):
    """Parameters with the same key are one group. `rule` is None for parameters that no rule matches."""

    rule: int | None
    lr_scale: float
    no_weight_decay: bool


def make_optimizer(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    named_parameters: Mapping[str, Tensor],
    groups: Iterable[Mapping[str, Any]] = (),
    *,
    label: str = "trainer.optimizer",
    origin: Origin = lambda setting: None,
    others: Mapping[str, str] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """Creates an optimizer over groups: `make` is called once, with an argument `params` as for torch's optimizers.

    `groups` is as in a config, below the section `label`; `origin` returns the source location of a setting. `others`
    maps names of parameters that this optimizer does not own to the reason (see `describe_unowned`).
    """
    rules = read_rules(groups, label=f"{label}.groups", origin=origin)
    param_groups = make_groups(named_parameters, rules, label=f"{label}.groups", origin=origin, others=others)
    try:
        optimizer = make(param_groups)
    except ConfigError as error:
        if error.where is not None:
            raise
        raise type(error)(f"{label}: {error.problem}", where=origin(label)) from error
    kind, defaults = type(optimizer).__name__, optimizer.defaults
    for number, rule in enumerate(rules):
        entry = f"{label}.groups.{number}"
        for key in rule.settings:
            if key not in defaults:
                hint = suggest(key, defaults)
                _reject(f"{entry}.{key}", f"{kind} has no such setting for a group. {hint}", origin)
        _check_values(rule.settings, defaults, label=entry, origin=origin, has_strict_forms=True)
    lacks_shards = isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad))  # these fused steps fail with DTensors
    is_fused = lacks_shards and any(group["fused"] for group in optimizer.param_groups)
    if is_fused and has_shards(optimizer.param_groups):
        problem = f"torch's fused {kind} cannot step sharded parameters. Remove it, or use adamw."
        _reject(f"{label}.fused", problem, origin)
    is_quantized = type(optimizer).__module__.startswith("torchao.")
    if is_quantized and has_shards(optimizer.param_groups):
        problem = f"{kind} has quantized state, which cannot be saved in shards. Use runtime.mesh.replicate, or adamw."
        _reject(label, problem, origin)
    for group in optimizer.param_groups:
        _apply_marks(group, optimizer, label=label, origin=origin)
    return optimizer


def reject_other_than_matrices(owned: Mapping[str, Tensor], *, label: str, where: object | None) -> None:
    """Rejects parameters that torch's Muon does not support, with what to do: it steps matrices only."""
    others = [name for name, parameter in owned.items() if parameter.ndim != 2]
    if others:
        more = f" and {len(others) - MOST_SHOWN} more" if len(others) > MOST_SHOWN else ""
        raise ConfigError(
            f"{label}: torch's Muon steps matrices only, but these have other dims: {', '.join(others[:MOST_SHOWN])}"
            f"{more}. Give it the matrices of the hidden layers, and the rest to another optimizer: "
            'trainer.optimizers: {muon: {optimizer: {type: "torch.optim:Muon", lr: 1e-3}, match: "*layers*.weight"}, '
            'rest: {optimizer: {type: adamw, lr: 1e-3}, match: ["*.bias", "embed*"]}}. Or use type: muon, which does '
            "this itself.",
            where=where,
        )


def describe_unowned(model: nn.Module, owned: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the names of a model's parameters that an optimizer over `owned` does not have, each with the reason."""
    names = {id(parameter): name for name, parameter in owned.items()}
    reasons = {}
    for name, parameter in parameters_of_all_stages(model).items():
        if name in owned:
            continue
        if id(parameter) in names:
            reasons[name] = f"is tied to {names[id(parameter)]} and goes by that name"
        elif not parameter.requires_grad:
            reasons[name] = "is frozen"
        else:
            reasons[name] = "belongs to another optimizer"
    return reasons


def read_rules(groups: Iterable[Mapping[str, Any]], *, label: str, origin: Origin) -> list[GroupRule]:
    """Reads the entries of `groups` and rejects those without a match or a setting."""
    if isinstance(groups, (Mapping, str)) or not isinstance(groups, Iterable):
        _reject(label, 'must be a list such as [{match: "*.bias", weight_decay: 0}].', origin)
    rules = []
    for number, given in enumerate(groups):
        entry = f"{label}.{number}"
        if not isinstance(given, Mapping) or "match" not in given:
            example = '{match: "*.bias", weight_decay: 0}'
            _reject(entry, f"must be a mapping with match, such as {example}; got {given!r}.", origin)
        settings = {key: value for key, value in given.items() if key != "match"}
        if not settings:
            _reject(entry, "sets nothing. Add a setting, such as weight_decay: 0.", origin)
        for key in ("params", "param_names", *_MARKS):
            if key in settings:
                _reject(f"{entry}.{key}", "is not a setting of a group. Remove it.", origin)
        try:
            globs = as_globs(f"{entry}.match", given["match"])
        except ConfigError as error:
            raise ConfigError(error.problem, where=origin(f"{entry}.match")) from error
        rules.append(GroupRule(globs, settings))
    return rules


def make_groups(
    named_parameters: Mapping[str, Tensor],
    rules: Sequence[GroupRule] = (),
    *,
    label: str = "groups",
    origin: Origin = lambda setting: None,
    others: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Returns torch's parameter groups with their names: every parameter is in exactly one.

    Parameters that no rule matches come first, because the first group's rate is logged. Rejects a glob that matches
    nothing, or only parameters that earlier rules match; `others` has the reasons why a parameter is missing.
    """
    members: dict[_GroupKey, list[str]] = {}
    for name, parameter in named_parameters.items():
        matching = (n for n, rule in enumerate(rules) if any(fnmatchcase(name, glob) for glob in rule.globs))
        scale = getattr(parameter, "lr_scale", 1.0)
        if not is_number(scale) or not 0.0 <= scale < math.inf:
            problem = f"{name}.lr_scale is {scale!r}. Use a number of at least 0."
            raise ConfigError(problem, where=origin(label))
        no_weight_decay = bool(getattr(parameter, "no_weight_decay", False))
        members.setdefault(_GroupKey(next(matching, None), float(scale), no_weight_decay), []).append(name)
    for number, rule in enumerate(rules):
        for glob in rule.globs:
            if not any(fnmatchcase(name, glob) for name in named_parameters):
                _reject(f"{label}.{number}.match", _unmatched_problem(glob, list(named_parameters), others), origin)
        if all(key.rule != number for key in members):
            problem = (
                f"has no effect, because earlier groups match all of {', '.join(rule.globs)}. The first match wins: "
                "move it up, or remove it."
            )
            _reject(f"{label}.{number}", problem, origin)

    def order(key: _GroupKey) -> tuple[int, bool, float]:
        return (-1 if key.rule is None else key.rule, key.no_weight_decay, abs(key.lr_scale - 1.0))

    groups = []
    for key in sorted(members, key=order):
        names = members[key]
        group: dict[str, Any] = {"params": [named_parameters[name] for name in names], "param_names": names}
        group |= {} if key.rule is None else rules[key.rule].settings
        # Their effect depends on the optimizer's own settings: see _apply_marks.
        group |= {} if key.lr_scale == 1.0 else {"lr_scale": key.lr_scale}
        group |= {"no_weight_decay": True} if key.no_weight_decay else {}
        groups.append(group)
    return groups


def _unmatched_problem(glob: str, names: list[str], others: Mapping[str, str]) -> str:
    found = [f"{name} {reason}" for name, reason in others.items() if fnmatchcase(name, glob)]
    if not found:
        return unmatched(glob, names, "parameter")
    more = f", and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
    return (
        f"{glob!r} matches no parameter of this optimizer: {', '.join(found[:MOST_SHOWN])}{more}. "
        "Change the glob, or remove the group."
    )


def _apply_marks(group: dict[str, Any], optimizer: torch.optim.Optimizer, *, label: str, origin: Origin) -> None:
    """Applies the parameter attributes of a group to its rate and decay, and converts lists from YAML to torch's
    tuples."""
    scale, no_weight_decay = group.pop("lr_scale", 1.0), group.pop("no_weight_decay", False)
    for key, default in optimizer.defaults.items():
        if isinstance(default, tuple) and isinstance(group[key], list):
            group[key] = tuple(group[key])
    if no_weight_decay and "weight_decay" in group:
        group["weight_decay"] = 0.0
    if scale != 1.0:
        if not isinstance(group.get("lr"), (int, float, Tensor)):
            name, kind = group["param_names"][0], type(optimizer).__name__
            _reject(label, f"{name} has an lr_scale, but {kind} has no lr to scale.", origin)
        group["lr"] = group["lr"] * scale
