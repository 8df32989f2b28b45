"""Keeps replicas equal: equal weights at the start, one reduction of gradients per update, and the norm of all
gradients."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.errors import TrainwrightError
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import Mesh, gradient_dtype, is_split, local, named_tensors, own_gradient

logger = logging.getLogger(__name__)


@torch.no_grad()
def make_equal(model: torch.nn.Module, ranks: Ranks) -> None:
    """Compares the models of the ranks and copies rank 0's if they differ; called before the model is sharded."""
    tensors = [*model.parameters(), *model.buffers()]
    if ranks.size == 1 or any(tensor.is_meta for tensor in tensors):
        return
    on_host = [tensor.detach().to("cpu") for tensor in tensors]
    checksums = ranks.gather([_checksum(each) for each in on_host])
    if all(each == checksums[0] for each in checksums):
        return
    logger.info("The ranks have built different models from one seed: the weights of rank 0 are used.")
    for tensor, copy in zip(tensors, on_host, strict=True):
        ranks.copy_from_first_(copy)
        tensor.copy_(copy)


def _checksum(tensor: torch.Tensor) -> int:
    """Returns a sum of the bits, which is fast and differs for other random values."""
    values = tensor.contiguous().reshape(-1)
    wide = torch.int32 if values.element_size() >= 4 else torch.uint8
    return int(values.view(wide).sum(dtype=torch.int64))


CHUNK_BYTES = 1 << 28
"""The size of one message; the largest tables exceed the limit of some transports."""


class SentWeights:
    """The parameters and buffers of a model before it is sharded. Collective: all ranks must build the same model."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for name, tensor in named_tensors(model):
            names.setdefault(id(tensor), []).append(name)
            # Not the parameter itself, which may be moved to the device when the model is sharded.
            tensors.setdefault(id(tensor), tensor.detach())
        self._ranks = ranks
        # Full tensors with all of their names; without memory on all ranks except rank 0.
        self._unsent = deque((tuple(names[key]), tensor) for key, tensor in tensors.items())
        own = [(names, tuple(tensor.shape), str(tensor.dtype)) for names, tensor in self._unsent]
        expected = ranks.broadcast(own)
        if own != expected:
            pairs = zip_longest(own, expected, fillvalue="nothing")
            found, wanted = next(pair for pair in pairs if pair[0] != pair[1])
            raise TrainwrightError(
                f"Rank {ranks.rank} has built another model than rank 0, which sends it the weights: {found} instead "
                f"of {wanted}. Use the same settings and the same code on all ranks."
            )

    @torch.no_grad()
    def send_into(self, model: nn.Module, *, copy: Callable[[Tensor, Tensor], None]) -> None:
        """Sends all tensors to the ranks of the sharded model, once; rank 0 frees each tensor after sending it.

        `copy(target, full)` copies this rank's shard of a full tensor into a tensor that may be a DTensor.
        """
        targets = dict(named_tensors(model))
        filled: set[int] = set()
        while self._unsent:
            names, full = self._unsent.popleft()
            if self._ranks.is_first:
                self._broadcast(full.contiguous())
                continue
            full = torch.empty(full.shape, dtype=full.dtype)
            self._broadcast(full)
            target = next((targets[name] for name in names if name in targets), None)
            if target is not None:  # otherwise another stage has it
                copy(target, full)
                filled.add(id(target))
        empty = [name for name, target in targets.items() if id(target) not in filled]
        assert self._ranks.is_first or not empty, f"no values were sent for {empty}"

    def _broadcast(self, tensor: Tensor) -> None:
        # As bytes, because a transport may not support every dtype.
        for chunk in torch.split(tensor.view(-1).view(torch.uint8), CHUNK_BYTES):
            self._ranks.copy_from_first_(chunk)


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device) -> None:
    """Allocates uninitialized memory on the device for all meta tensors of a model.

    Keeps the tensor objects (for tied modules and FSDP) with their attributes and hooks, whereas torch's `to_empty`
    creates new parameters, one per name. Call `model.to(device)` next, which updates FSDP.
    """
    for tensor in {id(tensor): tensor for _, tensor in named_tensors(model)}.values():
        if not local(tensor).is_meta:
            continue
        allocated = torch.empty_like(tensor.detach(), device=device)
        if isinstance(tensor, nn.Parameter):
            allocated = nn.Parameter(allocated, requires_grad=tensor.requires_grad)
        vars(allocated).update(vars(tensor))
        hooks = list((tensor._backward_hooks or {}).values())
        tensor._backward_hooks = None  # torch does not swap them and would no longer call them
        torch.utils.swap_tensors(tensor, allocated)  # type: ignore[no-untyped-call]  # torch has no types here
        for hook in hooks:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


SHORT_DTYPES = frozenset({torch.bfloat16, torch.float16})


def norms_of(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the 2-norm of each gradient as float32, of a float64 gradient as float64.

    In 16 bits, a norm would be rounded or, in fp16, overflow.
    """
    kinds = {gradient.dtype for gradient in gradients}
    if not kinds & SHORT_DTYPES:
        return list(torch._foreach_norm(gradients))
    if kinds <= SHORT_DTYPES:
        return list(torch._foreach_norm(gradients, 2, torch.float32))
    short = iter(norms_of([gradient for gradient in gradients if gradient.dtype in SHORT_DTYPES]))
    long = iter(norms_of([gradient for gradient in gradients if gradient.dtype not in SHORT_DTYPES]))
    return [next(short if gradient.dtype in SHORT_DTYPES else long) for gradient in gradients]


class GradientNorm:
    """Measures the gradients of a sharded model.

    `num_stages` maps the id of a parameter to the number of pipeline stages that have it, if there are several.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], mesh: Mesh, *, num_stages: Mapping[int, int] | None = None
    ) -> None:
        self._parameters = list(parameters)
        self._group = mesh.all_ranks
        self._dtype = reduce(torch.promote_types, {each.dtype for each in self._parameters}, torch.float32)
        stages = num_stages or {}
        self._copies = [num_copies(each, mesh) * stages.get(id(each), 1) for each in self._parameters]

    def gradients(self) -> list[torch.Tensor]:
        """Returns this rank's shards of the gradients, sharded like the parameters."""
        return [gradient for each in self._parameters if (gradient := own_gradient(each)) is not None]

    @torch.no_grad()
    def measure(self) -> torch.Tensor:
        """Returns the 2-norm of all gradients together; collective over all ranks."""
        by_copies: dict[int, list[torch.Tensor]] = {}
        for parameter, copies in zip(self._parameters, self._copies, strict=True):
            gradient = own_gradient(parameter)
            if gradient is not None:
                by_copies.setdefault(copies, []).append(gradient)
        total = torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)
        for copies, gradients in by_copies.items():
            norms = torch.stack([norm.double() for norm in norms_of(gradients)])
            total += norms.square().sum() / copies
        dist.all_reduce(total, group=self._group)
        return total.sqrt().to(self._dtype)


def num_copies(parameter: torch.Tensor, mesh: Mesh) -> int:
    """Returns the number of ranks that have the same shard of a parameter as this rank."""
    copies = mesh.size("replicate", "fsdp", "context", "tensor")
    if is_split(parameter):
        layout = parameter.device_mesh  # type: ignore[attr-defined]  # a DTensor
        for number, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                copies //= layout.size(number)
    return copies


class MissingGradientError(Exception):
    """A captured step has trained parameters without a gradient; compile/graph.py explains it with their names."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(f"{len(parameters)} trained parameters have no gradient")
        self.parameters = parameters


def require_gradients(parameters: Sequence[torch.Tensor], present: Sequence[bool]) -> None:
    """Raises for parameters without a gradient in a step that is captured.

    Only the device knows whether another rank has one, but the host decides whether the optimizer steps the parameter.
    """
    missing = [parameter for parameter, has_gradient in zip(parameters, present, strict=True) if not has_gradient]
    if missing:
        raise MissingGradientError(missing)


FIRST_BYTES = 2**20
"""The first bucket is small, so that communication starts early."""
BUCKET_BYTES = 25 * 2**20
SMALL_BYTES = 2**16


class GradientSum:
    """Sums `.grad` of the parameters over the replicas of the model, in place.

    `enter` is called with "reduce" before the ranks communicate and with "update" afterwards; not in one process.
    If the model is sharded (FSDP), fully_shard.py sums the gradients, and this class sums only the argument of
    `reduce`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        ranks: Ranks,
        *,
        sums_gradients: bool = True,
        enter: Callable[[str], None] | None = None,
    ) -> None:
        # Frozen ones too, because a hook may unfreeze them later; a parameter without a gradient costs one flag.
        self._parameters = list(parameters)
        self._ranks = ranks
        self._group, self._all_ranks = ranks.mesh.group("replicate"), ranks.mesh.all_ranks
        self._enter = enter
        self._sums_gradients = sums_gradients and ranks.mesh.size("replicate") > 1
        self._buckets = self._make_buckets() if self._sums_gradients else []
        self._hooks: list[Any] = []
        self._bucket_of: list[int] = []
        """The bucket of each parameter."""
        self._left: list[int] = []
        """How many gradients of each bucket are missing in the last backward."""
        self._is_last = False
        self._seen: set[int] = set()
        """The parameters whose gradients the last backward has computed."""
        self._overlaps: bool | None = None
        """True if reductions run during the backward; None until a backward has shown that each gradient is
        accumulated once. Ranks may differ, but the order of the reductions is the same."""
        self._pending: list[tuple[torch.Tensor, Any]] = []

    def close(self) -> None:
        """Removes the hooks on the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin_last_backward(self) -> None:
        """Starts the reductions of this update during its last backward, bucket by bucket.

        Call it only if no further backward follows: a gradient must not be accumulated once its reduction has started.
        """
        if not self._sums_gradients:
            return
        if not self._hooks:
            numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
            bucket_of = {number: index for index, bucket in enumerate(self._buckets) for number in bucket}
            self._bucket_of = [bucket_of[number] for number in range(len(self._parameters))]
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda each: self._count_gradient(numbers[id(each)])
                )
                for parameter in self._parameters
                if parameter.requires_grad
            ]
        self._left = [sum(self._parameters[number].requires_grad for number in bucket) for bucket in self._buckets]
        self._seen.clear()
        self._is_last = True

    def _count_gradient(self, number: int) -> None:
        """Called for a complete gradient: starts the reductions of complete buckets, in the same order on all ranks."""
        if not self._is_last:
            return
        bucket = self._bucket_of[number]
        if number in self._seen:
            self._overlaps = False
            if bucket < len(self._pending):
                raise TrainwrightError(
                    f"The gradient of a parameter of shape {list(self._parameters[number].shape)} was accumulated "
                    "several times in one backward, after its reduction had started. torch.utils.checkpoint with "
                    "use_reentrant=True around a layer that is used twice does that. Use use_reentrant=False."
                )
            return
        self._seen.add(number)
        self._left[bucket] -= 1
        while self._overlaps and len(self._pending) < len(self._buckets) and self._left[len(self._pending)] == 0:
            self._start_next()

    def _start_next(self) -> None:
        flat = self._pack(self._buckets[len(self._pending)])
        self._pending.append((flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def reduce(self, totals: torch.Tensor, *, is_captured: bool = False) -> None:
        """Sums the gradients over the replicas, and `totals` over all ranks. Does nothing in one process.

        A parameter with a gradient on any rank gets the sum on every rank; one without a gradient on all ranks keeps
        None, so that optimizers skip it. If the step `is_captured`, every trained parameter must have a gradient.
        """
        if self._ranks.size == 1:
            return
        self._is_last = False
        if self._enter is not None:
            self._enter("reduce")
        while len(self._pending) < len(self._buckets):
            self._start_next()
        sums, self._pending = self._pending, []
        if self._overlaps is None and self._seen:
            self._overlaps = True  # each gradient was accumulated once in a complete backward
        waiting = [dist.all_reduce(totals, group=self._all_ranks, async_op=True)]
        # A frozen parameter has no gradient on any rank: it is not missing, and no host has to wait for the others.
        present = [parameter.grad is not None or not parameter.requires_grad for parameter in self._parameters]
        if is_captured and self._sums_gradients:
            require_gradients(self._parameters, present)
        flags = torch.ones(len(present), dtype=torch.int32, device=totals.device)
        if not all(present):
            flags.copy_(torch.tensor(present, dtype=torch.int32))
        if self._sums_gradients:
            waiting.append(dist.all_reduce(flags, group=self._group, async_op=True))
        for work in [*(work for _, work in sums), *waiting]:
            work.wait()
        # Only a rank without a gradient needs to know whether another has it; reading that synchronizes the device.
        absent = (flags == 0).tolist() if self._sums_gradients and not all(present) else []
        for bucket, (flat, _) in zip(self._buckets, sums, strict=True):
            self._unpack(bucket, flat, absent)
        if self._enter is not None:
            self._enter("update")

    def _make_buckets(self) -> list[list[int]]:
        """Returns parameter numbers of one dtype and device, in buckets of at most BUCKET_BYTES.

        The last parameters come first, because their gradients do.
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
        """Returns the gradients of a bucket as one tensor, of which they are views from then on.

        The memory of the single gradients is freed; otherwise all gradients would be in memory twice.
        """
        flat = []
        for number in bucket:
            gradient = own_gradient(self._parameters[number])
            if gradient is None:
                parameter = self._parameters[number]
                gradient = torch.zeros_like(local(parameter), dtype=gradient_dtype(parameter))
            flat.append(gradient.reshape(-1))
        packed = torch.cat(flat)
        for parameter, view in self._views(bucket, packed):
            if parameter.grad is not None and not is_split(parameter):
                parameter.grad = view
        return packed

    def _views(self, bucket: list[int], packed: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        parameters = [self._parameters[number] for number in bucket]
        sizes = [local(parameter).numel() for parameter in parameters]
        for parameter, chunk in zip(parameters, torch.split(packed, sizes), strict=True):
            yield parameter, chunk.view(local(parameter).shape)

    @torch.no_grad()
    def _unpack(self, bucket: list[int], packed: torch.Tensor, absent: list[bool]) -> None:
        for number, (parameter, summed) in zip(bucket, self._views(bucket, packed), strict=True):
            if not parameter.requires_grad or (absent and absent[number]):
                continue
            if not is_split(parameter):
                parameter.grad = summed
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
                local(parameter.grad).copy_(summed)


@torch.no_grad()
def copy_from_first(tensors: Iterable[torch.Tensor], ranks: Ranks) -> None:
    """Copies values, such as running means, from the first rank of the pipeline stage to its other ranks before their
    use."""
    if ranks.size == 1:
        return
    source, group = ranks.mesh.first_of_stage, ranks.mesh.stage
    small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes > SMALL_BYTES:
            dist.broadcast(tensor.data, src=source, group=group)
        else:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor.data)
    for same in small.values():  # one message for all, because running means are small and numerous
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, src=source, group=group)
        if ranks.rank != source:
            for tensor, chunk in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(chunk.view(tensor.shape))
