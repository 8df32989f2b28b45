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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.config.problems import suggest
from trainwright.errors import ConfigError
from trainwright.models.freeze import freeze
from trainwright.models.names import as_globs, unmatched

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
    where: object | None = None,
) -> torch.optim.Optimizer:
    """Makes an optimizer over groups: `make` is called once, with what torch's optimizers take as `params`.

    `groups` is as in a config; `label` is where it stands there, and `where` the file and line, for errors.
    """
    rules = read_rules(groups, label=f"{label}.groups", where=where)
    optimizer = make(make_groups(named_parameters, rules, label=f"{label}.groups", where=where))
    _refuse_unknown_settings(rules, optimizer, label=f"{label}.groups", where=where)
    for group in optimizer.param_groups:
        _settle(group, optimizer, label=label, where=where)
    return optimizer


def read_rules(groups: Iterable[Mapping[str, Any]], *, label: str, where: object | None) -> list[Rule]:
    """Reads the entries of `groups` and refuses those that match or set nothing by their form."""
    if isinstance(groups, Mapping) or not isinstance(groups, Iterable):
        raise ConfigError(f'{label}: must be a list such as [{{match: "*.bias", weight_decay: 0}}].', where=where)
    rules = []
    for number, entry in enumerate(groups):
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
        for key in ("lr", "weight_decay"):
            if key in settings and not _is_number(settings[key], least=0.0):
                raise ConfigError(
                    f"{label}.{number}.{key}: must be a number of at least 0, got {settings[key]!r}.", where=where
                )
        rules.append(Rule(as_globs(f"{label}.{number}.match", entry["match"]), settings))
    return rules


def make_groups(
    named_parameters: Mapping[str, Tensor],
    rules: Sequence[Rule] = (),
    *,
    label: str = "groups",
    where: object | None = None,
) -> list[dict[str, Any]]:
    """Returns torch's parameter groups with their names: every parameter is in exactly one.

    What no rule matches comes first, because the first group's rate is the one that is logged. A glob that matches
    nothing, or nothing that an earlier rule has left, is refused.
    """
    members: dict[_Place, list[str]] = {}
    for name, parameter in named_parameters.items():
        rule = next((n for n, each in enumerate(rules) if _is_matched(name, each)), None)
        place = _Place(rule, _lr_scale(name, parameter, where), bool(getattr(parameter, "no_weight_decay", False)))
        members.setdefault(place, []).append(name)
    _refuse_idle_rules(rules, list(named_parameters), {place.rule for place in members}, label, where)
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
    if not _is_number(scale, least=0.0):
        raise ConfigError(f"{name}.lr_scale is {scale!r}. Use a number of at least 0.", where=where)
    return float(scale)


def _is_number(value: object, *, least: float = -math.inf) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < math.inf


def _refuse_idle_rules(
    rules: Sequence[Rule], names: list[str], used: set[int | None], label: str, where: object | None
) -> None:
    for number, rule in enumerate(rules):
        for glob in rule.globs:
            if not any(fnmatchcase(name, glob) for name in names):
                raise ConfigError(f"{label}.{number}.match: {unmatched(glob, names, 'parameter')}", where=where)
        if number not in used:
            raise ConfigError(
                f"{label}.{number}: has no effect, for earlier groups match all of {', '.join(rule.globs)}. The first "
                "match wins: move it up, or remove it.",
                where=where,
            )


def _refuse_unknown_settings(
    rules: Sequence[Rule], optimizer: torch.optim.Optimizer, *, label: str, where: object | None
) -> None:
    for number, rule in enumerate(rules):
        for key, value in rule.settings.items():
            place = f"{label}.{number}.{key}"
            if key not in optimizer.defaults:
                raise ConfigError(
                    f"{place}: {type(optimizer).__name__} has no such setting for a group. "
                    f"{suggest(key, optimizer.defaults)}",
                    where=where,
                )
            default = optimizer.defaults[key]
            if _is_number(default) and not _is_number(value):
                raise ConfigError(f"{place}: must be a number, got {value!r}.", where=where)
            if isinstance(default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{place}: must be true or false, got {value!r}.", where=where)
            if isinstance(default, tuple) and not (isinstance(value, (list, tuple)) and len(value) == len(default)):
                raise ConfigError(f"{place}: must be a list of {len(default)}, got {value!r}.", where=where)


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
