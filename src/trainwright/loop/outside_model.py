"""Rejects parameters that a trainer or a task has outside the model, where they are not updated, reduced or saved.

A module that is only read, such as a frozen teacher, is allowed, because its parameters receive no gradient. A module
that user code updates with its own optimizer is allowed if a `state_dict` contains it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainwright.errors import ConfigError
from trainwright.user_code.locations import UserFiles, line_of_attribute


class UserAttribute(NamedTuple):
    """An attribute that user code has set on a trainer or a task."""

    owner: object
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}"


def user_attributes(owners: Iterable[tuple[object, Collection[str]]]) -> Iterator[UserAttribute]:
    """Yields the modules, parameters and optimizers among attributes, also those in a list, tuple or dict.

    `owners` are objects, each with the names of attributes that do not belong to the user.
    """
    kinds = (torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer)
    for owner, ignored in owners:
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if name in ignored:
                continue
            values = [value]
            if isinstance(value, dict | list | tuple):
                values = list(value.values()) if isinstance(value, dict) else list(value)
            yield from (UserAttribute(owner, name, each) for each in values if isinstance(each, kinds))


def reject_outside(
    attributes: Sequence[UserAttribute],
    model: torch.nn.Module,
    optimizers: Collection[torch.optim.Optimizer],
    *,
    has_state: bool,
    project_dir: Path,
) -> list[UserAttribute]:
    """Raises for parameters outside the model that have received a gradient and that no optimizer owns.

    Also raises for a custom optimizer if no `state_dict` of the trainer or the task (`has_state`) can contain it;
    otherwise returns these optimizers.
    """
    known = {id(each) for each in (model, *model.modules(), *model.parameters(), *optimizers)}
    outside = [each for each in attributes if id(each.value) not in known]
    own = [each for each in outside if isinstance(each.value, torch.optim.Optimizer)]
    owned = {id(each) for each in model.parameters()} | _owned_by([*optimizers, *(each.value for each in own)])
    for each in outside:
        if isinstance(each.value, torch.optim.Optimizer):
            continue
        parameters = {"": each.value} if isinstance(each.value, torch.Tensor) else dict(each.value.named_parameters())
        lost = [name for name, one in parameters.items() if one.grad is not None and id(one) not in owned]
        if lost:
            names = f" ({', '.join(lost[:3])}{', …' * (len(lost) > 3)})" if any(lost) else ""
            raise ConfigError(
                f"{each} receives a gradient{names}, but it is not part of the model: no optimizer updates it and no "
                "checkpoint contains it. Make it a part of the model (build_model), or use it without gradients "
                "(torch.no_grad(), requires_grad_(False)).",
                where=_location(each, project_dir),
            )
    for each in own:
        if not has_state:
            raise ConfigError(
                f"{each} is an optimizer that no checkpoint contains. Set trainer.optimizers instead, or return its "
                f"state_dict(), and that of what it updates, from {type(each.owner).__name__}.state_dict().",
                where=_location(each, project_dir),
            )
    return own


def _owned_by(optimizers: Collection[torch.optim.Optimizer]) -> set[int]:
    return {id(one) for each in optimizers for group in each.param_groups for one in group["params"]}


def _location(attribute: UserAttribute, project_dir: Path) -> str | None:
    found = line_of_attribute(type(attribute.owner), attribute.name, UserFiles(project_dir))
    return None if found is None else str(found)
