"""Equal replicas: sums the gradients of all ranks, once per update.

The gradients are packed into buckets whose sums run beside each other. Works with any forward, unused
and frozen parameters included, because it looks at gradients and not at modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from trainwright.parallel.collectives import Ranks

BUCKET_BYTES = 25 * 2**20
SMALL_BYTES = 2**16


class GradientSum:
    """Sums `.grad` of the parameters over ranks in place.

    `enter` is told "reduce" before the ranks talk to each other and "update" afterwards; nothing with one process.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], ranks: Ranks, *, enter: Callable[[str], None] | None = None
    ) -> None:
        # Frozen ones too: a hook may unfreeze them later, and one without a gradient costs a flag.
        self._parameters = list(parameters)
        self._ranks = ranks
        self._enter = enter

    def reduce(self, totals: torch.Tensor) -> None:
        """Sums the gradients, and `totals`, over all ranks. With one process it does nothing.

        A parameter that has a gradient on any rank gets the sum on every rank; one that has it nowhere
        keeps None, so that optimizers leave it alone.
        """
        if self._ranks.size == 1:
            return
        if self._enter is not None:
            self._enter("reduce")
        present = torch.tensor([parameter.grad is not None for parameter in self._parameters], dtype=torch.int32)
        waiting = [dist.all_reduce(totals, async_op=True)]
        flags = present.to(totals.device)
        waiting.append(dist.all_reduce(flags, async_op=True))
        buckets = [(bucket, self._pack(bucket)) for bucket in self._buckets()]
        waiting += [dist.all_reduce(flat, async_op=True) for _, flat in buckets]
        for work in waiting:
            work.wait()
        # Only a rank that lacks a gradient needs to know whether another has it; reading that waits for the device.
        absent = [] if bool(present.all()) else (flags == 0).tolist()
        for bucket, flat in buckets:
            self._unpack(bucket, flat, absent)
        if self._enter is not None:
            self._enter("update")

    def _buckets(self) -> Iterator[list[int]]:
        """Yields parameter numbers of one dtype and device, in buckets of at most BUCKET_BYTES."""
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, parameter in enumerate(self._parameters):
            groups.setdefault((parameter.dtype, parameter.device), []).append(number)
        for numbers in groups.values():
            bucket: list[int] = []
            size = 0
            for number in numbers:
                size += self._parameters[number].nbytes
                bucket.append(number)
                if size >= BUCKET_BYTES:
                    yield bucket
                    bucket, size = [], 0
            if bucket:
                yield bucket

    def _pack(self, bucket: list[int]) -> torch.Tensor:
        pieces = []
        for number in bucket:
            parameter = self._parameters[number]
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            pieces.append(grad.reshape(-1))
        return torch.cat(pieces)

    def _unpack(self, bucket: list[int], flat: torch.Tensor, absent: list[bool]) -> None:
        offset = 0
        for number in bucket:
            parameter = self._parameters[number]
            piece = flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
            if absent and absent[number]:
                continue
            if parameter.grad is None:
                parameter.grad = piece.clone()
            else:
                parameter.grad.copy_(piece)


@torch.no_grad()
def copy_from_first(tensors: Iterable[torch.Tensor], ranks: Ranks) -> None:
    """Gives every rank the first rank's values: parameters at the start, running means before they are used."""
    if ranks.size == 1:
        return
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes > SMALL_BYTES:
            dist.broadcast(tensor.data, src=0)
        else:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor.data)
    for same in small.values():  # one message for many: running means are small and numerous
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, src=0)
        if not ranks.is_first:
            for tensor, piece in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
