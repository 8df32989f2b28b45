"""Gives all ranks of a split model the weights that the first rank alone has built.

    SentWeights(model, ranks)      before the split: the first rank remembers its tensors, the others have none
    give_memory(model, device)     after the split: the others make room for the parts that they keep
    send_into(model, ...)          tensor by tensor, the first rank sends, the others take their parts and let go

So a rank but the first never holds more than its parts and one whole tensor. How a model is split is placing.py's; what
is done where every rank has built the weights is equal_start.py's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainwright.errors import TrainwrightError
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.local import local, named_tensors

CHUNK_BYTES = 1 << 28
"""How much is sent at once: the largest tables have more bytes than every transport takes in one message."""


class _Whole(NamedTuple):
    """A tensor of the whole model, under all of its names; without memory on all ranks but the first."""

    names: tuple[str, ...]
    tensor: Tensor


class SentWeights:
    """The tensors of a model before it is split, buffers too. Collective: the ranks must have built the same model."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for name, tensor in named_tensors(model):
            names.setdefault(id(tensor), []).append(name)
            # Not the parameter itself, which may be moved to the device while the model is split.
            tensors.setdefault(id(tensor), tensor.detach())
        self._ranks = ranks
        self._waiting = deque(_Whole(tuple(names[key]), tensor) for key, tensor in tensors.items())
        own = [(whole.names, tuple(whole.tensor.shape), str(whole.tensor.dtype)) for whole in self._waiting]
        firsts = ranks.broadcast(own)
        if own != firsts:
            other = next(
                (pair for pair in zip(own, firsts, strict=False) if pair[0] != pair[1]), (len(own), len(firsts))
            )
            raise TrainwrightError(
                f"Rank {ranks.rank} has built another model than rank 0, which was to send it the weights: {other[0]} "
                f"instead of {other[1]}. Let all ranks have the same settings and the same code."
            )

    @torch.no_grad()
    def send_into(self, model: nn.Module, *, copy: Callable[[Tensor, Tensor], None]) -> None:
        """Sends all tensors to the split model's ranks, once; the first lets go of each that it has sent.

        `copy(target, whole)` copies into a tensor that may be split this rank's part of a whole one.
        """
        targets = dict(named_tensors(model))
        filled: set[int] = set()
        while self._waiting:
            names, whole = self._waiting.popleft()
            if self._ranks.is_first:
                self._send(whole.contiguous())
                continue
            target = next((targets[name] for name in names if name in targets), None)
            self._receive(whole, target, copy)
            filled.add(id(target))
        empty = [name for name, target in targets.items() if id(target) not in filled]
        assert self._ranks.is_first or not empty, f"nobody has sent {empty}"

    def _receive(self, like: Tensor, target: Tensor | None, copy: Callable[[Tensor, Tensor], None]) -> None:
        """Receives one tensor and lets go of it before there is the next; without a target another stage has it."""
        received = torch.empty(like.shape, dtype=like.dtype)
        self._send(received)
        if target is not None:
            copy(target, received)

    def _send(self, tensor: Tensor) -> None:
        """Copies the first rank's values into this tensor of the others."""
        # As bytes, for a transport need not know every dtype.
        for chunk in torch.split(tensor.view(-1).view(torch.uint8), CHUNK_BYTES):
            self._ranks.copy_from_first_(chunk)


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device) -> None:
    """Gives all tensors of a model that have none memory on the device, with any values in it.

    The objects stay, whoever refers to them (tied modules, FSDP), and so do their attributes and hooks: torch's
    `to_empty` makes other parameters, each name its own. Call `model.to(device)` next, for FSDP to take notice.
    """
    for tensor in {id(tensor): tensor for _, tensor in named_tensors(model)}.values():
        if not local(tensor).is_meta:
            continue
        made = torch.empty_like(tensor.detach(), device=device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        vars(made).update(vars(tensor))
        hooks = list((tensor._backward_hooks or {}).values())
        tensor._backward_hooks = None  # torch keeps them beside what is swapped, and would not call them any more
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]  # torch has no types here
        for hook in hooks:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
