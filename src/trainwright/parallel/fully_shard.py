"""Shards a model's parameters over the ranks with torch's FSDP2, and reduces their gradients."""

from __future__ import annotations

import functools
import logging
import math
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from trainwright.errors import ConfigError, TrainwrightError
from trainwright.parallel.mesh import Mesh, gradient_dtype, is_split, set_gradient_dtype
from trainwright.parallel.replicate import require_gradients

logger = logging.getLogger(__name__)

SMALLEST_LAYER = 2**20
"""The minimum number of elements of a block without submodules; a collective for a smaller one would cost more than it
saves."""


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks in the order of the model's modules, each once; none if the model has no lists of modules."""
    return list(dict.fromkeys(_outermost(model)))


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    members = [child for child in module.children() if next(child.parameters(), None) is not None]
    is_list = isinstance(module, nn.ModuleList) or (type(module) is nn.Sequential and len(members) > 1)
    for member in members:
        if is_list and _can_be_block(member):
            yield member
        else:
            yield from _outermost(member)


def _can_be_block(member: nn.Module) -> bool:
    # nn.Module.forward only raises; lists and dicts of modules inherit it. In a list of lists, the inner members are
    # called, so they are the blocks.
    has_forward = getattr(type(member), "forward", None) is not nn.Module.forward
    if not has_forward or type(member) is nn.Sequential:
        return False
    is_layer = next(member.children(), None) is None
    return not is_layer or sum(parameter.numel() for parameter in member.parameters()) >= SMALLEST_LAYER


class GradientSync:
    """Controls the reductions of one update: `begin_backward` before each backward, `finish` after the last.

    `averaging` is the divisor of the reduced gradients: the number of ranks along fsdp, context and replicate.
    """

    def __init__(
        self,
        modules: Sequence[FSDPModule],
        whole: Sequence[nn.Parameter],
        *,
        groups: Sequence[Any],
        reduces_last: bool,
    ) -> None:
        self._modules = list(modules)
        self._whole = list(whole)
        self._groups = list(groups)
        self._waits_for_last = reduces_last
        self.averaging = math.prod(dist.get_world_size(group) for group in self._groups)
        self._split = [one for module in self._modules for group in _groups_of(module) for one in group.fsdp_params]
        self._touched: set[int] = set()
        """The parameters, by id, that received a gradient on this rank since the last `finish`."""
        self._finished: dict[int, weakref.ref[torch.Tensor]] = {}
        """The gradients after the last `finish`, weakly referenced: they may be cleared."""
        self._direct: dict[nn.Parameter, torch.Tensor] = {}
        """Gradients of sharded parameters that user code used outside of the model, laid out like the parameters."""
        for module in self._modules:
            for group in _groups_of(module):
                group.post_backward = self._filling_zeros(group, group.post_backward)

    def begin_backward(self, *, is_last: bool) -> None:
        """Sets whether a micro-batch is the last of the update; call it before its backward, preferably before its
        forward.

        If this is not known, pass True each time: reductions accumulate, with more communication.
        """
        for module in self._modules:
            if self._waits_for_last:
                module.set_requires_gradient_sync(is_last, recurse=False)
            elif len(self._groups) > 1:
                module.set_requires_all_reduce(is_last, recurse=False)

    def follow_trainable(self) -> None:
        """Updates FSDP2's copy of requires_grad for parameters that were frozen or unfrozen."""
        for module in self._modules:
            for group in _groups_of(module):
                changed = [
                    one
                    for one in group.fsdp_params
                    if hasattr(one, "_unsharded_param")
                    and one._unsharded_param.requires_grad != one.sharded_param.requires_grad
                ]
                for one in changed:
                    one._unsharded_param.requires_grad_(one.sharded_param.requires_grad)
                if changed:
                    group._init_mp_dtypes()  # of the trainable parameters

    @torch.no_grad()
    def add_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Adds a gradient, averaged over ranks, that a parameter received outside of the model; collective.

        It is kept separate until `finish`, because FSDP2 adds its own gradient to the local tensor of `.grad` on a
        separate stream and would not detect another layout.
        """
        assert isinstance(parameter, DTensor)
        assert isinstance(gradient, DTensor)
        gradient = gradient.redistribute(placements=parameter.placements)
        earlier = self._direct.get(parameter)
        self._direct[parameter] = gradient if earlier is None else earlier + gradient

    def reshard(self) -> None:
        """Frees all gathered parameters; does nothing for those that are sharded."""
        for module in self._modules:
            module.reshard()

    @torch.no_grad()
    def finish(self, *, is_captured: bool = False) -> None:
        """Completes the reduction of this update's gradients; collective. Parameters are sharded afterwards.

        Called after the last backward and before any gradient is read, for each update of a step. If the step
        `is_captured`, every trained parameter must have a gradient.
        """
        # A forward without a backward leaves its block gathered, and the update would not change those weights.
        self.reshard()
        if not self._groups:
            return
        if is_captured:
            self._join_streams()
        for parameter, gradient in self._direct.items():
            self._touched.add(id(parameter))
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._direct.clear()
        # A frozen parameter has no gradient on any rank, so it is not missing, and no host needs to wait for the
        # others.
        parameters = [one.sharded_param for one in self._split if one.sharded_param.requires_grad]
        whole = [parameter for parameter in self._whole if parameter.requires_grad]
        present = [id(parameter) in self._touched or self._is_unchanged(parameter) for parameter in parameters]
        present += [parameter.grad is not None for parameter in whole]
        self._touched.clear()
        if is_captured:
            require_gradients([*parameters, *whole], present)
        device = [*parameters, *whole, *self._whole, *(one.sharded_param for one in self._split)][0].device
        flags = torch.ones(len(present), dtype=torch.int32, device=device)
        if not all(present):
            flags.copy_(torch.tensor(present, dtype=torch.int32))
        self._reduce(flags)
        for some in _by_dtype(whole):
            kind = gradient_dtype(some[0])
            gradients = [torch.zeros_like(each, dtype=kind) if each.grad is None else each.grad for each in some]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._reduce(flat)
            flat.div_(self.averaging)
            for parameter, chunk in zip(some, flat.split([each.numel() for each in some]), strict=True):  # type: ignore[no-untyped-call]
                parameter.grad = chunk.view(parameter.shape)
        # Only a rank without a gradient needs to know whether another has it; reading that synchronizes the device.
        if not all(present):
            for parameter, count in zip([*parameters, *whole], flags.tolist(), strict=True):
                if count == 0:
                    parameter.grad = None
        self._finished = {id(each): weakref.ref(each.grad) for each in parameters if each.grad is not None}

    def _join_streams(self) -> None:
        """Makes the current stream wait for the streams on which FSDP2 gathers, as a capture requires at its end.

        For the streams on which it reduces, FSDP2 itself waits at the end of the backward.
        """
        context = self._modules[-1]._get_fsdp_state()._comm_ctx
        for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
            context.device_handle.current_stream().wait_stream(stream)

    def _is_unchanged(self, parameter: nn.Parameter) -> bool:
        """Returns True if the gradient is the one of the last `finish`."""
        known = self._finished.get(id(parameter))
        return known is not None and parameter.grad is not None and known() is parameter.grad

    def _reduce(self, tensor: torch.Tensor) -> None:
        for group in self._groups:
            dist.all_reduce(tensor, group=group)

    def _filling_zeros(self, group: Any, post_backward: Callable[..., None]) -> Callable[..., None]:
        """Returns FSDP2's hook after a block's backward, with zeros for parameters without a gradient.

        From 2.13 on torch has a setting for it, which does not record which gradients were zeros.
        """

        def fill_and_reduce(*unused: Any) -> None:
            for one in group.fsdp_params:
                if not hasattr(one, "_unsharded_param") or not one.sharded_param.requires_grad:
                    continue
                if one._unsharded_param.grad is not None or one.unsharded_accumulated_grad is not None:
                    self._touched.add(id(one.sharded_param))
                elif group.reduce_grads:
                    one._unsharded_param.grad = torch.zeros_like(one._unsharded_param)
            if group.reduce_grads:
                _reduce_wide(group)
            post_backward(*unused)

        return fill_and_reduce


def _reduce_wide(group: Any) -> None:
    """Makes FSDP2 accumulate gradients of 16-bit parameters in the dtype in which it reduces them, fp32.

    It would round the sum over ranks to the parameters' dtype, and add that to the earlier micro-batches in 16 bits.
    """
    trained = [one for one in group.fsdp_params if one.sharded_param.requires_grad]
    if any(one.unsharded_accumulated_grad is not None for one in trained):
        for one in trained:  # a reduction has one dtype, and a parameter may be used only in the last micro-batch
            if one.unsharded_accumulated_grad is None and one.unsharded_param.grad is not None:
                one.to_accumulated_grad_if_needed()
    for one in trained:
        if one.sharded_param.dtype in (torch.bfloat16, torch.float16):
            group._orig_dtype = torch.float32
            set_gradient_dtype(one.sharded_param, torch.float32)  # again: it may have been cast for an optimizer


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(gradient_dtype(parameter), []).append(parameter)
    return list(kinds.values())


def reject_ungathered(error: RuntimeError, model: torch.nn.Module) -> None:
    """Raises a clear error if `error` comes from a sharded parameter used outside of its forward."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return
    if not any(is_split(parameter) for parameter in model.parameters()):
        return
    # torch's FSDP replaces the user's class with a subclass.
    kinds = [kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.distributed")]
    name = next((kind.__name__ for kind in kinds if not kind.__name__.startswith("FSDP")), type(model).__name__)
    advice = ""
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    if any("tensor" in (mesh.mesh_dim_names or ()) for mesh in meshes if mesh is not None):
        advice = (
            " Or a module's output with a rule under outputs was added to one without. Add a rule for the latter (an "
            "embedding, the last layer of a block), as in trainwright/configs/sharding/llama.yaml."
        )
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    raise TrainwrightError(
        "A sharded parameter was used outside of the forward that gathers it: a layer or a method of "
        f"{name} was called directly. Call the model (or a whole member of its ModuleList), or list the "
        'method in the model\'s class: forward_methods = ("encode",). With replicate instead of fsdp parameters are '
        f"not sharded.{advice}",
        where=f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None,
    ) from error


@dataclass(frozen=True)
class SplitSettings:
    """How sharded parameters are gathered and their gradients reduced."""

    reshard_after_forward: bool = True
    """Free a block after its forward and gather it again for its backward; False keeps it, which reduces
    communication."""
    accumulate_unsharded: bool = False
    """Accumulate full gradients over the micro-batches of an update and reduce them once, which needs more memory."""
    gather_dtype: torch.dtype | None = None
    """The dtype of gathered parameters, under autocast of that dtype; None: their own. Blocks with running statistics
    keep their dtype. Gradients are summed in fp32, or in the parameters' own dtype if that has more bits."""


def shard_parameters(
    model: nn.Module,
    mesh: Mesh,
    *,
    settings: SplitSettings,
    device: torch.device,
    data_dim: Callable[[str], int | None] = lambda name: None,
) -> GradientSync:
    """Shards the parameters in place, block by block, and moves the model to the device.

    `data_dim` returns the dim of a parameter to shard, by name; None is dim 0, whose shards may be uneven. Names and
    attributes of parameters are kept. Nothing is sharded if fsdp and context have one rank. A model may list methods in
    addition to forward that use its parameters, as `forward_methods`.
    """
    shard = mesh.along("shard")
    if shard is None:
        model.to(device)
        return GradientSync([], [], groups=(), reduces_last=False)
    replicate = mesh.group("replicate")
    along = shard
    if replicate is not None:
        assert mesh.layers is not None
        along = mesh.layers["replicate", "shard"]
    methods = _forward_methods(model)
    blocks = find_blocks(model)
    whole = _kept_whole(model, blocks)
    attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    options: dict[str, Any] = {
        "mesh": along,
        "shard_placement_fn": _placement(model, data_dim, shard.size()),
        "ignored_params": set(whole),
    }
    for block in blocks:
        if any(parameter not in options["ignored_params"] for parameter in block.parameters()):
            policy = _precision(block, settings, options["ignored_params"])
            fully_shard(block, reshard_after_forward=settings.reshard_after_forward, mp_policy=policy, **options)
    # Parameters outside of blocks are used first and last; freeing them in between would gather them twice.
    fully_shard(model, reshard_after_forward=False, mp_policy=_precision(model, settings, set(whole)), **options)
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    for name, parameter in model.named_parameters():
        vars(parameter).update(attributes[name])
    for method in methods:
        _gather_for(model, method)
    # The backward frees the model; an evaluation has none, and averaged weights would stay gathered.
    model.register_forward_hook(torch.compiler.disable(_reshard_without_backward))  # type: ignore[no-untyped-call]
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    kept = [each for each in modules if settings.gather_dtype is not None and _has_running_statistics(each)]
    if kept:
        logger.info(
            "%d of %d sharded modules have running statistics (BatchNorm): their parameters are gathered in their own "
            "dtype, not as %s.",
            *(len(kept), len(modules), settings.gather_dtype),
        )
    groups = [shard.get_group()] + ([] if replicate is None else [replicate])
    return GradientSync(modules, whole, groups=groups, reduces_last=settings.accumulate_unsharded)


def _kept_whole(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters that torch cannot shard: scalars, shared ones, and those of a minority dtype."""
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
            "%d parameters (%d elements) are not sharded, because they are scalars, shared by several blocks, or of "
            "another dtype than the rest of their block: %s%s.",
            *(len(names), sum(parameter.numel() for parameter in whole)),
            *(", ".join(names[:4]), ", …" if len(names) > 4 else ""),
        )
    return list(whole)


def _of_other_dtypes(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the trained parameters that do not have the most common dtype: one reduction has one dtype."""
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
                    f"model.sharding: {name} of shape {list(parameter.shape)} cannot be sharded over {num_ranks} "
                    f"ranks along dim {dim}, whose size is not a multiple of them. Set fsdp on dim 0, which may be "
                    "uneven, or on no dim."
                )
            dims[parameter] = dim
    return (lambda parameter: Shard(dims.get(parameter, 0))) if dims else None


def _precision(module: nn.Module, settings: SplitSettings, whole: set[nn.Parameter]) -> MixedPrecisionPolicy:
    dtypes = [p.dtype for p in module.parameters() if p not in whole and p.requires_grad and p.is_floating_point()]
    wide = torch.promote_types(dtypes[0], torch.float32) if dtypes else None
    if settings.gather_dtype is None or _has_running_statistics(module):
        reduce_dtype = None if wide in dtypes else wide  # None: the dtype of the gradients
        return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    # Inputs are not cast, because a float that is not an activation (an angle, a weight) would lose precision; autocast
    # casts where needed.
    return MixedPrecisionPolicy(settings.gather_dtype, wide, cast_forward_inputs=False)


def _has_running_statistics(module: nn.Module) -> bool:
    """Returns True if a module has a BatchNorm outside of its sharded blocks.

    torch requires one dtype for its weights and statistics.
    """
    blocks = (each for each in module.modules() if isinstance(each, FSDPModule) and each is not module)
    inside = {each for block in blocks for each in block.modules()}
    own = (each for each in module.modules() if each not in inside)
    return any(isinstance(getattr(each, "running_mean", None), torch.Tensor) for each in own)


def _forward_methods(model: nn.Module) -> tuple[str, ...]:
    names = tuple(getattr(model, "forward_methods", ()))
    for name in names:
        if not callable(getattr(model, name, None)):
            raise ConfigError(
                f"{type(model).__name__}.forward_methods lists {name!r}, which is not a method of the model. "
                "Correct the name, or remove it."
            )
    return names


def _gather_for(model: nn.Module, name: str) -> None:
    """Makes a method gather parameters like forward, and free them if there is no backward."""
    register_fsdp_forward_method(model, name)
    gathering = getattr(model, name)

    @functools.wraps(gathering)
    def method(*args: Any, **kwargs: Any) -> Any:
        outputs = gathering(*args, **kwargs)
        _reshard_without_backward(model, args, outputs)
        return outputs

    setattr(model, name, method)


def _reshard_without_backward(model: nn.Module, inputs: Any, outputs: Any) -> None:
    if not torch.is_grad_enabled():
        for module in model.modules():  # without reshard_after_forward the blocks stay gathered too
            if isinstance(module, FSDPModule):
                module.reshard()
