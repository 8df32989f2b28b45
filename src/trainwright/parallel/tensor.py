"""Tensor parallelism: parameters become DTensors along the axis `tensor`, and modules meet them by hooks.

    split layer      given whole states, or a part of the features; returns its part, or parts of a sum
    output rule      brings what a module returns into a layout; it then travels as a DTensor, so that what follows
                     knows it: a stream that is split by position stays so through additions, dropout and norms
    other modules    compute on plain tensors; copied parameters are plain to them while they run

Where no rule says otherwise, tensors between modules are plain: whole, or the part of a rank's heads. What is split
how is sharding.py's; the vocabulary is vocabulary.py's; parameters are split further by fully_shard.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from trainwright.parallel.mesh import Mesh
from trainwright.parallel.sharding import ShardingPlan
from trainwright.parallel.sharding_rules import Axes
from trainwright.parallel.vocabulary import first_row, look_up, split_cross_entropy

PARTS_OF_FORWARD = ("begin", "finish")
"""Methods by which the stages of a pipeline run a model without its forward."""


def split_tensors(model: nn.Module, plan: ShardingPlan, mesh: Mesh) -> None:
    """Splits a model in place, which must be equal on all ranks along `tensor`; does nothing where that is one rank.

    Names stay; a tied parameter stays one. Every parameter becomes a DTensor, since optimizers take lists of one kind.
    """
    ranks = mesh.along("tensor")
    if ranks is None:
        return
    _split_parameters(model, plan, ranks)
    for name, module in model.named_modules():
        dims = [_split_dim(each) for each in _own_parameters(module).values()]
        if name in plan.inputs:
            _hook_input(module, plan.inputs[name], ranks)
        if name in plan.fused:
            _hook_fused(module, plan.fused[name], ranks)
        elif isinstance(module, nn.Embedding) and dims == [0]:
            module.forward = MethodType(_look_up, module)  # type: ignore[method-assign]  # a deep copy is bound anew
        elif any(dim is not None for dim in dims):
            _hook_split_layer(module, ranks)
        else:
            _hook_plain(name, module, plan, ranks)
        if isinstance(module, nn.Dropout):
            module.forward = MethodType(_drop, module)  # type: ignore[method-assign]
        if hasattr(module, "lora_dropout"):
            module.drop = MethodType(_drop_before_adapter, module)
        is_loss = isinstance(module, nn.modules.loss._Loss) or name.rpartition(".")[2] == "criterion"
        if is_loss:
            module.forward = MethodType(_score, module)  # type: ignore[method-assign]
        _hook_output(name, module, plan, ranks)
    model.register_forward_hook(_finish)


def loss_context(plan: ShardingPlan | None, mesh: Mesh) -> AbstractContextManager[None]:
    """Returns what must be open around forward and backward: nothing, as a split loss is an operation of its own."""
    return nullcontext()


def whole(tensor: Any) -> Any:
    """Returns a DTensor's whole as a plain tensor, with its gradient; anything else as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


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
        value = _part(value, dim, ranks).clone(memory_format=torch.contiguous_format)  # lets go of the whole
    layout = DTensor.from_local(
        value, ranks, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    split = nn.Parameter(layout, requires_grad=parameter.requires_grad)
    split.__dict__.update(parameter.__dict__)
    if dim is None and parameter.requires_grad:
        # Norms of a split stream have parts of a sum as gradient; whoever reads `.grad` shall find the sum.
        split.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))
    return split


def _part(value: Tensor, dim: int, ranks: DeviceMesh) -> Tensor:
    """Returns this rank's part of a whole tensor, without a copy; empty where there are more ranks than rows."""
    size = value.shape[dim]
    start = first_row(size, ranks)
    return value.narrow(dim, start, min(-(-size // ranks.size()), size - start))


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


def _laid_out(tensor: Any, placement: Placement, ranks: DeviceMesh) -> Any:
    """Returns a tensor as a DTensor in this layout; a plain one is whole on every rank."""
    if not isinstance(tensor, Tensor):
        return tensor
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, ranks, [Replicate()], run_check=False)
    return tensor if tensor.placements == (placement,) else tensor.redistribute(placements=[placement])


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
    by_features = isinstance(module, nn.Linear) and _split_dim(module.weight) == 1

    def bring(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        def change(given: Any) -> Any:
            if not by_features:
                return _laid_out(given, Replicate(), ranks)
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
        if _split_dim(parameter) is None:
            return gathered
        rows = gathered.unflatten(0, (count, ranks.size(), -1))[:, ranks.get_local_rank()]
        return rows.flatten(0, 1)

    def bring(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        _swap(layer, [(layer, last) for last in layer._parameters], own_rows, ranks)
        return _change_first(
            args, kwargs, lambda each: _laid_out(each, Replicate(), ranks).to_local(grad_placements=[Partial()])
        )

    module.register_forward_pre_hook(bring, with_kwargs=True)
    module.register_forward_hook(lambda layer, args, output: _swap_back(layer), always_call=True)


def _hook_plain(name: str, module: nn.Module, plan: ShardingPlan, ranks: DeviceMesh) -> None:
    """Makes copied parameters plain tensors while a module runs on plain tensors; given a DTensor they stay DTensors.

    Small tables belong also to the module above, which may read their weight without calling them.
    """
    on_parts = {id(module._parameters[last]) for last in module._parameters if _join(name, last) in plan.on_parts}
    places = [(module, last) for last in _own_parameters(module)]
    for child_name, child in module.named_children():
        if isinstance(child, nn.Embedding) and plan.layouts[_join(name, f"{child_name}.weight")].tensor_dim is None:
            places.append((child, "weight"))
    if not places:
        return
    summed = bool(on_parts)

    def plain(parameter: DTensor) -> Tensor:
        return parameter.to_local(grad_placements=[Partial() if summed else Replicate()])

    def bring(layer: nn.Module, args: Any, kwargs: Any) -> None:
        if any(isinstance(each, DTensor) for each in (*args, *kwargs.values())):
            _swap(layer, [], plain, ranks)
        else:
            _swap(layer, places, plain, ranks)

    module.register_forward_pre_hook(bring, with_kwargs=True)
    module.register_forward_hook(lambda layer, args, output: _swap_back(layer), always_call=True)
    for method in PARTS_OF_FORWARD:
        if hasattr(module, method):
            _wrap(module, method, lambda layer: _swapped(layer, places, plain, ranks))


def _swap(
    layer: nn.Module, places: list[tuple[nn.Module, str]], change: Callable[[DTensor], Tensor], ranks: DeviceMesh
) -> None:
    """Puts other tensors in the places of parameters until `_swap_back`; calls may be nested."""
    kept = []
    for owner, last in places:
        parameter = owner._parameters[last]
        # What FSDP has split and not gathered is on a mesh of more axes: whoever gathers it calls the layer itself.
        if isinstance(parameter, DTensor) and parameter.device_mesh == ranks:
            kept.append((owner, last, parameter))
            owner._parameters[last] = change(parameter)  # type: ignore[assignment]  # plain for the time of a call
    layer.__dict__.setdefault("_swapped", []).append(kept)


def _swap_back(layer: nn.Module) -> None:
    for owner, last, parameter in layer.__dict__["_swapped"].pop():
        owner._parameters[last] = parameter


@contextmanager
def _swapped(layer: nn.Module, places: Any, change: Callable[[DTensor], Tensor], ranks: DeviceMesh) -> Iterator[None]:
    _swap(layer, places, change, ranks)
    try:
        yield
    finally:
        _swap_back(layer)


def _wrap(module: nn.Module, method: str, opened: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    inner = getattr(type(module), method)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with opened(self):
            return inner(self, *args, **kwargs)

    setattr(module, method, MethodType(call, module))


def _hook_output(name: str, module: nn.Module, plan: ShardingPlan, ranks: DeviceMesh) -> None:
    rules = plan.outputs.get(name, {})
    is_head = isinstance(module, nn.Linear) and bool(rules.get(None)) and "tensor" in rules[None][-1]

    def bring(layer: nn.Module, args: Any, output: Any) -> Any:
        if is_head and not layer.training:
            return whole(output)
        if None in rules:
            return _bring(output, rules[None], layer, ranks)
        if rules:
            several = [
                _bring(each, rules[number], layer, ranks) if number in rules else each
                for number, each in enumerate(output)
            ]
            return type(output)(several)
        return _plain_output(output)

    if rules or any(_split_dim(each) is not None for each in _own_parameters(module).values()):
        module.register_forward_hook(bring)


def _plain_output(output: Any) -> Any:
    """Returns what leaves a split layer without a rule: its part of the features, or the whole."""
    if isinstance(output, DTensor) and output.placements[0].is_shard(output.dim() - 1):
        return output.to_local()
    return whole(output)


def _split_dim(parameter: Any) -> int | None:
    placement = parameter.placements[0] if isinstance(parameter, DTensor) else None
    return placement.dim if isinstance(placement, Shard) else None


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that a module has itself; one that it only holds under a second name is its child's."""
    of_children = {id(each) for child in module.children() for each in child.parameters()}
    own = module.named_parameters(recurse=False)
    return {last: one for last, one in own if id(one) not in of_children}


def _join(path: str, last: str) -> str:
    return f"{path}.{last}" if path else last


def _look_up(self: nn.Embedding, ids: Tensor) -> Tensor:
    return look_up(self.weight, ids, padding_idx=self.padding_idx)  # type: ignore[arg-type]  # it is a DTensor


def _drop(self: nn.Dropout, given: Tensor) -> Tensor:
    if not isinstance(given, DTensor) or not self.training or self.p == 0:
        return type(self).forward(self, given)
    return _drop_own(given, lambda ones: type(self).forward(self, ones))


def _drop_before_adapter(self: Any, given: Tensor) -> Tensor:
    if not isinstance(given, DTensor) or not self.training or self.lora_dropout == 0:
        return type(self).drop(self, given)  # type: ignore[no-any-return]  # a LoRALinear, which models/ knows
    return _drop_own(given, lambda ones: type(self).drop(self, ones))


def _drop_own(given: DTensor, drop: Callable[[Tensor], Tensor]) -> DTensor:
    """Drops what one process would drop: ranks share random numbers, and each takes its part of the whole's."""
    values = given.to_local()
    kept = drop(torch.ones(given.shape, dtype=values.dtype, device=values.device))
    dim = _split_dim(given)
    own = kept if dim is None else _part(kept, dim, given.device_mesh)
    return DTensor.from_local(
        values * own, given.device_mesh, given.placements, run_check=False, shape=given.shape, stride=given.stride()
    )


def _score(self: nn.Module, logits: Any, *rest: Any, **named: Any) -> Any:
    """Takes the loss of logits that are split by class as they are, where it is the plain cross entropy."""
    targets = rest[0] if len(rest) == 1 else None
    if (
        isinstance(logits, DTensor)
        and logits.placements[0].is_shard(logits.dim() - 1)
        and type(self) is nn.CrossEntropyLoss
        and self.weight is None
        and self.label_smoothing == 0.0
        and logits.dim() == 2
        and isinstance(targets, Tensor)
        and not targets.is_floating_point()
    ):
        return split_cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction=self.reduction)
    return type(self).forward(self, whole(logits), *(whole(each) for each in rest), **named)


def _finish(model: nn.Module, args: Any, outputs: Any) -> Any:
    """Returns whole tensors from the model; beside a loss in training, logits stay split, for most runs drop them."""
    if not isinstance(outputs, Mapping):
        return whole(outputs)
    if not any(isinstance(each, DTensor) for each in outputs.values()):
        return outputs
    keeps_split = model.training and outputs.get("loss") is not None
    return {name: each if keeps_split and name != "loss" else whole(each) for name, each in outputs.items()}
