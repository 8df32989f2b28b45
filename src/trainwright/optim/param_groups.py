"""Parameter groups: which settings of an optimizer hold for which parameters.

    {type: adamw, lr: 1e-3, groups: [{match: "*.bias", weight_decay: 0}, {match: ["*norm*"], lr: 1e-4}]}

Of the rules under `groups` the first that matches a parameter's name wins; what none matches has the optimizer's own
settings. Two attributes of a parameter are respected besides: `lr_scale` multiplies its rate, `no_weight_decay` (when
true) sets its decay to 0, whatever a rule says. A schedule multiplies each group's rate (loop/update.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.config.problems import suggest
from trainwright.errors import ConfigError
from trainwright.models.freeze import freeze
from trainwright.models.names import as_globs, unmatched
from trainwright.optim.parts import optimizes_parts
from trainwright.optim.settings import Origin, check_settings, is_number

MOST_SHOWN = 4
_MARKS = ("lr_scale", "no_weight_decay")


class Rule(NamedTuple):
    """One entry of `groups`: globs over parameter names, and the settings of what they match."""

    globs: tuple[str, ...]
    settings: dict[str, Any]


class _Place(NamedTuple):
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
    _refuse_fused(optimizer, label=label, origin=origin)
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


def read_rules(groups: Iterable[Mapping[str, Any]], *, label: str, origin: Origin) -> list[Rule]:
    """Reads the entries of `groups` and refuses those that match or set nothing by their form."""
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
        rules.append(Rule(_globs(entry["match"], f"{label}.{number}.match", origin), settings))
    return rules


def make_groups(
    named_parameters: Mapping[str, Tensor],
    rules: Sequence[Rule] = (),
    *,
    label: str = "groups",
    origin: Origin = lambda setting: None,
    others: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Returns torch's parameter groups with their names: every parameter is in exactly one.

    What no rule matches comes first, because the first group's rate is the one that is logged. A glob that matches
    nothing, or nothing that an earlier rule has left, is refused; `others` says why a parameter is not here.
    """
    members: dict[_Place, list[str]] = {}
    for name, parameter in named_parameters.items():
        rule = next((n for n, each in enumerate(rules) if _is_matched(name, each)), None)
        place = _Place(
            rule, _lr_scale(name, parameter, origin(label)), bool(getattr(parameter, "no_weight_decay", False))
        )
        members.setdefault(place, []).append(name)
    _refuse_unmatched(rules, list(named_parameters), others, label, origin)
    _refuse_idle(rules, {place.rule for place in members}, label, origin)
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


def _is_matched(name: str, rule: Rule) -> bool:
    return any(fnmatchcase(name, glob) for glob in rule.globs)


def _order(place: _Place) -> tuple[int, bool, float]:
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


def _refuse_unmatched(
    rules: Sequence[Rule], names: list[str], others: Mapping[str, str], label: str, origin: Origin
) -> None:
    """Refuses a glob that matches no parameter of the optimizer, and says so if it matches others."""
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


def _refuse_idle(rules: Sequence[Rule], used: set[int | None], label: str, origin: Origin) -> None:
    for number, rule in enumerate(rules):
        if number not in used:
            raise ConfigError(
                f"{label}.{number}: has no effect, for earlier groups match all of {', '.join(rule.globs)}. The first "
                "match wins: move it up, or remove it.",
                where=origin(f"{label}.{number}"),
            )


def _check_rules(rules: Sequence[Rule], optimizer: torch.optim.Optimizer, *, label: str, origin: Origin) -> None:
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


def _refuse_fused(optimizer: torch.optim.Optimizer, *, label: str, origin: Origin) -> None:
    """Refuses torch's fused steps that know no split parameters: they would fail in the first update."""
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
