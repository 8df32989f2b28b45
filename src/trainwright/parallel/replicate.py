"""Equal replicas: equal weights at the start, gradients summed once per update, and the norm of all gradients."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.errors import TrainwrightError
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import Mesh, is_split, local, named_tensors, own_gradient

logger = logging.getLogger(__name__)


@torch.no_grad()
def make_equal(model: torch.nn.Module, ranks: Ranks) -> None:
    """Compares the ranks' models and, where they differ, copies the first rank's; before the model is split."""
    tensors = [*model.parameters(), *model.buffers()]
    if ranks.size == 1 or any(tensor.is_meta for tensor in tensors):
        return
    on_host = [tensor.detach().to("cpu") for tensor in tensors]
    everybodys = ranks.gather([_checksum(each) for each in on_host])
    if all(each == everybodys[0] for each in everybodys):
        return
    logger.info("The ranks have built different models, though from one seed: the first rank's weights are used.")
    for tensor, copy in zip(tensors, on_host, strict=True):
        ranks.copy_from_first_(copy)
        tensor.copy_(copy)


def _checksum(tensor: torch.Tensor) -> int:
    """A sum of the bits: fast, and different for other draws, which is all that is asked."""
    values = tensor.contiguous().reshape(-1)
    wide = torch.int32 if values.element_size() >= 4 else torch.uint8
    return int(values.view(wide).sum(dtype=torch.int64))


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


class GradientNorm:
    """Measures the gradients of a model that is split over ranks.

    `num_stages` says of parameters, by their id, how many stages of a pipeline hold them, where that is not one.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], mesh: Mesh, *, num_stages: Mapping[int, int] | None = None
    ) -> None:
        self._parameters = list(parameters)
        stages = num_stages or {}
        self._copies = [num_copies(each, mesh) * stages.get(id(each), 1) for each in self._parameters]

    def gradients(self) -> list[torch.Tensor]:
        """Returns what of the gradients lies on this rank, laid out as the parameters are."""
        return [gradient for each in self._parameters if (gradient := own_gradient(each)) is not None]

    @torch.no_grad()
    def measure(self) -> torch.Tensor:
        """Returns the 2-norm of all gradients together; every rank of the run must ask."""
        held: dict[int, list[torch.Tensor]] = {}
        for parameter, copies in zip(self._parameters, self._copies, strict=True):
            gradient = own_gradient(parameter)
            if gradient is not None:
                held.setdefault(copies, []).append(gradient)
        first = self._parameters[0]
        total = torch.zeros((), dtype=torch.float64, device=first.device)
        for copies, gradients in held.items():
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
            total += norms.square().sum() / copies
        dist.all_reduce(total)
        return total.sqrt().to(torch.promote_types(first.dtype, torch.float32))


def num_copies(parameter: torch.Tensor, mesh: Mesh) -> int:
    """Returns how many ranks hold the same values of a parameter as this one."""
    copies = mesh.size("replicate", "fsdp", "context", "tensor")
    if is_split(parameter):
        layout = parameter.device_mesh  # type: ignore[attr-defined]  # a DTensor
        for number, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                copies //= layout.size(number)
    return copies


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
