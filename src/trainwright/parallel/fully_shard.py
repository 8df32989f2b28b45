"""Splits a model's parameters over the ranks along data × context, with torch's FSDP2.

Each rank keeps a part of every parameter, its gradient and its optimizer state. A block (blocks.py) is gathered
before it runs and let go after it; gradients are averaged over ranks and cut into the same parts. What torch cannot
split, scalars above all, stays whole on every rank, and its gradient is averaged by GradientSync.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from trainwright.errors import ConfigError
from trainwright.parallel.blocks import find_blocks
from trainwright.parallel.gradient_sync import GradientSync
from trainwright.parallel.mesh import Mesh

__all__ = ["GradientSync", "SplitSettings", "shard_parameters"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SplitSettings:
    """How split parameters are gathered and their gradients reduced."""

    reshard_after_forward: bool = True
    """Let a block go after its forward and gather it again for its backward; False keeps it, for less talk."""
    accumulate_unsharded: bool = False
    """Keep whole gradients over the micro-batches of an update and reduce them once, for memory of the whole model."""
    gather_dtype: torch.dtype | None = None
    """What parameters are gathered in, under autocast of that dtype; None: as they are. Gradients are then summed in
    the parameters' own dtype all the same."""


def shard_parameters(
    model: nn.Module,
    mesh: Mesh,
    *,
    settings: SplitSettings,
    device: torch.device,
    data_dim: Callable[[str], int | None] = lambda name: None,
) -> GradientSync:
    """Splits the parameters in place, block by block, and moves the model to the device as it goes.

    `data_dim` says along which dim a parameter is split, by name; None is dim 0, whose parts may be uneven. Names,
    and what was set on a parameter as an attribute, stay. Where nobody shares along data and context nothing is
    split. A model may list methods beside forward that use its parameters, as `forward_methods`.
    """
    shard = mesh.along("shard")
    if shard is None:
        model.to(device)
        return GradientSync([], [], groups=(), reduces_last=False)
    replicate = mesh.group("replicate")
    along = shard if replicate is None else _hybrid(mesh)
    methods = _forward_methods(model)
    blocks = find_blocks(model)
    whole = _kept_whole(model, blocks)
    marks = {name: _attributes_of(parameter) for name, parameter in model.named_parameters()}
    options: dict[str, Any] = {
        "mesh": along,
        "shard_placement_fn": _placement(model, data_dim, shard.size()),
        "ignored_params": set(whole),
    }
    for block in blocks:
        if any(parameter not in options["ignored_params"] for parameter in block.parameters()):
            policy = _precision(block, settings, options["ignored_params"])
            fully_shard(block, reshard_after_forward=settings.reshard_after_forward, mp_policy=policy, **options)
    # What is outside of blocks is used first and last: letting it go in between would only gather it twice.
    fully_shard(model, reshard_after_forward=False, mp_policy=_precision(model, settings, set(whole)), **options)
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    for name, parameter in model.named_parameters():
        vars(parameter).update(marks[name])
    for method in methods:
        _gather_around(model, method)
    # Training lets go of the model in its backward; an evaluation has none, and averaged weights would stay behind.
    model.register_forward_hook(torch.compiler.disable(_let_go_without_backward))  # type: ignore[no-untyped-call]
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [shard.get_group()] + ([] if replicate is None else [replicate])
    return GradientSync(modules, whole, groups=groups, reduces_last=settings.accumulate_unsharded)


def _hybrid(mesh: Mesh) -> DeviceMesh:
    assert mesh.layers is not None  # there is a group along replicate
    return mesh.layers["replicate", "shard"]


def _kept_whole(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns what torch cannot split: scalars, what several blocks share, and what has not its block's dtype."""
    owners: Counter[nn.Parameter] = Counter()
    groups: list[list[nn.Parameter]] = []
    inside: set[nn.Module] = set()
    for block in blocks:
        parameters = list(block.parameters())
        owners.update(parameters)
        groups.append(parameters)
        inside.update(block.modules())
    outside = {p for module in model.modules() if module not in inside for p in module.parameters(recurse=False)}
    owners.update(outside)
    groups.append([parameter for parameter in model.parameters() if parameter in outside])
    whole: dict[nn.Parameter, None] = {}
    for parameters in groups:
        for parameter in parameters:
            if parameter.ndim == 0 or owners[parameter] > 1:
                whole[parameter] = None
        whole.update(dict.fromkeys(_of_other_dtypes([each for each in parameters if each not in whole])))
    if whole:
        names = [name for name, parameter in model.named_parameters() if parameter in whole]
        logger.info(
            "%d parameters (%d elements) stay whole on every rank, for they are scalars, shared by several blocks, or "
            "of another dtype than the rest of their block: %s%s.",
            len(names),
            sum(parameter.numel() for parameter in whole),
            ", ".join(names[:4]),
            ", …" if len(names) > 4 else "",
        )
    return list(whole)


def _of_other_dtypes(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the trained parameters that are not of the dtype most elements have: one reduction has one dtype."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        if parameter.requires_grad:
            sizes[parameter.dtype] += parameter.numel()
    if len(sizes) < 2:
        return []
    most = sizes.most_common(1)[0][0]
    return [parameter for parameter in parameters if parameter.requires_grad and parameter.dtype != most]


def _placement(
    model: nn.Module, data_dim: Callable[[str], int | None], num_ranks: int
) -> Callable[[nn.Parameter], Shard | None] | None:
    dims: dict[nn.Parameter, int] = {}
    for name, parameter in model.named_parameters():
        dim = data_dim(name)
        if dim:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if dim >= local.ndim or local.shape[dim] % num_ranks:
                raise ConfigError(
                    f"model.sharding: {name} of shape {list(parameter.shape)} cannot be split over {num_ranks} ranks "
                    f"along dim {dim}, for its length there is not a multiple of them. Name data on dim 0, which may "
                    "be uneven, or on no dim."
                )
            dims[parameter] = dim
    return (lambda parameter: Shard(dims.get(parameter, 0))) if dims else None


def _precision(module: nn.Module, settings: SplitSettings, whole: set[nn.Parameter]) -> MixedPrecisionPolicy:
    if settings.gather_dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    dtypes = [p.dtype for p in module.parameters() if p not in whole and p.requires_grad and p.is_floating_point()]
    # The inputs are left alone, for a float that is no activation (an angle, a weight) would lose bits: autocast
    # knows which are which.
    return MixedPrecisionPolicy(settings.gather_dtype, dtypes[0] if dtypes else None, cast_forward_inputs=False)


def _forward_methods(model: nn.Module) -> tuple[str, ...]:
    names = tuple(getattr(model, "forward_methods", ()))
    for name in names:
        if not callable(getattr(model, name, None)):
            raise ConfigError(
                f"{type(model).__name__}.forward_methods lists {name!r}, which is no method of the model. Correct the "
                "name, or remove it."
            )
    return names


def _gather_around(model: nn.Module, name: str) -> None:
    """Lets a method gather as forward does, and let go where no backward will."""
    register_fsdp_forward_method(model, name)
    gathering = getattr(model, name)

    @functools.wraps(gathering)
    def method(*args: Any, **kwargs: Any) -> Any:
        outputs = gathering(*args, **kwargs)
        _let_go_without_backward(model, args, outputs)
        return outputs

    setattr(model, name, method)


def _let_go_without_backward(model: nn.Module, inputs: Any, outputs: Any) -> None:
    if not torch.is_grad_enabled():
        model.reshard()  # type: ignore[operator]  # FSDP2 made it an FSDPModule


def _attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    return dict(vars(parameter))
