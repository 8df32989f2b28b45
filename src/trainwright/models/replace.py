"""Replacement by config: named sub-modules of any model give way to components.

    model.replace: {"layers.*.mlp": {type: my.py:MyMLP, width: 64}}

It happens after pretrained weights are loaded, so that these fit the model as it was published; the new modules keep
what their constructors gave them. Who finds a component's class is registry.py; a glob's meaning is in names.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from trainwright.errors import ConfigError
from trainwright.models.names import names_module, unmatched

Make = Callable[[Any, nn.Module], nn.Module]
"""Makes the module that a rule describes, given the one that it replaces."""


def replace_modules(model: nn.Module, rules: Mapping[str, Any], make: Make) -> list[str]:
    """Replaces each sub-module that a rule's glob matches by `make(component, old)`; returns their names.

    Where a glob matches a module and another inside of it, the outer one is meant. Two rules that claim one place,
    or one inside the other, are refused, as is a rule that matches nothing; then nothing has been changed. The order
    of the rules has no effect: modules are made in the model's order. A module that stands at two places is replaced
    by one. The new modules are in training or evaluation mode as the old ones were; nothing else is taken over, so a
    weight that was tied to the old one is no longer tied.
    """
    places = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    owners = _claim(places, rules)
    made: dict[int, nn.Module] = {}
    claimed_by: dict[int, str] = {}
    for name in (name for name in places if name in owners):
        old, glob = places[name], owners[name]
        if claimed_by.setdefault(id(old), glob) != glob:
            raise ConfigError(
                f'replace: "{claimed_by[id(old)]}" and "{glob}" claim one module, which the model has at two places, '
                f"one of them {name}. Let one rule match both."
            )
        if id(old) not in made:
            new = make(rules[glob], old)
            if not isinstance(new, nn.Module):
                raise ConfigError(f'replace: "{glob}" gives a {type(new).__name__}, not a torch.nn.Module, for {name}.')
            made[id(old)] = new.train(old.training)
    # Placed only when all are made: a constructor that fails leaves the model as it was.
    for name in owners:
        model.set_submodule(name, made[id(places[name])])
    return [name for name in places if name in owners]


def claimed_modules(model: nn.Module, rules: Mapping[str, Any]) -> dict[str, str]:
    """Returns which rule's glob owns which module, in the model's order, without making or replacing one."""
    places = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    owners = _claim(places, rules)
    return {name: owners[name] for name in places if name in owners}


def _claim(places: Mapping[str, nn.Module], rules: Mapping[str, Any]) -> dict[str, str]:
    """Returns which rule owns which place."""
    owners: dict[str, str] = {}
    for glob in rules:
        matched = {name for name in places if names_module(glob, name)}
        if not matched:
            raise ConfigError(f"replace: {unmatched(glob, places, 'module')}")
        for name in sorted(matched):
            if any(outer in matched for outer in _outer_places(name)):
                continue
            if name in owners:
                raise ConfigError(
                    f'replace: "{owners[name]}" and "{glob}" both claim {name}. Make one of them narrower.'
                )
            owners[name] = glob
    for name, glob in owners.items():
        for outer in _outer_places(name):
            if outer in owners:
                raise ConfigError(
                    f'replace: "{glob}" claims {name}, which is inside of {outer}, which "{owners[outer]}" claims. '
                    "Remove one of them."
                )
    return owners


def _outer_places(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
