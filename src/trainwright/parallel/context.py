"""Context parallelism: the ranks of a group share each sequence, and each has the activations of some positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainwright.backends import waits_for_memory
from trainwright.backends.private_torch import FakeTensor
from trainwright.errors import ConfigError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.parallel.mesh import Mesh

# torch 2.13 renames both and warns about the old names.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _JoinChunks(torch.autograd.Function):
    """Gathers the chunks of all ranks along `dim` in the order of positions; `shard` is a rank's two chunks.

    The backward sums the gradients of each rank's chunks over all ranks.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        size = dist.get_world_size(group)
        gathered = shard.new_empty((size * shard.shape[0], *shard.shape[1:]))
        _ALL_GATHER(gathered, shard.contiguous(), group=group)
        pairs = [each.chunk(2, dim) for each in gathered.chunk(size)]
        return torch.cat([first for first, _ in pairs] + [second for _, second in reversed(pairs)], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        size = dist.get_world_size(ctx.group)
        chunks = grad.chunk(2 * size, ctx.dim)
        by_rank = torch.cat([torch.cat((chunks[rank], chunks[-1 - rank]), ctx.dim) for rank in range(size)])
        # As in a single process, which sums in float32 and rounds once, also for 16-bit gradients.
        by_rank = by_rank.to(torch.promote_types(grad.dtype, torch.float32))
        summed = by_rank.new_empty((by_rank.shape[0] // size, *by_rank.shape[1:]))
        _REDUCE_SCATTER(summed, by_rank, group=ctx.group)
        return summed.to(grad.dtype), None, None


class _SumOver(torch.autograd.Function):
    """Sums over the group, in forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        # A copy, because in code compiled by torch 2.11 the output of a collective silently gets no gradient.
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def join_chunks(shard: Tensor, dim: int, group: Any) -> Tensor:
    """Returns the chunks of all ranks along `dim`, in the order of positions; `shard` is a rank's two chunks."""
    apply: Callable[..., Tensor] = _JoinChunks.apply  # torch has no types here
    return apply(shard, dim, group)


@contextmanager
def own_random_numbers(device: torch.device, rank: int) -> Iterator[None]:
    """Draws different random numbers on every rank inside, and keeps the ranks' generators equal.

    The seed is drawn from the host's generator, which does not synchronize the device.
    """
    drawn = torch.randint(2**62, (), device="cpu")
    if isinstance(drawn, FakeTensor):  # fake tensors of a plan
        yield
        return
    seed = int(drawn) ^ (rank * 0x9E3779B97F4A7C15 % 2**62)  # changes all bits
    indices = [] if device.index is None else [device.index]
    with torch.random.fork_rng(devices=indices, **({"device_type": device.type} if indices else {})):
        torch.default_generator.manual_seed(seed)
        if indices:
            torch.get_device_module(device).manual_seed(seed)
        yield


def drop_own(values: Tensor, p: float, *, rank: int, size: int) -> Tensor:
    """Applies dropout with random numbers that differ between the ranks, for compiled code, which cannot change
    generators.

    Every rank draws the random numbers of all ranks, so the generators stay equal, and uses its own.
    """
    if p >= 1.0:
        return values * 0.0
    keep = torch.rand((size, *values.shape), device=values.device)[rank] >= p
    return values * keep / (1.0 - p)


class ContextDropout(nn.Dropout):
    """nn.Dropout with different random numbers per rank for activations [B, S, D]; inputs with fewer dims are equal on
    all ranks."""

    rank: int
    size: int

    def forward(self, input: Tensor) -> Tensor:
        """Drops features."""
        if not (self.training and self.p > 0 and input.dim() > 2):
            return super().forward(input)
        if torch.compiler.is_compiling():
            return drop_own(input, self.p, rank=self.rank, size=self.size)
        with own_random_numbers(input.device, self.rank):
            return super().forward(input)


def draw_apart(model: nn.Module, *, rank: int, size: int) -> None:
    """Converts every nn.Dropout of the model to a ContextDropout in place, which keeps its hooks."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = ContextDropout
            module.rank, module.size = rank, size  # type: ignore[assignment]  # not modules


NOTHING: Mapping[str, Any] = MappingProxyType({})


class RingKernel(NamedTuple):
    """An attention kernel of torch that also returns each query's logsumexp, which is used to merge partial results."""

    forward: Any
    backward: Any
    grad_name: str = "grad_out"
    """The argument of `backward` for the gradient of the output."""
    returns: tuple[str, ...] = ()
    """The arguments of `backward` for the outputs of `forward` after the first two; "" if an output is not an
    argument."""
    settings: Mapping[str, Any] = NOTHING
    """Further arguments of `forward`."""
    backward_settings: Mapping[str, Any] = NOTHING
    is_grouped: bool = False
    """True if there may be fewer heads of keys and values than of queries."""
    chunk_multiple: int = 1
    """The length of a rank's chunks must be a multiple of this."""
    max_width: int = 256
    width_multiple: int = 8


_ATEN = torch.ops.aten

FLASH = RingKernel(
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_backward.default,
    returns=("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset", ""),
    is_grouped=True,
)
EFFICIENT = RingKernel(
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_efficient_attention_backward.default,
    grad_name="grad_out_",
    returns=("philox_seed", "philox_offset"),
    settings=MappingProxyType({"attn_bias": None, "compute_log_sumexp": True}),
    backward_settings=MappingProxyType({"attn_bias": None, "grad_input_mask": (True, True, True, False)}),
    chunk_multiple=32,  # it pads logsumexp to 32 queries, which the merge does not support
)
KERNELS = {torch.float16: FLASH, torch.bfloat16: FLASH, torch.float32: EFFICIENT}


class _Ring(NamedTuple):
    attend: Callable[..., tuple[Any, ...]]
    gradients: Callable[..., tuple[Any, ...]]
    options: Any


@cache
def torch_ring() -> _Ring | None:
    """Returns torch's ring attention; None if this version of torch has none with the expected signature."""
    try:
        from torch.distributed.tensor.experimental._context_parallel._attention import (
            _cp_options,
            _templated_ring_attention,
            _templated_ring_attention_backward,
        )
    except ImportError:
        return None
    ring = _Ring(_templated_ring_attention, _templated_ring_attention_backward, _cp_options)
    starts = [list(inspect.signature(each).parameters)[:3] for each in (ring.attend, ring.gradients)]
    return ring if starts == [["group", "seq_dim", "op"]] * 2 else None


def ring_kernel(queries: Tensor, keys: Tensor) -> RingKernel | None:
    """Returns the kernel for ring attention over tensors [B, heads, S, W]; None if there is none.

    torch.compile does not support torch's ring, so compiled models gather.
    """
    if torch.compiler.is_compiling():
        return None
    ring = torch_ring()
    if ring is None or not ring.options.enable_load_balance or not waits_for_memory(queries.device):
        return None
    kernel = KERNELS.get(_attention_dtype(queries))
    if kernel is None or keys.shape[2:] != queries.shape[2:]:
        return None
    length, width = queries.shape[2:]
    fits = width <= kernel.max_width and width % kernel.width_multiple == 0
    return kernel if fits and length // 2 % kernel.chunk_multiple == 0 else None


def ring_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, group: Any, kernel: RingKernel, scale: float | None = None
) -> Tensor:
    """Returns causal attention for this rank's queries over the keys and values of all ranks of the group.

    Each tensor is [B, heads, S, W] and has, of twice as many chunks as ranks, the chunks `rank` and −1 − `rank`. The
    partial results are merged in float32.
    """
    dtype = _attention_dtype(queries)
    queries, keys, values = (each.to(dtype) for each in (queries, keys, values))
    num_shared = queries.shape[1] // keys.shape[1]
    if num_shared > 1 and not kernel.is_grouped:
        keys, values = (each.repeat_interleave(num_shared, dim=1) for each in (keys, values))
    apply: Callable[..., Tensor] = _RingAttention.apply  # torch has no types here
    return apply(queries, keys, values, group, kernel, scale)


def _attention_dtype(queries: Tensor) -> torch.dtype:
    """Returns the dtype of the attention: autocast does not cover the ring."""
    kind = queries.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else queries.dtype


class _RingAttention(torch.autograd.Function):
    """Ring attention, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        group: Any,
        kernel: RingKernel,
        scale: float | None,
    ) -> Tensor:
        ring = torch_ring()
        assert ring is not None  # `ring_kernel` returned a kernel
        inputs = (queries, keys, values)
        settings = {"is_causal": True, "dropout_p": 0.0, "scale": scale, **kernel.settings}
        outputs, logsumexp, *rest = ring.attend(group, 2, kernel.forward, *inputs, **settings)
        named = {name: value for name, value in zip(kernel.returns, rest, strict=True) if name}
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        ctx.names = tuple(tensors)
        ctx.plain = {name: value for name, value in named.items() if name not in tensors}
        ctx.group, ctx.kernel, ctx.scale = group, kernel, scale
        ctx.save_for_backward(*inputs, outputs, logsumexp, *tensors.values())
        return outputs  # type: ignore[no-any-return]  # torch has no types here

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring = torch_ring()
        assert ring is not None
        queries, keys, values, outputs, logsumexp, *rest = ctx.saved_tensors
        grads = ring.gradients(
            ctx.group,
            2,
            ctx.kernel.backward,
            grad_out=grad.contiguous(),
            grad_out_name=ctx.kernel.grad_name,
            query=queries,
            key=keys,
            value=values,
            out=outputs,
            logsumexp=logsumexp,
            is_causal=True,
            dropout_p=0.0,
            scale=ctx.scale,
            **dict(zip(ctx.names, rest, strict=True)),
            **ctx.plain,
            **ctx.kernel.backward_settings,
        )
        return *grads[:3], None, None, None


SEQUENCE_METHODS = ("take", "positions", "expect", "bounds", "attend", "mean", "whole", "beside_loss")


class SplitSequence:
    """A sequence of which this rank has the chunks `rank` and 2 × `size` − 1 − `rank`.

    One object serves all modules of a model. It stores the length of the last split sequence, which is the same in
    one forward, and is needed to join the chunks.
    """

    is_whole = False

    def __init__(self, *, rank: int, size: int, group: Any) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.length = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy of the model uses the same ranks; a process group cannot be copied.
        return self

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of this rank's chunks."""
        return self.rank, 2 * self.size - 1 - self.rank

    def take(self, tensor: Tensor, dim: int = 1, fill: float = 0) -> Tensor:
        """Returns this rank's chunks of a tensor with one entry per position in `dim`; `fill` is for padding."""
        self.length = tensor.shape[dim]
        return self._take(tensor, dim, fill)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the positions [S] of this rank's tokens in the full sequence of `length`.

        Padding has the last position: a model may not have embeddings for more.
        """
        return self.take(torch.arange(length, device=device), dim=0, fill=length - 1)

    def expect(self, length: int) -> None:
        """Sets the length of the next sequence on a pipeline stage that does not split it itself."""
        self.length = length

    def bounds(self, length: int, device: torch.device) -> Tensor | None:
        """Returns a mask [1, 1, 1, all keys] for attention without causality; None if no padding is needed."""
        self.length = length
        return torch.ones(1, 1, 1, length, dtype=torch.bool, device=device) if length % (2 * self.size) else None

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Returns attention for this rank's queries over all positions; each argument is [B, heads, S, W] of this rank.

        `mask` broadcasts to [B, heads, all queries, all keys]: bool (True: attend), or values added to the scores.
        Without one, and without causality, queries attend to all positions: see `bounds`.
        """
        if keys.shape[2] != queries.shape[2]:
            raise ConfigError(
                f"{queries.shape[2]} queries, but {keys.shape[2]} keys on a rank, as with a cache of keys and values. "
                "runtime.mesh.context does not support such a cache. Call the model without it."
            )
        if is_causal and mask is None and not dropout and (kernel := ring_kernel(queries, keys)):
            return ring_attention(queries, keys, values, group=self.group, kernel=kernel, scale=scale)
        keys, values = self.gather(keys, values)
        settings = {"dropout_p": dropout, "scale": scale, "enable_gqa": enable_gqa}
        if dropout and torch.compiler.is_compiling():
            if is_causal and mask is None:
                mask = torch.ones(1, 1, self.length, self.length, dtype=torch.bool, device=queries.device)
            return self._attend_dropping(queries, keys, values, mask=mask, is_causal=is_causal, settings=settings)
        with own_random_numbers(queries.device, self.rank) if dropout else nullcontext():
            return self._attend_to_all(queries, keys, values, mask=mask, is_causal=is_causal, settings=settings)

    def gather(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of all positions, with padding at the end, in one message."""
        all_keys, all_values = join_chunks(torch.stack((keys, values)), 3, self.group).unbind()
        return all_keys, all_values

    def mean(self, loss: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss over the full sequence from the mean over this rank's `targets`, without ignored
        ones."""
        loss = _full(loss)
        count = (_full(targets) != IGNORED_LABEL).sum()
        # If all are ignored, the loss is nan and has weight 0.
        total = torch.where(count > 0, loss, 0.0) * count
        sum_over: Callable[..., Tensor] = _SumOver.apply  # torch has no types here
        summed, counted = sum_over(torch.stack((total, count.to(total.dtype))), self.group).unbind()
        return summed / counted

    def whole(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Returns the chunks of all ranks along `dim`, in the order of positions, without padding."""
        dim = dim % tensor.dim()
        return join_chunks(_full(tensor), dim, self.group).narrow(dim, 0, self.length)

    def beside_loss(self, logits: Tensor) -> Tensor | None:
        """Returns the logits of the full sequence, or None in a training step, where gathering them costs too much."""
        return None if torch.is_grad_enabled() else self.whole(logits)

    def _take(self, tensor: Tensor, dim: int, fill: float) -> Tensor:
        length, chunk = tensor.shape[dim], -(-tensor.shape[dim] // (2 * self.size))
        chunks = []
        for number in self.chunks:
            start = min(number * chunk, length)
            chunks.append(tensor.narrow(dim, start, min(chunk, length - start)))
            if (num_missing := chunk - chunks[-1].shape[dim]) > 0:
                shape = [*tensor.shape[:dim], num_missing, *tensor.shape[dim + 1 :]]
                chunks.append(tensor.new_full(shape, fill))
        return torch.cat(chunks, dim)

    def _attend_to_all(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Tensor | None,
        is_causal: bool,
        settings: dict[str, Any],
    ) -> Tensor:
        """Returns attention for this rank's queries, given the keys and values of all positions and padding."""
        if mask is None and not is_causal:
            return F.scaled_dot_product_attention(queries, keys, values, **settings)
        if mask is not None:
            rows = self._rows(mask, is_causal=is_causal)
            keys, values = (each[:, :, : mask.shape[-1]] for each in (keys, values))
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=rows, **settings)
        # Each chunk of queries attends to the keys up to its end only, which halves the work.
        length = queries.shape[2] // 2
        outputs = []
        for number, chunk in zip(self.chunks, queries.chunk(2, dim=2), strict=True):
            end = (number + 1) * length
            visible = torch.ones(length, end, dtype=torch.bool, device=queries.device).tril(end - length)
            keys_before, values_before = (each[:, :, :end] for each in (keys, values))
            outputs.append(
                F.scaled_dot_product_attention(chunk, keys_before, values_before, attn_mask=visible, **settings)
            )
        return torch.cat(outputs, dim=2)

    def _attend_dropping(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Tensor | None,
        is_causal: bool,
        settings: dict[str, Any],
    ) -> Tensor:
        """Does the same as `_attend_to_all` with plain operations, which materialize the attention weights, to apply
        this rank's dropout."""
        if settings["enable_gqa"]:
            keys, values = (each.repeat_interleave(queries.shape[1] // each.shape[1], dim=1) for each in (keys, values))
        scale = queries.shape[-1] ** -0.5 if settings["scale"] is None else settings["scale"]
        if mask is not None:
            keys, values = (each[:, :, : mask.shape[-1]] for each in (keys, values))
        scores = queries @ keys.mT * scale
        if mask is not None:
            rows = self._rows(mask, is_causal=is_causal)
            scores = scores.masked_fill(~rows, float("-inf")) if rows.dtype == torch.bool else scores + rows
        weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1).to(values.dtype)
        return drop_own(weights, settings["dropout_p"], rank=self.rank, size=self.size) @ values

    def _rows(self, mask: Tensor, *, is_causal: bool) -> Tensor:
        """Returns this rank's rows of a mask over all positions; rows of padding are arbitrary."""
        if is_causal:
            causal = torch.ones(mask.shape[-1], mask.shape[-1], dtype=torch.bool, device=mask.device).tril()
            mask = mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, float("-inf"))
        if mask.shape[-2] == 1:
            return mask
        return self._take(mask, mask.dim() - 2, fill=1 if mask.dtype == torch.bool else 0)


def split_sequences(model: nn.Module, mesh: Mesh, *, where: object | None = None) -> None:
    """Shards the model's sequences over the ranks along context, in place; does nothing for a single rank.

    `where` is the location of the setting, for errors: a model without `sequence`, or a loss that cannot be computed
    in chunks.
    """
    size = mesh.size("context")
    if size == 1:
        return
    modules = [module for module in model.modules() if _has_sequence(module)]
    if not modules:
        raise ConfigError(
            f"runtime.mesh.context is {size}, but {type(model).__name__} cannot split its sequence: neither it nor a "
            "submodule has a `sequence` (models/layers/attention.py). Llama, GPT2, Bert and similar models have one. "
            "Use context: 1, and fsdp or tensor for the ranks.",
            where=where,
        )
    for module in modules:
        _check_criterion(module, size, where)
    sequence = SplitSequence(rank=mesh.rank("context"), size=size, group=mesh.group("context"))
    for module in modules:
        module.sequence = sequence  # type: ignore[assignment]  # not a module
    draw_apart(model, rank=sequence.rank, size=sequence.size)


def _has_sequence(module: nn.Module) -> bool:
    sequence = getattr(module, "sequence", None)
    return all(callable(getattr(sequence, name, None)) for name in SEQUENCE_METHODS)


def _check_criterion(module: nn.Module, size: int, where: object | None) -> None:
    """Rejects a loss whose mean over the sequence cannot be computed from the means of the chunks."""
    criterion = getattr(module, "criterion", None)
    if criterion is None:
        return
    is_mean = getattr(criterion, "reduction", None) == "mean" and getattr(criterion, "weight", None) is None
    if not is_mean or getattr(criterion, "ignore_index", IGNORED_LABEL) != IGNORED_LABEL:
        raise ConfigError(
            f"runtime.mesh.context is {size}, and each rank computes the loss over some positions. This requires a "
            f"plain mean over targets, but the criterion of {type(module).__name__} is {criterion}. "
            f"Use one with reduction mean, ignore_index {IGNORED_LABEL} and no weight, or context: 1.",
            where=where,
        )


def _full(tensor: Tensor) -> Tensor:
    """Returns the full tensor of a tensor that is sharded along another axis."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
