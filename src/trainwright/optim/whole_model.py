"""The parameters of a model as they were before a pipeline cut it, so that rules hold for the model and not a stage.

Optimizers are made as one process would make them, over the parameters of all stages: those of other stages have
stand-ins without memory, which are taken out again. Every stage then has the same groups, of which some may be empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.optim.parameter_kinds import classify_parameters
from trainwright.parallel.stages import stages_of


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
