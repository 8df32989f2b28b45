"""Parameter groups: which settings of an optimizer apply to which parameters, and which values settings can have."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.config.problems import suggest
from trainwright.errors import ConfigError
from trainwright.models.from_config import freeze
from trainwright.models.names import as_globs, unmatched
from trainwright.optim.sharded import optimizes_parts
from trainwright.parallel.pipeline import stages_of

HEAD_NAMES = frozenset({"lm_head", "head", "classifier", "score", "qa_outputs", "output_projection"})
"""Modules that turn the last hidden state into what is predicted, as models of the field name them."""

EMBEDDING_NAMES = frozenset({"wte", "wpe", "cls_token", "mask_token", "dist_token"})

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def classify_parameters(model: nn.Module) -> dict[str, str]:
    """Returns the kind of every parameter, by name.

    - `vector`: fewer than two dims longer than 1: biases, gains, scales
    - `embedding`: the weight of an Embedding, or a bare parameter that is named like one; a head that is tied to an
      embedding is one too
    - `head`: the weight of a Linear whose name is one of HEAD_NAMES; of the model's last Linear where there is none
    - `convolution`: the weight of a Conv1d, Conv2d or Conv3d
    - `matrix`: any other parameter of two dims
    - `tensor`: any other parameter
    """
    embeddings = {id(weight) for _, weight in _weights_of(model, _EMBEDDINGS)}
    convolutions = {id(weight) for _, weight in _weights_of(model, _CONVOLUTIONS)}
    linears = dict(_weights_of(model, (nn.Linear,)))
    named = {id(weight) for name, weight in linears.items() if HEAD_NAMES.intersection(name.split("."))}
    heads = named or {id(weight) for weight in list(linears.values())[-1:]}
    inner = {id(weight) for weight in linears.values()} - heads
    kinds = {}
    for name, parameter in model.named_parameters():
        if _is_vector(parameter):
            kinds[name] = "vector"
        elif id(parameter) in embeddings:
            kinds[name] = "embedding"
        elif id(parameter) in heads:
            kinds[name] = "head"
        elif id(parameter) in convolutions:
            kinds[name] = "convolution"
        elif id(parameter) in inner:
            kinds[name] = "matrix"
        else:
            kinds[name] = "tensor" if parameter.ndim > 2 else kind_by_name(name, parameter)
    return kinds


def kind_by_name(name: str | None, parameter: torch.Tensor) -> str:
    """Returns the kind as far as a name and a shape tell: four dims are taken for a convolution. None is no name."""
    if _is_vector(parameter):
        return "vector"
    parts = () if name is None else tuple(name.split("."))
    if any("embed" in part or part in EMBEDDING_NAMES for part in parts):
        return "embedding"
    if HEAD_NAMES.intersection(parts):
        return "head"
    return {2: "matrix", 4: "convolution"}.get(parameter.ndim, "tensor")


def uses_muon(name: str | None, parameter: torch.Tensor, kinds: Mapping[str, str] | None) -> bool:
    """Is the parameter Muon's? Its attribute `no_muon` decides where it has one, else its kind."""
    known = None if kinds is None or name is None else kinds.get(name)
    kind = known if known is not None else kind_by_name(name, parameter)
    marked = getattr(parameter, "no_muon", None)
    if marked is not None:
        return not marked and parameter.ndim >= 2
    return kind in ("matrix", "convolution")


def _weights_of(model: nn.Module, types: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None) if isinstance(module, types) else None
        if isinstance(weight, nn.Parameter):
            yield name, weight


def _is_vector(parameter: torch.Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) < 2


Origin = Callable[[str], object | None]
"""Where a setting such as `trainer.optimizer.lr` was written, or None."""


class _Range(NamedTuple):
    """The numbers that a setting can be: in words that follow "a number", and as a test, which nan fails."""

    words: str
    holds: Callable[[float], bool]


_AT_LEAST_0 = _Range("of at least 0", lambda value: 0.0 <= value < math.inf)
_ABOVE_0 = _Range("above 0", lambda value: 0.0 < value < math.inf)
_BELOW_1 = _Range("from 0 to below 1", lambda value: 0.0 <= value < 1.0)
_COUNT = _Range("that is whole and at least 1", lambda value: 1 <= value < math.inf and value == int(value))

RANGES: Mapping[str, _Range] = {
    "lr": _AT_LEAST_0,
    "adamw_lr": _AT_LEAST_0,
    "weight_decay": _AT_LEAST_0,
    "adamw_weight_decay": _AT_LEAST_0,
    "eps": _ABOVE_0,
    "adamw_eps": _ABOVE_0,
    "betas": _BELOW_1,
    "adamw_betas": _BELOW_1,
    "momentum": _BELOW_1,
    "ns_steps": _COUNT,
}
"""What a setting can be, whosever optimizer it is; of a list each number."""

_RATES = ("lr", "adamw_lr")


def reject_impossible(**settings: Any) -> None:
    """Rejects what cannot be, by name, of the settings that RANGES has. A rate of 0 passes, as it does in torch."""
    for name, value in settings.items():
        problem = None if value is None or name not in RANGES else _problem(value, RANGES[name])
        if problem is not None:
            raise ConfigError(f"{name}: {problem}")


def check_settings(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], *, label: str, origin: Origin, has_strict_forms: bool
) -> None:
    """Rejects what cannot be in a run file, by its place there: `label` is what the settings stand below.

    `defaults` are the optimizer's. Where one is None, None is a value like any other. `has_strict_forms` is for
    optimizers whose values have their defaults' form, as torch's have and a user's need not.
    """
    for name, value in settings.items():
        default = defaults.get(name)
        if value is None and default is None:
            continue
        problem = _form_problem(value, default) if has_strict_forms else None
        if problem is None and name in RANGES and not isinstance(default, str):
            problem = _problem(value, _ABOVE_0 if name in _RATES else RANGES[name])
            if problem is not None and name in _RATES and value == 0:
                problem += " Parameters that are to stay as they are go into model.freeze."
        if problem is not None:
            raise ConfigError(f"{label}.{name}: {problem}", where=origin(f"{label}.{name}"))


def reject_provided(settings: Mapping[str, Any], provided: Iterable[str], *, label: str, origin: Origin) -> None:
    """Rejects what the builder itself gives to an optimizer: in a run file it would take the place of that."""
    for name in provided:
        if name in settings:
            problem = "is worked out from the model, and cannot be set in a run file. Remove it."
            raise ConfigError(f"{label}.{name}: {problem}", where=origin(f"{label}.{name}"))


def defaults_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the defaults of an optimizer's constructor, as far as it shows them. A `()` says nothing of a form."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def has_strict_forms(target: Callable[..., Any]) -> bool:
    """Is this one of torch's optimizers or ours, whose defaults say what form a value has?"""
    return getattr(target, "__module__", "").split(".")[0] in ("torch", "trainwright")


def is_number(value: object) -> bool:
    """Is this a number, which true and false are not?"""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _problem(value: Any, known: _Range) -> str | None:
    if isinstance(value, list | tuple):
        # None in a list is a number that the optimizer works out by itself (Adafactor's eps).
        if value and all(one is None or (is_number(one) and known.holds(one)) for one in value):
            return None
        return f"must be a list of numbers {known.words}, got {_shown(value)}."
    number = float(value) if isinstance(value, Tensor) else value
    return (
        None if is_number(number) and known.holds(number) else f"must be a number {known.words}, got {_shown(value)}."
    )


def _form_problem(value: Any, default: Any) -> str | None:
    if isinstance(default, tuple) and default:
        if not (isinstance(value, list | tuple) and len(value) == len(default)):
            return f"must be a list of {len(default)}, got {_shown(value)}."
        if all(map(is_number, default)) and not all(map(is_number, value)):
            return f"must be a list of {len(default)} numbers, got {_shown(value)}."
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            return f"must be true or false, got {_shown(value)}."
    elif is_number(default) and not is_number(value):
        return f"must be a number, got {_shown(value)}."
    elif isinstance(default, str) and not isinstance(value, str):
        return f"must be text, got {_shown(value)}."
    return None


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value!r}"
    return repr(list(value) if isinstance(value, tuple) else value)


@dataclass(frozen=True)
class WholeModel:
    """What a stage knows of the whole model; `placing.py` leaves it on the model as `whole`."""

    parameters: Mapping[str, Tensor]
    """The parameters under all of their names, on the meta device; a tied one is one object."""
    kinds: Mapping[str, str]
    """What `classify_parameters` says of the whole model."""
    stages: Mapping[str, tuple[int, ...]]
    """The stages that have each of the parameters."""
    num_stages: int


def describe_whole(model: nn.Module, num_stages: int) -> WholeModel:
    """Describes a model that is still whole."""
    known: dict[int, Tensor] = {}
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in known:
            known[id(parameter)] = _stand_in(parameter, torch.device("meta"))
        parameters[name] = known[id(parameter)]
    return WholeModel(parameters, classify_parameters(model), stages_of(model, num_stages), num_stages)


def whole_of(model: nn.Module) -> WholeModel | None:
    """Returns what a stage knows of the whole model; None for a model that is no stage."""
    whole = getattr(model, "whole", None)
    return whole if isinstance(whole, WholeModel) else None


def parameters_of_all_stages(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of the whole model under all of their names, this rank's and stand-ins for the others."""
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    whole = whole_of(model)
    if whole is None:
        return own
    device = next((each.device for each in own.values()), torch.device("cpu"))
    # A tied weight of one stage may have lost one of its names there: it is this rank's under all of them.
    objects = {id(whole.parameters[name]): parameter for name, parameter in own.items() if name in whole.parameters}
    for each in whole.parameters.values():
        if id(each) not in objects:
            objects[id(each)] = _stand_in(each, device)
    return {**{name: objects[id(each)] for name, each in whole.parameters.items()}, **own}


def take_out_others(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Takes the parameters of other stages out of an optimizer, in place."""
    own = {id(parameter) for parameter in model.parameters()}
    told: Any = optimizer
    told.device_of_stage = next((parameter.device for parameter in model.parameters()), None)
    for group in optimizer.param_groups:
        is_own = [id(parameter) in own for parameter in group["params"]]
        for parameter, stays in zip(group["params"], is_own, strict=True):
            if not stays:
                optimizer.state.pop(parameter, None)
        for key in ("params", "param_names"):
            if key in group:
                # In place, for an optimizer may hold on to the list.
                group[key][:] = [each for each, stays in zip(group[key], is_own, strict=True) if stays]


def first_idle_stage(model: nn.Module, trainable: Mapping[str, Tensor]) -> int | None:
    """Returns the first stage that has none of the parameters; None where each has some, or there are no stages."""
    whole = whole_of(model)
    if whole is None:
        return None
    busy = {stage for name in trainable for stage in whole.stages.get(name, ())}
    return next((stage for stage in range(whole.num_stages) if stage not in busy), None)


def _stand_in(parameter: Tensor, device: torch.device) -> Tensor:
    """Returns a parameter of the same form and marks (`lr_scale` and the like) that holds one value at most."""
    value = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    made: Any = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for mark, given in vars(parameter).items():
        setattr(made, mark, given)
    return made  # type: ignore[no-any-return]  # setattr is for any object


MOST_SHOWN = 4
_MARKS = ("lr_scale", "no_weight_decay")


class GroupRule(NamedTuple):
    """One entry of `groups`: globs over parameter names, and the settings of what they match."""

    globs: tuple[str, ...]
    settings: dict[str, Any]


class _GroupKey(NamedTuple):
    """Parameters with the same place are one group. `rule` is None for what no rule matches."""

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
    """Makes an optimizer over groups: `make` is called once, with what torch's optimizers take as `params`.

    `groups` is as in a config; `label` is where it stands there, and `origin` says of what is below it in which line
    it was written, for errors. `others` are names that are not this optimizer's, and why (see `names_of_others`).
    """
    rules = read_rules(groups, label=f"{label}.groups", origin=origin)
    made_of = make_groups(named_parameters, rules, label=f"{label}.groups", origin=origin, others=others)
    try:
        optimizer = make(made_of)
    except ConfigError as error:
        if error.where is not None:
            raise
        raise type(error)(f"{label}: {error.problem}", where=origin(label)) from error
    _check_rules(rules, optimizer, label=f"{label}.groups", origin=origin)
    _reject_fused(optimizer, label=label, origin=origin)
    for group in optimizer.param_groups:
        _settle(group, optimizer, label=label, where=origin(label))
    return optimizer


def names_of_others(model: nn.Module, owned: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the names of a model's parameters that an optimizer over `owned` does not have, each with the reason."""
    return reasons_of_others(dict(model.named_parameters(remove_duplicate=False)), owned)


def reasons_of_others(parameters: Mapping[str, Tensor], owned: Mapping[str, Tensor]) -> dict[str, str]:
    """Does the same for parameters under all of their names, wherever they come from."""
    names = {id(parameter): name for name, parameter in owned.items()}
    reasons = {}
    for name, parameter in parameters.items():
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
    """Reads the entries of `groups` and rejects those that match or set nothing by their form."""
    where = origin(label)
    if isinstance(groups, (Mapping, str)) or not isinstance(groups, Iterable):
        raise ConfigError(f'{label}: must be a list such as [{{match: "*.bias", weight_decay: 0}}].', where=where)
    rules = []
    for number, entry in enumerate(groups):
        where = origin(f"{label}.{number}")
        if not isinstance(entry, Mapping) or "match" not in entry:
            raise ConfigError(
                f'{label}.{number}: must be a mapping with match, such as {{match: "*.bias", weight_decay: 0}}; '
                f"got {entry!r}.",
                where=where,
            )
        settings = {key: value for key, value in entry.items() if key != "match"}
        if not settings:
            raise ConfigError(f"{label}.{number}: sets nothing. Add a setting, such as weight_decay: 0.", where=where)
        for key in ("params", "param_names", *_MARKS):
            if key in settings:
                raise ConfigError(f"{label}.{number}.{key}: is not a setting of a group. Remove it.", where=where)
        rules.append(GroupRule(_globs(entry["match"], f"{label}.{number}.match", origin), settings))
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

    What no rule matches comes first, because the first group's rate is the one that is logged. A glob that matches
    nothing, or nothing that an earlier rule has left, is rejected; `others` says why a parameter is not here.
    """
    members: dict[_GroupKey, list[str]] = {}
    for name, parameter in named_parameters.items():
        rule = next((n for n, each in enumerate(rules) if _is_matched(name, each)), None)
        place = _GroupKey(
            rule, _lr_scale(name, parameter, origin(label)), bool(getattr(parameter, "no_weight_decay", False))
        )
        members.setdefault(place, []).append(name)
    _reject_unmatched(rules, list(named_parameters), others, label, origin)
    _reject_idle(rules, {place.rule for place in members}, label, origin)
    made = []
    for place in sorted(members, key=_order):
        names = members[place]
        group: dict[str, Any] = {"params": [named_parameters[name] for name in names], "param_names": names}
        group |= {} if place.rule is None else rules[place.rule].settings
        # How these two act is known once the optimizer's own settings are: see _settle.
        group |= {} if place.lr_scale == 1.0 else {"lr_scale": place.lr_scale}
        group |= {"no_weight_decay": True} if place.no_weight_decay else {}
        made.append(group)
    return made


def disable_untrainable_params(model: nn.Module, globs: Any = ()) -> list[str]:
    """Freezes what the globs match and what the model's own `disable_untrainable_params()` freezes, if it has one.

    Returns the names of the parameters that this froze, in the model's order. Call it before an optimizer is made.
    """
    before = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = getattr(model, "disable_untrainable_params", None)
    if callable(own):
        own()
    freeze(model, globs)
    return [name for name, parameter in model.named_parameters() if name in before and not parameter.requires_grad]


def _is_matched(name: str, rule: GroupRule) -> bool:
    return any(fnmatchcase(name, glob) for glob in rule.globs)


def _order(place: _GroupKey) -> tuple[int, bool, float]:
    return (-1 if place.rule is None else place.rule, place.no_weight_decay, abs(place.lr_scale - 1.0))


def _lr_scale(name: str, parameter: Tensor, where: object | None) -> float:
    scale = getattr(parameter, "lr_scale", 1.0)
    if not is_number(scale) or not 0.0 <= scale < math.inf:
        raise ConfigError(f"{name}.lr_scale is {scale!r}. Use a number of at least 0.", where=where)
    return float(scale)


def _globs(given: Any, label: str, origin: Origin) -> tuple[str, ...]:
    try:
        return as_globs(label, given)
    except ConfigError as error:
        raise ConfigError(error.problem, where=origin(label)) from error


def _reject_unmatched(
    rules: Sequence[GroupRule], names: list[str], others: Mapping[str, str], label: str, origin: Origin
) -> None:
    """Rejects a glob that matches no parameter of the optimizer, and says so if it matches others."""
    for number, rule in enumerate(rules):
        for glob in rule.globs:
            if any(fnmatchcase(name, glob) for name in names):
                continue
            place = f"{label}.{number}.match"
            found = [f"{name} {reason}" for name, reason in others.items() if fnmatchcase(name, glob)]
            problem = unmatched(glob, names, "parameter")
            if found:
                more = f", and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
                problem = (
                    f"{glob!r} matches no parameter of this optimizer: {', '.join(found[:MOST_SHOWN])}{more}. "
                    "Change the glob, or remove the group."
                )
            raise ConfigError(f"{place}: {problem}", where=origin(place))


def _reject_idle(rules: Sequence[GroupRule], used: set[int | None], label: str, origin: Origin) -> None:
    for number, rule in enumerate(rules):
        if number not in used:
            raise ConfigError(
                f"{label}.{number}: has no effect, for earlier groups match all of {', '.join(rule.globs)}. The first "
                "match wins: move it up, or remove it.",
                where=origin(f"{label}.{number}"),
            )


def _check_rules(rules: Sequence[GroupRule], optimizer: torch.optim.Optimizer, *, label: str, origin: Origin) -> None:
    for number, rule in enumerate(rules):
        for key in rule.settings:
            if key not in optimizer.defaults:
                raise ConfigError(
                    f"{label}.{number}.{key}: {type(optimizer).__name__} has no such setting for a group. "
                    f"{suggest(key, optimizer.defaults)}",
                    where=origin(f"{label}.{number}.{key}"),
                )
        check_settings(
            rule.settings,
            optimizer.defaults,
            label=f"{label}.{number}",
            origin=origin,
            has_strict_forms=True,
        )


def _reject_fused(optimizer: torch.optim.Optimizer, *, label: str, origin: Origin) -> None:
    """Rejects torch's fused steps that know no split parameters: they would fail in the first update."""
    knows_parts = not isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad))
    if not knows_parts and optimizes_parts(optimizer) and any(group["fused"] for group in optimizer.param_groups):
        raise ConfigError(
            f"{label}.fused: torch's fused {type(optimizer).__name__} cannot step parameters that are split over "
            "ranks. Remove it, or use adamw.",
            where=origin(f"{label}.fused"),
        )


def _settle(group: dict[str, Any], optimizer: torch.optim.Optimizer, *, label: str, where: object | None) -> None:
    """Turns the marks of a group into its rate and decay, and lists from YAML into the tuples that torch has."""
    scale, no_weight_decay = group.pop("lr_scale", 1.0), group.pop("no_weight_decay", False)
    for key, default in optimizer.defaults.items():
        if isinstance(default, tuple) and isinstance(group[key], list):
            group[key] = tuple(group[key])
    if no_weight_decay and "weight_decay" in group:
        group["weight_decay"] = 0.0
    if scale != 1.0:
        if not isinstance(group.get("lr"), (int, float, Tensor)):
            name, kind = group["param_names"][0], type(optimizer).__name__
            raise ConfigError(f"{label}: {name} has an lr_scale, but {kind} has no lr to scale.", where=where)
        group["lr"] = group["lr"] * scale
