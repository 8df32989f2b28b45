"""Tensor parallelism: parameters become DTensors along the axis `tensor`, and hooks adapt the modules that use them.

Includes embeddings and losses over a sharded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
    """Returns the rows [..., D] of a table [V, D] that is split by rows, as parts whose sum they are.

    Ids that the table does not have are rejected where that costs no wait for the device, as nn.Embedding does.
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
        # The row of padding is read but never learned.
        found = torch.where((ids == padding_idx)[..., None], found.detach(), found)
    return DTensor.from_local(found, mesh, [Partial()], run_check=False)


def split_cross_entropy(logits: DTensor, targets: Tensor, *, ignore_index: int, reduction: str) -> Tensor:
    """Returns the cross entropy of logits [N, V], split by columns, on targets [N] that every rank has."""
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
    """Returns where this rank's part of a split dim begins: parts are of equal size but for the last ones."""
    length = -(-size // mesh.size())
    return min(length * mesh.get_local_rank(), size)


def over_ranks(tensor: Tensor, mesh: DeviceMesh, operation: str) -> Tensor:
    """Returns the sum or the maximum of a tensor over the ranks of a mesh of one axis; outside of autograd."""
    return (
        DTensor.from_local(tensor, mesh, [Partial(operation)], run_check=False)
        .redistribute(placements=[Replicate()])
        .to_local()
    )


def _check_range(ids: Tensor, num_rows: int) -> None:
    try:
        # torch's only assertion that does not wait for the device; it has no public name.
        torch._assert_async(((ids >= 0) & (ids < num_rows)).all())
    except RuntimeError as error:
        raise IndexError(f"ids from {int(ids.min())} to {int(ids.max())} in a table of {num_rows} rows") from error


class _SplitCrossEntropy(torch.autograd.Function):
    """Works on one rank's columns; the largest logit, the sum of exponentials and the target's logit are exchanged."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, mesh: DeviceMesh) -> Tensor:
        is_here = (targets >= start) & (targets < start + logits.shape[-1])
        chosen = torch.where(is_here, targets - start, 0)[:, None]
        if logits.shape[-1] == 0:  # more ranks than tokens: this one adds nothing
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
    """Returns a DTensor's whole as a plain tensor, with its gradient; anything else as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


def split_dim(tensor: Any) -> int | None:
    """Returns the dim in which a DTensor on one axis is split; None where it is not, or plain."""
    placement = tensor.placements[0] if isinstance(tensor, DTensor) else None
    return placement.dim if isinstance(placement, Shard) else None


def own_part(value: Tensor, dim: int, ranks: DeviceMesh) -> Tensor:
    """Returns this rank's part of a whole tensor, without a copy; empty where there are more ranks than rows."""
    size = value.shape[dim]
    start = first_row(size, ranks)
    return value.narrow(dim, start, min(-(-size // ranks.size()), size - start))


def look_up_rows(self: nn.Embedding, ids: Tensor) -> Tensor:
    """An embedding whose rows are split."""
    return look_up(self.weight, ids, padding_idx=self.padding_idx)  # type: ignore[arg-type]  # it is a DTensor


def drop(self: nn.Dropout, given: Tensor) -> Tensor:
    """A dropout on states that may be split."""
    if not isinstance(given, DTensor) or not self.training or self.p == 0:
        return type(self).forward(self, given)
    return _drop_own(given, lambda ones: type(self).forward(self, ones))


def drop_before_adapter(self: Any, given: Tensor) -> Tensor:
    """The dropout of an adapter's input; `self` is a LoRALinear, which is known in models/ only."""
    plain: Callable[[Any, Tensor], Tensor] = type(self).drop
    if not isinstance(given, DTensor) or not self.training or self.lora_dropout == 0:
        return plain(self, given)
    return _drop_own(given, lambda ones: plain(self, ones))


def score(self: nn.Module, logits: Any, *rest: Any, **named: Any) -> Any:
    """A loss: the plain cross entropy takes logits that are split by class as they are, any other the whole."""
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
    """A hook of the model: returns whole tensors, but leaves logits beside a loss split while training.

    Most runs drop them, and all ranks would wait for the largest tensor there is. Used beside plain tensors they raise.
    """
    if not isinstance(outputs, Mapping):
        return whole(outputs)
    if not any(isinstance(each, DTensor) for each in outputs.values()):
        return outputs
    keeps_split = model.training and outputs.get("loss") is not None
    return {name: each if keeps_split and name != "loss" else whole(each) for name, each in outputs.items()}


def _drop_own(given: DTensor, drop_all: Callable[[Tensor], Tensor]) -> DTensor:
    """Drops what one process would drop: ranks share random numbers, and each takes its part of the whole's."""
    values = given.to_local()
    kept = drop_all(torch.ones(given.shape, dtype=values.dtype, device=values.device))
    dim = split_dim(given)
    own = kept if dim is None else own_part(kept, dim, given.device_mesh)
    return DTensor.from_local(
        values * own, given.device_mesh, given.placements, run_check=False, shape=given.shape, stride=given.stride()
    )


__all__ = ["split_tensors", "whole"]

PARTS_OF_FORWARD = ("begin", "finish")
"""Methods by which the stages of a pipeline run a model without its forward."""


Swapped = list[tuple[nn.Module, str, nn.Parameter]]
"""Parameters that other tensors stand in for: their module, their name there, and they themselves."""


class ParameterSlot(NamedTuple):
    """A parameter of a module, or of a child of it, and what stands there while the module runs."""

    child: str
    name: str
    change: Callable[[DTensor], Tensor]


def split_tensors(model: nn.Module, plan: ShardingPlan, mesh: Mesh) -> None:
    """Splits a model in place, which must be equal on all ranks along `tensor`; does nothing where that is one rank.

    Names stay; a tied parameter stays one. Every parameter becomes a DTensor, since optimizers take lists of one kind.
    """
    ranks = mesh.along("tensor")
    if ranks is None:
        return
    _split_parameters(model, plan, ranks)
    for name, module in model.named_modules():
        dims = [split_dim(each) for each in _own_parameters(module).values()]
        if name in plan.inputs:
            _hook_input(module, plan.inputs[name], ranks)
        if name in plan.fused:
            _hook_fused(module, plan.fused[name], ranks)
        elif isinstance(module, nn.Embedding) and dims == [0]:
            _bind(module, "forward", look_up_rows)
        elif any(dim is not None for dim in dims):
            _hook_split_layer(module, ranks)
        else:
            _hook_plain(name, module, plan, ranks)
        if isinstance(module, nn.Dropout):
            _bind(module, "forward", drop)
        if hasattr(module, "lora_dropout"):
            _bind(module, "drop", drop_before_adapter)
        if _is_loss(module) or name.rpartition(".")[2] == "criterion":
            _bind(module, "forward", score)
        _hook_output(name, module, plan, ranks, keeps_part=_is_met_by_rows(name, model))
    model.register_forward_hook(return_whole)


def _is_loss(module: nn.Module) -> bool:
    """Returns True for torch's losses and what inherits from them; their common class is private."""
    return any(kind.__module__ == nn.modules.loss.__name__ for kind in type(module).__mro__)


def _split_parameters(model: nn.Module, plan: ShardingPlan, ranks: DeviceMesh) -> None:
    done: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in done:
            done[id(parameter)] = _split_parameter(parameter, plan.layouts[name].tensor_dim, ranks)
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._parameters[last] = done[id(parameter)]


def _split_parameter(parameter: nn.Parameter, dim: int | None, ranks: DeviceMesh) -> nn.Parameter:
    placement: Placement = Replicate() if dim is None else Shard(dim)
    value = parameter.detach()
    if dim is not None:
        value = own_part(value, dim, ranks).clone(memory_format=torch.contiguous_format)  # lets go of the whole
    layout = DTensor.from_local(
        value, ranks, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    split = nn.Parameter(layout, requires_grad=parameter.requires_grad)
    vars(split).update(vars(parameter))
    if dim is None and parameter.requires_grad:
        # Norms of a split stream have parts of a sum as gradient; whoever reads `.grad` shall find the sum.
        split.register_hook(  # type: ignore[no-untyped-call]  # torch has no types here
            lambda grad: grad.redistribute(placements=[Replicate()])
        )
    return split


def _bring(tensor: Any, axes: Axes, layer: nn.Module, ranks: DeviceMesh) -> Any:
    """Returns what a layer is given or returns in the layout of a rule; a shorter rule speaks of the last dims.

    Outside of training states are whole: there is little to keep, and a token at a time cannot be split by position.
    """
    if not isinstance(tensor, Tensor):
        return tensor
    from_last = next((number for number, dim in enumerate(reversed(axes)) if "tensor" in dim), None)
    if from_last is None or not layer.training:
        return _laid_out(tensor, Replicate(), ranks)
    return _laid_out(tensor, Shard(tensor.dim() - 1 - from_last), ranks)


def _laid_out(tensor: Tensor, placement: Placement, ranks: DeviceMesh) -> DTensor:
    """Returns a tensor as a DTensor in this layout; a plain one is whole on every rank."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, ranks, [Replicate()], run_check=False)
    if tensor.placements == (placement,):
        return tensor
    dims = [each.dim for each in (*tensor.placements, placement) if isinstance(each, Shard)]
    is_even = all(tensor.shape[dim] % ranks.size() == 0 for dim in dims)
    # Traced by torch's compiler, a function of DTensors has gradients in another layout than it says.
    if is_even or torch.compiler.is_compiling():
        return tensor.redistribute(placements=[placement])
    return _in_one_piece(_in_one_piece(tensor).redistribute(placements=[placement]))


def _in_one_piece(tensor: DTensor) -> DTensor:
    """Returns the same with contiguous memory, forward and backward.

    What is gathered from uneven parts is a view of something larger, which matrix products reject in torch 2.11.
    """
    apply: Callable[[DTensor], DTensor] = _InOnePiece.apply  # torch has no types here
    return apply(tensor)


class _InOnePiece(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> DTensor:
        return _copied(tensor)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return _copied(grad)


def _copied(tensor: DTensor) -> DTensor:
    values, layout = tensor.to_local().contiguous(), tensor.placements
    return DTensor.from_local(
        values, tensor.device_mesh, layout, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _change_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Returns the arguments with the first one changed, wherever it stands."""
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


def _hook_split_layer(module: nn.Module, ranks: DeviceMesh) -> None:
    """Gives a layer with split parameters its input in the layout that it needs; torch's DTensor does the rest."""
    by_features = isinstance(module, nn.Linear) and split_dim(module.weight) == 1

    def bring(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        def change(given: Any) -> Any:
            if not isinstance(given, Tensor) or not by_features:
                return _laid_out(given, Replicate(), ranks) if isinstance(given, Tensor) else given
            last = Shard(given.dim() - 1)
            if not isinstance(given, DTensor) and given.shape[-1] != layer.in_features:
                return DTensor.from_local(given, ranks, [last], run_check=False)  # a rank's heads, or its features
            return _laid_out(given, last, ranks)

        return _change_first(args, kwargs, change)

    module.register_forward_pre_hook(bring, with_kwargs=True)


def _hook_fused(module: nn.Module, count: int, ranks: DeviceMesh) -> None:
    """Lets a layer of several projections compute this rank's rows of each, which it gathers from all ranks.

    A rank keeps a consecutive part of the rows, as any other parameter's, so that checkpoints know no difference.
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
    """Makes copied parameters plain tensors while a module runs on plain tensors; given a DTensor they stay DTensors.

    Small tables belong also to the module above, which may read their weight without calling them.
    """

    def plain(parameter: DTensor) -> Tensor:
        return parameter.to_local(grad_placements=[Replicate()])

    def used_on_parts(parameter: DTensor) -> Tensor:
        return parameter.to_local(grad_placements=[Partial()])

    slots = [
        ParameterSlot("", name, used_on_parts if _join(path, name) in plan.on_parts else plain)
        for name in _own_parameters(module)
    ]
    tables = [name for name, child in module.named_children() if isinstance(child, nn.Embedding)]
    copied = [name for name in tables if split_dim(module.get_submodule(name).weight) is None]
    slots += [ParameterSlot(name, "weight", plain) for name in copied]
    if not slots:
        return

    def meets_split(args: Any, kwargs: Any) -> bool:
        return any(isinstance(each, DTensor) for each in (*args, *kwargs.values()))

    def bring(layer: Any, args: Any, kwargs: Any) -> None:
        if not meets_split(args, kwargs):
            layer.swapped.append(_swap(layer, slots, ranks))

    def restore(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not meets_split(args, kwargs):
            _swap_back(layer.swapped.pop())

    vars(module)["swapped"] = []
    module.register_forward_pre_hook(bring, with_kwargs=True)
    module.register_forward_hook(restore, with_kwargs=True, always_call=True)
    for method in PARTS_OF_FORWARD:
        if hasattr(module, method):
            _wrap(module, method, lambda layer: _swapped(layer, slots, ranks))


def _swap(layer: nn.Module, slots: Sequence[ParameterSlot], ranks: DeviceMesh) -> Swapped:
    """Puts other tensors in the places of parameters and returns what was there, for `_swap_back`."""
    kept: Swapped = []
    for child, name, change in slots:
        owner = layer.get_submodule(child)
        parameter = owner._parameters[name]
        # What FSDP has split and not gathered is on a mesh of more axes: whoever gathers it calls the layer itself.
        if isinstance(parameter, DTensor) and parameter.device_mesh == ranks:
            kept.append((owner, name, parameter))
            owner._parameters[name] = change(parameter)  # plain for the time of a call
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


def _hook_output(name: str, module: nn.Module, plan: ShardingPlan, ranks: DeviceMesh, *, keeps_part: bool) -> None:
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
        return _plain_output(output, keeps_part=keeps_part)

    if rules or is_split:
        module.register_forward_hook(bring)


def _several(name: str, output: Any, rules: Mapping[int, Axes]) -> list[Any]:
    """Returns what a module has returned as a list, of which rules name some by number."""
    if isinstance(output, tuple | list) and max(rules) < len(output):
        return list(output)
    found = f"{len(output)} of them" if isinstance(output, tuple | list) else f"a {type(output).__name__}"
    raise ConfigError(
        f"model.sharding: {name}[{max(rules)}]: names one of several outputs, but {name} has returned {found}. Outputs "
        "are counted from 0; a single one is named without a number."
    )


def _plain_output(output: Any, *, keeps_part: bool) -> Any:
    """Returns what leaves a split layer without a rule: its part of the features, or the whole."""
    if keeps_part and isinstance(output, DTensor) and split_dim(output) == output.dim() - 1:
        return output.to_local()
    return whole(output)


def _is_met_by_rows(name: str, model: nn.Module) -> bool:
    """Does a layer follow nearby that takes a part of the features? Else what this one returns is gathered.

    Nearby is beside it, or in the module around both, but not in the whole model: what its head returns meets a loss.
    A layer that is given whole features where it could take a part cuts them itself, so that gathering is only slower.
    """
    around, _, last = name.rpartition(".")
    outer = around.rpartition(".")[0]
    scope = model.get_submodule(outer or around)
    names = [each for each, _ in scope.named_modules()] if around else [each for each, _ in model.named_children()]
    own = name.removeprefix(f"{outer or around}.") if around else last
    is_table = isinstance(model.get_submodule(name), nn.Embedding)  # of numbers by head, wherever it was made
    later = names if is_table else names[names.index(own) + 1 :] if own in names else []
    followers = [scope.get_submodule(each) for each in later]
    return any(isinstance(each, nn.Linear) and split_dim(each.weight) == 1 for each in followers)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that a module has itself; one that it only holds under a second name is its child's."""
    of_children = {id(each) for child in module.children() for each in child.parameters()}
    own = module.named_parameters(recurse=False)
    return {name: one for name, one in own if id(one) not in of_children}


def _join(path: str, last: str) -> str:
    return f"{path}.{last}" if path else last
