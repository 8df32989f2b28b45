"""Tensor parallelism: parameters become DTensors along the axis `tensor`, and hooks adapt the modules that use them.

Includes embeddings and losses over a sharded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from trainwright.errors import ConfigError
from trainwright.parallel.mesh import Mesh
from trainwright.parallel.sharding import Axes, ShardingPlan


def look_up(table: DTensor, ids: Tensor, *, padding_idx: int | None = None) -> DTensor:
    """Returns the rows [..., D] of a table [V, D] that is sharded by rows, as partial sums.

    Raises for ids outside of the table, like nn.Embedding, without a synchronization of the device.
    """
    mesh, num_rows = table.device_mesh, table.shape[0]
    _check_range(ids, num_rows)
    rows = table.to_local()
    start = first_row(num_rows, mesh)
    is_here = (ids >= start) & (ids < start + rows.shape[0])
    if rows.shape[0] == 0:
        found = rows.sum() * torch.zeros((*ids.shape, table.shape[1]), dtype=rows.dtype, device=rows.device)
    else:
        found = F.embedding(torch.where(is_here, ids - start, 0), rows)
        found = torch.where(is_here[..., None], found, 0.0)
    if padding_idx is not None:
        # The row of padding is read but not trained.
        found = torch.where((ids == padding_idx)[..., None], found.detach(), found)
    return DTensor.from_local(found, mesh, [Partial()], run_check=False)


def split_cross_entropy(logits: DTensor, targets: Tensor, *, ignore_index: int, reduction: str) -> Tensor:
    """Returns the cross entropy of logits [N, V], sharded by columns, for targets [N] that every rank has."""
    mesh, size = logits.device_mesh, logits.shape[-1]
    is_counted = targets != ignore_index
    apply: Callable[..., Tensor] = _SplitCrossEntropy.apply  # torch has no types here
    losses = apply(logits.to_local(), torch.where(is_counted, targets, 0), first_row(size, mesh), mesh)
    losses = torch.where(is_counted, losses, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / is_counted.sum() if reduction == "mean" else total


def first_row(size: int, mesh: DeviceMesh) -> int:
    """Returns the offset of this rank's shard of a dim: all shards but the last ones have the same size."""
    length = -(-size // mesh.size())
    return min(length * mesh.get_local_rank(), size)


def over_ranks(tensor: Tensor, mesh: DeviceMesh, operation: str) -> Tensor:
    """Returns the sum or the maximum of a tensor over the ranks of a one-axis mesh; outside of autograd."""
    return (
        DTensor.from_local(tensor, mesh, [Partial(operation)], run_check=False)
        .redistribute(placements=[Replicate()])
        .to_local()
    )


def _check_range(ids: Tensor, num_rows: int) -> None:
    try:
        # torch's only assertion without a device synchronization; it has no public name.
        torch._assert_async(((ids >= 0) & (ids < num_rows)).all())
    except RuntimeError as error:
        raise IndexError(f"ids from {int(ids.min())} to {int(ids.max())} in a table of {num_rows} rows") from error


class _SplitCrossEntropy(torch.autograd.Function):
    """Uses one rank's columns; reduces the maximum, the sum of exponentials and the target's logit over ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, mesh: DeviceMesh) -> Tensor:
        is_here = (targets >= start) & (targets < start + logits.shape[-1])
        chosen = torch.where(is_here, targets - start, 0)[:, None]
        if logits.shape[-1] == 0:  # more ranks than tokens
            largest = logits.new_full(targets.shape, -torch.inf)
            of_target = logits.new_zeros(targets.shape)
        else:
            largest = logits.amax(dim=-1)
            of_target = logits.gather(1, chosen)[:, 0]
        largest = over_ranks(largest, mesh, "max")
        shares = (logits - largest[:, None]).exp_()
        sums = over_ranks(torch.stack((shares.sum(dim=-1), torch.where(is_here, of_target, 0.0))), mesh, "sum")
        shares /= sums[0][:, None]
        ctx.save_for_backward(shares, chosen, is_here)
        return sums[0].log() + largest - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None, None]:
        shares, chosen, is_here = ctx.saved_tensors
        grads = shares.clone()
        if grads.shape[-1]:
            grads.scatter_add_(1, chosen, -is_here[:, None].to(grads.dtype))
        return grads.mul_(grad_losses[:, None]), None, None, None


def whole(tensor: Any) -> Any:
    """Returns the full tensor of a DTensor as a plain tensor, with gradient; other values unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


def split_dim(tensor: Any) -> int | None:
    """Returns the sharded dim of a DTensor on one axis; None if it is replicated, or not a DTensor."""
    placement = tensor.placements[0] if isinstance(tensor, DTensor) else None
    return placement.dim if isinstance(placement, Shard) else None


def own_shard(value: Tensor, dim: int, ranks: DeviceMesh) -> Tensor:
    """Returns this rank's shard of a full tensor, without a copy; empty if there are more ranks than rows."""
    size = value.shape[dim]
    start = first_row(size, ranks)
    return value.narrow(dim, start, min(-(-size // ranks.size()), size - start))


def look_up_rows(self: nn.Embedding, ids: Tensor) -> Tensor:
    """The forward of an embedding that is sharded by rows."""
    return look_up(self.weight, ids, padding_idx=self.padding_idx)  # type: ignore[arg-type]  # it is a DTensor


def drop(self: nn.Dropout, given: Tensor) -> Tensor:
    """The forward of a dropout on activations that may be sharded."""
    return _drop(given, partial(type(self).forward, self), draws=self.training and self.p > 0)


def drop_before_adapter(self: Any, given: Tensor) -> Tensor:
    """The dropout of an adapter's input; `self` is a LoRALinear, which this package cannot import."""
    return _drop(given, partial(type(self).drop, self), draws=self.training and self.lora_dropout > 0)


def score(self: nn.Module, logits: Any, *rest: Any, **named: Any) -> Any:
    """The forward of a loss: plain cross entropy accepts logits that are sharded by class; other losses receive full
    logits."""
    targets = rest[0] if len(rest) == 1 else None
    if (
        isinstance(logits, DTensor)
        and logits.dim() == 2
        and split_dim(logits) == 1
        and type(self) is nn.CrossEntropyLoss
        and self.weight is None
        and self.label_smoothing == 0.0
        and isinstance(targets, Tensor)
        and not targets.is_floating_point()
    ):
        return split_cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction=self.reduction)
    return type(self).forward(self, whole(logits), *(whole(each) for each in rest), **named)


def return_whole(model: nn.Module, args: Any, outputs: Any) -> Any:
    """A forward hook of the model: returns full tensors, except that logits stay sharded in training if there is a
    loss.

    Most runs do not use them, and they are the largest tensor. An operation with plain tensors raises.
    """
    if not isinstance(outputs, Mapping):
        return whole(outputs)
    if not any(isinstance(each, DTensor) for each in outputs.values()):
        return outputs
    keeps_shards = model.training and outputs.get("loss") is not None
    return {name: each if keeps_shards and name != "loss" else whole(each) for name, each in outputs.items()}


def _drop(given: Tensor, drop_all: Callable[[Tensor], Tensor], *, draws: bool) -> Tensor:
    """Drops the same values as a single process: all ranks draw the same random numbers, and each uses those of its
    shard."""
    if not draws or not isinstance(given, DTensor):
        return drop_all(given)
    values = given.to_local()
    kept = drop_all(torch.ones(given.shape, dtype=values.dtype, device=values.device))
    dim = split_dim(given)
    own = kept if dim is None else own_shard(kept, dim, given.device_mesh)
    return DTensor.from_local(
        values * own, given.device_mesh, given.placements, run_check=False, shape=given.shape, stride=given.stride()
    )


STAGE_METHODS = ("begin", "finish")
"""Methods that the stages of a pipeline call instead of forward."""


Swapped = list[tuple[nn.Module, str, nn.Parameter]]
"""Replaced parameters: their module, their name in it, and the parameter."""


class ParameterSlot(NamedTuple):
    """A parameter of a module or of its child, and the function that returns its replacement during a call."""

    child: str
    name: str
    change: Callable[[DTensor], Tensor]


def split_tensors(model: nn.Module, plan: ShardingPlan, mesh: Mesh) -> None:
    """Shards a model in place, which must be equal on all ranks along `tensor`; does nothing for one rank.

    Names are kept, and a tied parameter stays tied. Every parameter becomes a DTensor, because optimizers require lists
    of one kind.
    """
    ranks = mesh.along("tensor")
    if ranks is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"runtime.mesh.tensor: {name} has sparse gradients, which are not supported. Use "
                f"{type(module).__name__}(sparse=False)."
            )
    done: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in done:
            done[id(parameter)] = _shard_parameter(parameter, plan.layouts[name].tensor_dim, ranks)
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._parameters[last] = done[id(parameter)]
    for name, module in model.named_modules():
        dims = [split_dim(each) for each in _own_parameters(module).values()]
        if name in plan.inputs:
            _hook_input(module, plan.inputs[name], ranks)
        if name in plan.fused:
            _hook_fused(module, plan.fused[name], ranks)
        elif isinstance(module, nn.Embedding) and dims == [0]:
            _bind(module, "forward", look_up_rows)
        elif any(dim is not None for dim in dims):
            _hook_sharded_layer(module, ranks)
        else:
            _hook_plain(name, module, plan, ranks)
        if isinstance(module, nn.Dropout):
            _bind(module, "forward", drop)
        if hasattr(module, "lora_dropout"):
            _bind(module, "drop", drop_before_adapter)
        if _is_loss(module) or name.rpartition(".")[2] == "criterion":
            _bind(module, "forward", score)
        _hook_output(name, module, plan, ranks, keeps_shard=_is_followed_by_rows(name, model))
    model.register_forward_hook(return_whole)


def _is_loss(module: nn.Module) -> bool:
    """Returns True for torch's losses and their subclasses; their common class is private."""
    return any(kind.__module__ == nn.modules.loss.__name__ for kind in type(module).__mro__)


def _shard_parameter(parameter: nn.Parameter, dim: int | None, ranks: DeviceMesh) -> nn.Parameter:
    placement: Placement = Replicate() if dim is None else Shard(dim)
    value = parameter.detach()
    if dim is not None:
        value = own_shard(value, dim, ranks).clone(memory_format=torch.contiguous_format)  # frees the full tensor
    layout = DTensor.from_local(
        value, ranks, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    split = nn.Parameter(layout, requires_grad=parameter.requires_grad)
    vars(split).update(vars(parameter))
    if dim is None and parameter.requires_grad:
        # The gradient of a norm of sharded states is a partial sum; `.grad` must be the sum.
        split.register_hook(  # type: ignore[no-untyped-call]  # torch has no types here
            lambda grad: grad.redistribute(placements=[Replicate()])
        )
    return split


def _bring(tensor: Any, axes: Axes, layer: nn.Module, ranks: DeviceMesh) -> Any:
    """Returns an input or output of a layer in the layout of a rule; a shorter rule is for the last dims.

    In evaluation, activations are full, because they need little memory and a single token cannot be sharded by
    position.
    """
    if not isinstance(tensor, Tensor):
        return tensor
    from_last = next((number for number, dim in enumerate(reversed(axes)) if "tensor" in dim), None)
    if from_last is None or not layer.training:
        return _laid_out(tensor, Replicate(), ranks)
    return _laid_out(tensor, Shard(tensor.dim() - 1 - from_last), ranks)


def _laid_out(tensor: Tensor, placement: Placement, ranks: DeviceMesh) -> DTensor:
    """Returns a tensor as a DTensor in this layout; a plain tensor is assumed to be full on every rank."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, ranks, [Replicate()], run_check=False)
    if tensor.placements == (placement,):
        return tensor
    dims = [each.dim for each in (*tensor.placements, placement) if isinstance(each, Shard)]
    is_even = all(tensor.shape[dim] % ranks.size() == 0 for dim in dims)
    # Under torch.compile an autograd function of DTensors has gradients in another layout.
    if is_even or torch.compiler.is_compiling():
        return tensor.redistribute(placements=[placement])
    contiguous: Callable[[DTensor], DTensor] = _Contiguous.apply  # torch has no types here
    return contiguous(contiguous(tensor).redistribute(placements=[placement]))


class _Contiguous(torch.autograd.Function):
    """Makes memory contiguous, forward and backward.

    A tensor that is gathered from uneven shards is a view of a larger one, which matrix products reject in torch 2.11.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> DTensor:
        return _contiguous(tensor)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return _contiguous(grad)


def _contiguous(tensor: DTensor) -> DTensor:
    values, layout = tensor.to_local().contiguous(), tensor.placements
    return DTensor.from_local(
        values, tensor.device_mesh, layout, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _change_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Returns the arguments with the first one changed, positional or keyword."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    if kwargs:
        first = next(iter(kwargs))
        return args, {**kwargs, first: change(kwargs[first])}
    return args, kwargs


def _hook_input(module: nn.Module, axes: Axes, ranks: DeviceMesh) -> None:
    def bring(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        return _change_first(args, kwargs, lambda each: _bring(each, axes, layer, ranks))

    module.register_forward_pre_hook(bring, with_kwargs=True)


def _hook_sharded_layer(module: nn.Module, ranks: DeviceMesh) -> None:
    """Converts the input of a layer with sharded parameters to the layout that it needs; DTensor does the rest."""
    by_features = isinstance(module, nn.Linear) and split_dim(module.weight) == 1

    def bring(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        def change(given: Any) -> Any:
            if not isinstance(given, Tensor) or not by_features:
                return _laid_out(given, Replicate(), ranks) if isinstance(given, Tensor) else given
            last = Shard(given.dim() - 1)
            if not isinstance(given, DTensor) and given.shape[-1] != layer.in_features:
                return DTensor.from_local(given, ranks, [last], run_check=False)  # this rank's heads or features
            return _laid_out(given, last, ranks)

        return _change_first(args, kwargs, change)

    module.register_forward_pre_hook(bring, with_kwargs=True)


def _hook_fused(module: nn.Module, count: int, ranks: DeviceMesh) -> None:
    """Makes a fused layer compute this rank's rows of each projection, which are gathered from all ranks.

    A rank stores consecutive rows, as for any other parameter, so checkpoints need no special case.
    """

    def own_rows(parameter: DTensor) -> Tensor:
        gathered = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        if split_dim(parameter) is None:
            return gathered
        shape = (count, ranks.size(), -1, *gathered.shape[1:])
        return gathered.view(shape)[:, ranks.get_local_rank()].flatten(0, 1)

    slots = [ParameterSlot("", name, own_rows) for name in module._parameters]

    def bring(layer: Any, args: Any, kwargs: Any) -> Any:
        layer.swapped.append(_swap(layer, slots, ranks))
        return _change_first(
            args, kwargs, lambda each: _laid_out(each, Replicate(), ranks).to_local(grad_placements=[Partial()])
        )

    def restore(layer: Any, args: Any, output: Any) -> None:
        _swap_back(layer.swapped.pop())

    vars(module)["swapped"] = []
    module.register_forward_pre_hook(bring, with_kwargs=True)
    module.register_forward_hook(restore, always_call=True)


def _hook_plain(path: str, module: nn.Module, plan: ShardingPlan, ranks: DeviceMesh) -> None:
    """Makes replicated parameters plain tensors while a module runs on plain tensors, not on DTensors.

    Embeddings that are not sharded are included for their parent, which may read their weight directly.
    """

    def plain(parameter: DTensor) -> Tensor:
        return parameter.to_local(grad_placements=[Replicate()])

    def used_on_shard(parameter: DTensor) -> Tensor:
        return parameter.to_local(grad_placements=[Partial()])

    slots = [
        ParameterSlot("", name, used_on_shard if _join(path, name) in plan.on_parts else plain)
        for name in _own_parameters(module)
    ]
    tables = [name for name, child in module.named_children() if isinstance(child, nn.Embedding)]
    copied = [name for name in tables if split_dim(module.get_submodule(name).weight) is None]
    slots += [ParameterSlot(name, "weight", plain) for name in copied]
    if not slots:
        return

    def has_dtensor(args: Any, kwargs: Any) -> bool:
        return any(isinstance(each, DTensor) for each in (*args, *kwargs.values()))

    def bring(layer: Any, args: Any, kwargs: Any) -> None:
        if not has_dtensor(args, kwargs):
            layer.swapped.append(_swap(layer, slots, ranks))

    def restore(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not has_dtensor(args, kwargs):
            _swap_back(layer.swapped.pop())

    vars(module)["swapped"] = []
    module.register_forward_pre_hook(bring, with_kwargs=True)
    module.register_forward_hook(restore, with_kwargs=True, always_call=True)
    for method in STAGE_METHODS:
        if hasattr(module, method):
            _wrap(module, method, lambda layer: _swapped(layer, slots, ranks))


def _swap(layer: nn.Module, slots: Sequence[ParameterSlot], ranks: DeviceMesh) -> Swapped:
    """Replaces parameters by other tensors and returns the parameters, for `_swap_back`."""
    kept: Swapped = []
    for child, name, change in slots:
        owner = layer.get_submodule(child)
        parameter = owner._parameters[name]
        # A parameter that FSDP has not gathered is on a mesh of more axes: FSDP gathers it when it calls the layer.
        if isinstance(parameter, DTensor) and parameter.device_mesh == ranks:
            kept.append((owner, name, parameter))
            owner._parameters[name] = change(parameter)  # plain during the call
    return kept


def _swap_back(kept: Swapped) -> None:
    for owner, name, parameter in kept:
        owner._parameters[name] = parameter


@contextmanager
def _swapped(layer: nn.Module, slots: Sequence[ParameterSlot], ranks: DeviceMesh) -> Iterator[None]:
    kept = _swap(layer, slots, ranks)
    try:
        yield
    finally:
        _swap_back(kept)


def _wrap(module: nn.Module, method: str, opened: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    inner = getattr(type(module), method)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with opened(self):
            return inner(self, *args, **kwargs)

    _bind(module, method, call)


def _bind(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    setattr(module, name, MethodType(function, module))


def _hook_output(name: str, module: nn.Module, plan: ShardingPlan, ranks: DeviceMesh, *, keeps_shard: bool) -> None:
    rules = plan.outputs.get(name, {})
    numbered = {number: axes for number, axes in rules.items() if number is not None}
    is_split = any(split_dim(each) is not None for each in _own_parameters(module).values())

    def bring(layer: nn.Module, args: Any, output: Any) -> Any:
        if None in rules:
            brought = _bring(output, rules[None], layer, ranks)
            is_whole = is_split and not any("tensor" in dim for dim in rules[None])
            return whole(brought) if is_whole else brought
        if numbered:
            several = _several(name, output, numbered)
            for number, axes in numbered.items():
                several[number] = _bring(several[number], axes, layer, ranks)
            return type(output)(*several) if hasattr(output, "_fields") else type(output)(several)
        return _plain_output(output, keeps_shard=keeps_shard)

    if rules or is_split:
        module.register_forward_hook(bring)


def _several(name: str, output: Any, rules: Mapping[int, Axes]) -> list[Any]:
    """Returns the outputs of a module as a list, to which rules refer by number."""
    if isinstance(output, tuple | list) and max(rules) < len(output):
        return list(output)
    found = f"{len(output)} of them" if isinstance(output, tuple | list) else f"a {type(output).__name__}"
    raise ConfigError(
        f"model.sharding: {name}[{max(rules)}]: is one of several outputs, but {name} returned {found}. Outputs "
        "are numbered from 0; a single one has no number."
    )


def _plain_output(output: Any, *, keeps_shard: bool) -> Any:
    """Returns the output of a sharded layer without a rule: its shard of the features, or the full tensor."""
    if keeps_shard and isinstance(output, DTensor) and split_dim(output) == output.dim() - 1:
        return output.to_local()
    return whole(output)


def _is_followed_by_rows(name: str, model: nn.Module) -> bool:
    """Returns True if a later layer nearby accepts a shard of the features; otherwise the output is gathered.

    Nearby means in the same module or its parent, but not in the whole model, where a head's output is for a loss. A
    layer that accepts a shard also accepts full features and splits them itself, so gathering is only slower.
    """
    around, _, last = name.rpartition(".")
    outer = around.rpartition(".")[0]
    scope = model.get_submodule(outer or around)
    names = [each for each, _ in scope.named_modules()] if around else [each for each, _ in model.named_children()]
    own = name.removeprefix(f"{outer or around}.") if around else last
    is_table = isinstance(model.get_submodule(name), nn.Embedding)  # with numbers per head, defined anywhere
    later = names if is_table else names[names.index(own) + 1 :] if own in names else []
    followers = [scope.get_submodule(each) for each in later]
    return any(isinstance(each, nn.Linear) and split_dim(each.weight) == 1 for each in followers)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a module itself, without those that also belong to a child."""
    of_children = {id(each) for child in module.children() for each in child.parameters()}
    own = module.named_parameters(recurse=False)
    return {name: parameter for name, parameter in own if id(parameter) not in of_children}


def _join(path: str, last: str) -> str:
    return f"{path}.{last}" if path else last
