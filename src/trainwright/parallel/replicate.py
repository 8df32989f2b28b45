"""Equal replicas: sums the gradients of all copies of the model, once per update.

The gradients are packed into buckets whose sums run beside each other, and beside the backward that makes the
gradients where it is known to be the update's last. Works with any forward, unused and frozen parameters included,
because it looks at gradients and not at modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainwright.errors import TrainwrightError
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.local import is_split, local, own_gradient

FIRST_BYTES = 2**20
"""The first bucket is small, so that ranks begin to talk early."""
BUCKET_BYTES = 25 * 2**20
SMALL_BYTES = 2**16


class GradientSum:
    """Sums `.grad` of the parameters over the copies of the model, in place.

    `enter` is told "reduce" before the ranks talk to each other and "update" afterwards; nothing with one process.
    Where each rank holds a part of the model (FSDP) gradients are summed elsewhere, and here only what `reduce` is
    given.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        ranks: Ranks,
        *,
        sums_gradients: bool = True,
        enter: Callable[[str], None] | None = None,
    ) -> None:
        # Frozen ones too: a hook may unfreeze them later, and one without a gradient costs a flag.
        self._parameters = list(parameters)
        self._ranks = ranks
        self._group = ranks.mesh.group("replicate")
        self._enter = enter
        self._sums_gradients = sums_gradients and ranks.mesh.size("replicate") > 1
        self._buckets = self._make_buckets() if self._sums_gradients else []
        self._hooks: list[Any] = []
        self._homes: list[int] = []
        """The bucket of each parameter."""
        self._left: list[int] = []
        """How many gradients each bucket waits for in the last backward."""
        self._is_last = False
        self._seen: set[int] = set()
        """The parameters whose gradients have come in the last backward."""
        self._overlaps: bool | None = None
        """Do sums run beside the backward? None until one has shown that no gradient comes in several parts. Ranks
        may answer differently: the order of the sums is the same."""
        self._under_way: list[tuple[torch.Tensor, Any]] = []

    def begin_last_backward(self) -> None:
        """Lets the sums of this update begin while its last backward still runs, bucket after bucket.

        Only for who is sure that no further backward follows: a gradient is not to be added to once it is summed.
        """
        if not self._sums_gradients:
            return
        if not self._hooks:
            numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
            homes = {number: home for home, bucket in enumerate(self._buckets) for number in bucket}
            self._homes = [homes[number] for number in range(len(self._parameters))]
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda each: self._note(numbers[id(each)])
                )
                for parameter in self._parameters
                if parameter.requires_grad
            ]
        self._left = [sum(self._parameters[number].requires_grad for number in bucket) for bucket in self._buckets]
        self._seen.clear()
        self._is_last = True

    def _note(self, number: int) -> None:
        """A gradient is whole: begins the sums of the buckets that are, in their order, for all ranks keep it."""
        if not self._is_last:
            return
        home = self._homes[number]
        if number in self._seen:
            self._overlaps = False
            if home < len(self._under_way):
                raise TrainwrightError(
                    f"A parameter of shape {list(self._parameters[number].shape)} got its gradient in several parts in "
                    "one backward, after ranks had begun to sum it. torch.utils.checkpoint with use_reentrant=True "
                    "around a layer that is used twice does that: use use_reentrant=False."
                )
            return
        self._seen.add(number)
        self._left[home] -= 1
        while self._overlaps and len(self._under_way) < len(self._buckets) and self._left[len(self._under_way)] == 0:
            self._begin_next()

    def _begin_next(self) -> None:
        flat = self._pack(self._buckets[len(self._under_way)])
        self._under_way.append((flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def reduce(self, totals: torch.Tensor) -> None:
        """Sums the gradients over the copies, and `totals` over all ranks. With one process it does nothing.

        A parameter that has a gradient on any rank gets the sum on every rank; one that has it nowhere
        keeps None, so that optimizers leave it alone.
        """
        if self._ranks.size == 1:
            return
        self._is_last = False
        if self._enter is not None:
            self._enter("reduce")
        while len(self._under_way) < len(self._buckets):
            self._begin_next()
        sums, self._under_way = self._under_way, []
        if self._overlaps is None and self._seen:
            self._overlaps = True  # a whole backward has gone by, and each gradient came once
        waiting = [dist.all_reduce(totals, async_op=True)]
        present = [parameter.grad is not None for parameter in self._parameters]
        flags = torch.ones(len(present), dtype=torch.int32, device=totals.device)
        if not all(present):
            flags.copy_(torch.tensor(present, dtype=torch.int32))
        if self._sums_gradients:
            waiting.append(dist.all_reduce(flags, group=self._group, async_op=True))
        for work in [*(work for _, work in sums), *waiting]:
            work.wait()
        # Only a rank that lacks a gradient needs to know whether another has it; reading that waits for the device.
        absent = [] if all(present) else (flags == 0).tolist()
        for bucket, (flat, _) in zip(self._buckets, sums, strict=True):
            self._unpack(bucket, flat, absent)
        if self._enter is not None:
            self._enter("update")

    def _make_buckets(self) -> list[list[int]]:
        """Returns parameter numbers of one dtype and device, in buckets of at most BUCKET_BYTES.

        The last parameters come first, for their gradients do.
        """
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, parameter in reversed(list(enumerate(self._parameters))):
            groups.setdefault((parameter.dtype, parameter.device), []).append(number)
        buckets: list[list[int]] = []
        for numbers in groups.values():
            bucket: list[int] = []
            size = 0
            for number in numbers:
                size += local(self._parameters[number]).nbytes
                bucket.append(number)
                if size >= (BUCKET_BYTES if buckets else FIRST_BYTES):
                    buckets.append(bucket)
                    bucket, size = [], 0
            if bucket:
                buckets.append(bucket)
        return buckets

    @torch.no_grad()
    def _pack(self, bucket: list[int]) -> torch.Tensor:
        pieces = []
        for number in bucket:
            gradient = own_gradient(self._parameters[number])
            if gradient is None:
                gradient = torch.zeros_like(local(self._parameters[number]))
            pieces.append(gradient.reshape(-1))
        return torch.cat(pieces)

    @torch.no_grad()
    def _unpack(self, bucket: list[int], flat: torch.Tensor, absent: list[bool]) -> None:
        sizes = [local(self._parameters[number]).numel() for number in bucket]
        for number, piece in zip(bucket, torch.split(flat, sizes), strict=True):
            parameter = self._parameters[number]
            if absent and absent[number]:
                continue
            summed = piece.view(local(parameter).shape)
            if not is_split(parameter):
                parameter.grad = summed  # a view: one copy less
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local(parameter.grad).copy_(summed)


@torch.no_grad()
def copy_from_first(tensors: Iterable[torch.Tensor], ranks: Ranks) -> None:
    """Gives every rank the values of the first with the same layers: running means before they are used."""
    if ranks.size == 1:
        return
    source, group = ranks.mesh.first_of_stage, ranks.mesh.stage
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes > SMALL_BYTES:
            dist.broadcast(tensor.data, src=source, group=group)
        else:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor.data)
    for same in small.values():  # one message for many: running means are small and numerous
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, src=source, group=group)
        if ranks.rank != source:
            for tensor, piece in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
