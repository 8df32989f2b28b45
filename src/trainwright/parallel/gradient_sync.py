"""When the gradients of split parameters are reduced over ranks, and what the reduction must not miss.

FSDP2 reduces a block's gradients when its backward is done, in one message. All ranks must send the same ones, so a
parameter that this rank's loss did not touch sends zeros; if it was so on every rank, its gradient is None again
before the update, for an optimizer must leave it alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


class GradientSync:
    """Steers the reductions of one update: `begin_backward` before each backward, `finish` after the last.

    `averaging` is what gradients are divided by on their way: the ranks that share along data, context and replicate.
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
        self.averaging = 1
        for group in self._groups:
            self.averaging *= dist.get_world_size(group)
        self._split = [one for module in self._modules for group in _groups_of(module) for one in group.fsdp_params]
        self._touched: set[int] = set()
        """The parameters, by id, that got a gradient on this rank since the last `finish`."""
        self._finished: dict[int, weakref.ref[torch.Tensor]] = {}
        """The gradients that were there at the last `finish`. Whoever clears them does not tell; a dead one is gone."""
        for module in self._modules:
            for group in _groups_of(module):
                group.post_backward = self._with_zeros(group, group.post_backward)

    def begin_backward(self, *, is_last: bool) -> None:
        """Says before a micro-batch's backward, best before its forward, whether the update follows it.

        Where that is not known, say True each time: reductions add up, and cost more.
        """
        for module in self._modules:
            if self._waits_for_last:
                module.set_requires_gradient_sync(is_last, recurse=False)
            elif len(self._groups) > 1:
                module.set_requires_all_reduce(is_last, recurse=False)

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the gradients of this update whole; collective. Parameters are in their parts afterwards.

        Called after the last backward and before any gradient is read; again where a step has several updates.
        """
        for module in self._modules:
            # A forward that no backward followed leaves its block gathered: the update would not reach those weights.
            module.reshard()
        if not self._groups:
            return
        parameters = [one.sharded_param for one in self._split]
        present = [id(parameter) in self._touched or self._was_finished(parameter) for parameter in parameters]
        present += [parameter.grad is not None for parameter in self._whole]
        self._touched.clear()
        device = (parameters or self._whole)[0].device
        flags = torch.tensor(present, dtype=torch.int32).to(device, non_blocking=True)
        self._reduce(flags)
        for some in _by_dtype(self._whole):
            flat = torch.cat([_gradient_or_zeros(parameter).reshape(-1) for parameter in some])
            self._reduce(flat)
            flat.div_(self.averaging)
            for parameter, piece in zip(some, flat.split([each.numel() for each in some]), strict=True):  # type: ignore[no-untyped-call]
                parameter.grad = piece.view(parameter.shape)
        # Only a rank that lacks a gradient needs to know whether another has it; reading that waits for the device.
        if not all(present):
            for parameter, count in zip([*parameters, *self._whole], flags.tolist(), strict=True):
                if count == 0:
                    parameter.grad = None
        self._finished = {id(each): weakref.ref(each.grad) for each in parameters if each.grad is not None}

    def _was_finished(self, parameter: nn.Parameter) -> bool:
        """Is this gradient, apart from zeros, the one of the last `finish`?"""
        known = self._finished.get(id(parameter))
        return known is not None and parameter.grad is not None and known() is parameter.grad

    def _reduce(self, tensor: torch.Tensor) -> None:
        for group in self._groups:
            dist.all_reduce(tensor, group=group)

    def _with_zeros(self, group: Any, post_backward: Callable[..., None]) -> Callable[..., None]:
        """Returns FSDP2's act after a block's backward, with zeros for what got no gradient.

        torch has a setting for it from 2.13 on, which does not tell which gradients were zeros.
        """

        def fill_and_reduce(*unused: Any) -> None:
            for one in group.fsdp_params:
                if not hasattr(one, "_unsharded_param") or not one.sharded_param.requires_grad:
                    continue
                if one._unsharded_param.grad is not None or one.unsharded_accumulated_grad is not None:
                    self._touched.add(id(one.sharded_param))
                elif group.reduce_grads:
                    one._unsharded_param.grad = torch.zeros_like(one._unsharded_param)
            post_backward(*unused)

        return fill_and_reduce


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, []).append(parameter)
    return list(kinds.values())


def _gradient_or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
