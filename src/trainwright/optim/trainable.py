"""Parameters that become trainable during a run, or are frozen again, and the groups of their optimizers.

A parameter joins the group that it would have been in if it had been trainable from the start. A parameter that is
frozen during a run stays in its group; without a gradient, no optimizer changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import ConfigError
from trainwright.models.from_config import FreezeRule


@dataclass(frozen=True)
class OptimizerRecipe:
    """How an optimizer of the config was built."""

    optimizer: torch.optim.Optimizer
    owned: Mapping[str, Tensor]
    """Its parameters by name, those of all stages of a pipeline."""
    match: tuple[str, ...]
    """Globs of the names of its parameters, frozen ones included."""
    make: Callable[[Mapping[str, Tensor]], torch.optim.Optimizer]
    """Builds such an optimizer over other parameters."""


def unowned_parameters(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, nn.Parameter]:
    """Returns the parameters of a model that belong to no optimizer, by their first name."""
    owned = {
        id(each) for optimizer in optimizers.values() for group in optimizer.param_groups for each in group["params"]
    }
    return {name: each for name, each in model.named_parameters() if id(each) not in owned}


def unfreeze_due(
    frozen: Mapping[str, nn.Parameter], model: nn.Module, rules: Sequence[FreezeRule], *, step: int, epoch: int
) -> None:
    """Makes parameters trainable for which all matching rules of `model.freeze` have ended.

    `step` is the number of completed updates, `epoch` that of the next update.
    """
    ended = [rule for rule in rules if rule.has_ended(step=step, epoch=epoch)]
    if not ended:
        return
    numbers = {id(each) for each in frozen.values()}
    names: dict[int, list[str]] = {}  # a tied parameter has several names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in numbers:
            names.setdefault(id(parameter), []).append(name)
    for parameter in frozen.values():
        own = names[id(parameter)]
        matching = [rule for rule in rules if any(fnmatchcase(name, glob) for name in own for glob in rule.globs)]
        if matching and all(rule in ended for rule in matching):
            parameter.requires_grad_(True)


def add_trainable(
    added: Mapping[str, nn.Parameter],
    optimizers: Mapping[str, torch.optim.Optimizer],
    recipes: Mapping[str, OptimizerRecipe],
) -> dict[str, str]:
    """Adds parameters to the optimizers that own them; returns the name of the optimizer of each."""
    owners = {name: _owner_of(name, optimizers, recipes) for name in added}
    for owner in dict.fromkeys(owners.values()):
        own = {name: added[name] for name in added if owners[name] == owner}
        optimizer, recipe = optimizers[owner], recipes.get(owner)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"{next(iter(own))} has become trainable, but LBFGS cannot train further parameters during a run: its "
                "history is of the others. Train it from the start, or use another optimizer."
            )
        if recipe is None or recipe.optimizer is not optimizer:
            _append(optimizer.param_groups[0], own)
            continue
        # Another optimizer over the old and the new parameters shows which group each belongs to. It has no state.
        template = recipe.make({**recipe.owned, **own})
        group_of = {id(each): group for group in optimizer.param_groups for each in group["params"]}
        names = {id(parameter): name for name, parameter in own.items()}
        for group in template.param_groups:
            joining = {names[id(each)]: own[names[id(each)]] for each in group["params"] if id(each) in names}
            existing = next((group_of[id(each)] for each in group["params"] if id(each) in group_of), None)
            if joining and existing is not None:
                _append(existing, joining)
            elif joining:
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                add_group(optimizer, joining, settings)
    return owners


def add_group(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], settings: Mapping[str, Any]
) -> None:
    """Adds a group; its parameters have names if those of the other groups do."""
    members: Any = list(parameters.values())
    if "param_names" in optimizer.param_groups[0]:
        members = list(parameters.items())
    optimizer.add_param_group({**settings, "params": members})


def _append(group: dict[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
    group["params"].extend(parameters.values())
    if "param_names" in group:
        group["param_names"].extend(parameters)


def _owner_of(
    name: str, optimizers: Mapping[str, torch.optim.Optimizer], recipes: Mapping[str, OptimizerRecipe]
) -> str:
    """Returns the optimizer that a parameter belongs to; raises if that cannot be derived."""
    known = {owner for owner, recipe in recipes.items() if optimizers.get(owner) is recipe.optimizer}
    matching = [owner for owner in known if any(fnmatchcase(name, glob) for glob in recipes[owner].match)]
    if len(matching) == 1:
        return matching[0]
    if not known and len(optimizers) == 1:
        (owner,) = optimizers
        if len(optimizers[owner].param_groups) == 1:
            return owner
    reason = f"two match it: {' and '.join(sorted(matching))}" if matching else "none of trainer.optimizers matches it"
    if not known:
        reason = "build_optimizers has built several groups or optimizers"
    raise ConfigError(
        f"{name} has become trainable, but which optimizer it belongs to is not known: {reason}. Adjust `match`, or "
        'add it yourself: trainer.optimizers["NAME"].add_param_group({"params": [parameter]}).'
    )


def restore_members(
    optimizer: torch.optim.Optimizer,
    saved_groups: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    *,
    may_join: set[str],
    may_leave: set[str],
) -> None:
    """Restores the members that an optimizer had when its groups were saved with names instead of parameters.

    Only parameters in `may_join` are added, and only those in `may_leave` are removed; for any other difference nothing
    changes, and loading the state raises.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    own = [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
    saved = [list(group["params"]) for group in saved_groups]
    before, after = {name for group in own for name in group}, {name for group in saved for name in group}
    if own == saved or not after - before <= may_join or not before - after <= may_leave:
        return
    for name in before - after:
        optimizer.state.pop(parameters[name], None)
    for group, members in zip(optimizer.param_groups, saved, strict=False):
        group["params"][:] = [parameters[name] for name in members]
        if "param_names" in group:
            group["param_names"][:] = members
    del optimizer.param_groups[len(saved) :]
    for added in saved_groups[len(optimizer.param_groups) :]:
        settings = {key: value for key, value in added.items() if key not in ("params", "param_names")}
        add_group(optimizer, {name: parameters[name] for name in added["params"]}, settings)
