"""What tables, dropouts, losses and adapters do in a model that is split along `tensor`, in place of their forwards.

Each is a method that tensor.py binds to a module (a deep copy is bound anew). Given plain tensors they do what their
class does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainwright.parallel.vocabulary import first_row, look_up, split_cross_entropy


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
