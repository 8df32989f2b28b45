"""Context parallelism: the ranks of a group share each sequence, and each holds the states of some positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

# torch 2.13 has other names for both, and warns of the old ones.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def join_chunks(part: Tensor, dim: int, group: Any) -> Tensor:
    """Returns the chunks of all ranks along `dim`, in the order of positions; a rank's part is its two chunks."""
    apply: Callable[..., Tensor] = _JoinChunks.apply  # torch has no types here
    return apply(part, dim, group)


def sum_over(tensor: Tensor, group: Any) -> Tensor:
    """Returns the sum of all ranks' tensors."""
    apply: Callable[..., Tensor] = _SumOver.apply
    return apply(tensor, group)


class _JoinChunks(torch.autograd.Function):
    """Gathers in forward; in backward each rank gets the sum of what all ranks have for its chunks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        size = dist.get_world_size(group)
        gathered = part.new_empty((size * part.shape[0], *part.shape[1:]))
        _ALL_GATHER(gathered, part.contiguous(), group=group)
        pairs = [each.chunk(2, dim) for each in gathered.chunk(size)]
        return torch.cat([first for first, _ in pairs] + [second for _, second in reversed(pairs)], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        size = dist.get_world_size(ctx.group)
        chunks = grad.chunk(2 * size, ctx.dim)
        by_rank = torch.cat([torch.cat((chunks[rank], chunks[-1 - rank]), ctx.dim) for rank in range(size)])
        # One process would add up in float32 and round once, even where the gradients have 16 bits.
        by_rank = by_rank.to(torch.promote_types(grad.dtype, torch.float32))
        summed = by_rank.new_empty((by_rank.shape[0] // size, *by_rank.shape[1:]))
        _REDUCE_SCATTER(summed, by_rank, group=ctx.group)
        return summed.to(grad.dtype), None, None


class _SumOver(torch.autograd.Function):
    """Sums in forward, and in backward the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@contextmanager
def own_random_numbers(device: torch.device, rank: int) -> Iterator[None]:
    """Draws differently on every rank inside, and leaves the ranks' generators equal to each other.

    The seed is drawn from the host's generator, so that no device is waited for.
    """
    drawn = torch.randint(2**62, (), device="cpu")
    if isinstance(drawn, FakeTensor):  # a plan of a run, in which nothing is worked out
        yield
        return
    seed = int(drawn) ^ (rank * 0x9E3779B97F4A7C15 % 2**62)  # bits that differ all over
    indices = [] if device.index is None else [device.index]
    with torch.random.fork_rng(devices=indices, **({"device_type": device.type} if indices else {})):
        torch.default_generator.manual_seed(seed)
        if indices:
            torch.get_device_module(device).manual_seed(seed)
        yield


class PartDropout(nn.Dropout):
    """nn.Dropout that draws for itself on states [B, S, D]; what has fewer dims is no part, and equal on all ranks."""

    rank: int

    def forward(self, input: Tensor) -> Tensor:
        """Drops features; a compiled graph draws from the shared numbers, for it cannot change generators."""
        draws = self.training and self.p > 0 and input.dim() > 2 and not torch.compiler.is_compiling()
        if not draws:
            return super().forward(input)
        with own_random_numbers(input.device, self.rank):
            return super().forward(input)


def draw_apart(model: nn.Module, *, rank: int) -> None:
    """Makes a PartDropout of every nn.Dropout of the model, in place: hooks on it stay."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = PartDropout
            module.rank = rank  # type: ignore[assignment]  # no module either


NOTHING: Mapping[str, Any] = MappingProxyType({})


class RingKernel(NamedTuple):
    """An attention kernel of torch that also returns the logarithm of each query's sum, by which parts are merged."""

    forward: Any
    backward: Any
    grad_name: str = "grad_out"
    """What `backward` calls the gradient of the output."""
    returns: tuple[str, ...] = ()
    """What `backward` calls the outputs of `forward` after the first two; "": it does not take that one."""
    settings: Mapping[str, Any] = NOTHING
    """Further arguments of `forward`."""
    backward_settings: Mapping[str, Any] = NOTHING
    is_grouped: bool = False
    """May there be fewer heads of keys and values than of queries?"""
    chunk_multiple: int = 1
    """A rank's chunks must be a multiple of so many positions."""
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
    chunk_multiple=32,  # it pads the sums to 32 queries, which the merging does not expect
)
KERNELS = {torch.float16: FLASH, torch.bfloat16: FLASH, torch.float32: EFFICIENT}


class _Ring(NamedTuple):
    attend: Callable[..., tuple[Any, ...]]
    gradients: Callable[..., tuple[Any, ...]]
    options: Any


@cache
def torch_ring() -> _Ring | None:
    """Returns torch's ring attention, or None where this torch has none that is called as we call it."""
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
    """Returns the kernel with which these tensors [B, heads, S, W] go through the ring; None: they cannot.

    A compiler cannot follow torch's ring, so that compiled models gather.
    """
    if torch.compiler.is_compiling():
        return None
    ring = torch_ring()
    if ring is None or not ring.options.enable_load_balance or not waits_for_memory(queries.device):
        return None
    kernel = KERNELS.get(_dtype_inside(queries))
    if kernel is None or keys.shape[2:] != queries.shape[2:]:
        return None
    length, width = queries.shape[2:]
    fits = width <= kernel.max_width and width % kernel.width_multiple == 0
    return kernel if fits and length // 2 % kernel.chunk_multiple == 0 else None


def ring_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, group: Any, kernel: RingKernel, scale: float | None = None
) -> Tensor:
    """Returns causal attention for this rank's queries over the keys and values of all ranks of the group.

    Each tensor is [B, heads, S, W] and holds, of twice as many chunks as ranks, the rank's own and that many from the
    end. The parts are merged in float32.
    """
    dtype = _dtype_inside(queries)
    queries, keys, values = (each.to(dtype) for each in (queries, keys, values))
    num_shared = queries.shape[1] // keys.shape[1]
    if num_shared > 1 and not kernel.is_grouped:
        keys, values = (each.repeat_interleave(num_shared, dim=1) for each in (keys, values))
    apply: Callable[..., Tensor] = _RingAttention.apply  # torch has no types here
    return apply(queries, keys, values, group, kernel, scale)


def _dtype_inside(queries: Tensor) -> torch.dtype:
    """Returns the dtype in which attention is worked out here: autocast knows nothing of the ring."""
    kind = queries.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else queries.dtype


class _RingAttention(torch.autograd.Function):
    """One pass around the ring, and one back."""

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
        assert ring is not None  # else there would be no kernel to call this with
        mixed, sums, *rest = ring.attend(
            group,
            2,
            kernel.forward,
            queries,
            keys,
            values,
            is_causal=True,
            dropout_p=0.0,
            scale=scale,
            **kernel.settings,
        )
        named = {name: value for name, value in zip(kernel.returns, rest, strict=True) if name}
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        ctx.names = tuple(tensors)
        ctx.plain = {name: value for name, value in named.items() if name not in tensors}
        ctx.group, ctx.kernel, ctx.scale = group, kernel, scale
        ctx.save_for_backward(queries, keys, values, mixed, sums, *tensors.values())
        return mixed  # type: ignore[no-any-return]  # torch has no types here

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring = torch_ring()
        assert ring is not None
        queries, keys, values, mixed, sums, *rest = ctx.saved_tensors
        grads = ring.gradients(
            ctx.group,
            2,
            ctx.kernel.backward,
            grad_out=grad.contiguous(),
            grad_out_name=ctx.kernel.grad_name,
            query=queries,
            key=keys,
            value=values,
            out=mixed,
            logsumexp=sums,
            is_causal=True,
            dropout_p=0.0,
            scale=ctx.scale,
            **dict(zip(ctx.names, rest, strict=True)),
            **ctx.plain,
            **ctx.kernel.backward_settings,
        )
        return *grads[:3], None, None, None


VERBS = ("take", "positions", "expect", "bounds", "attend", "mean", "whole", "beside_loss")


class SplitSequence:
    """The verbs of a sequence of which this rank holds the chunks `rank` and 2 × `size` − 1 − `rank`.

    One object serves all modules of a model. It remembers the length of the sequence that was last cut: the same for
    all that a forward cuts, and needed again where parts are joined.
    """

    is_whole = False

    def __init__(self, *, rank: int, size: int, group: Any) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.length = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy of the model is on the same ranks; a process group cannot be copied.
        return self

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of this rank's chunks."""
        return self.rank, 2 * self.size - 1 - self.rank

    def take(self, tensor: Tensor, dim: int = 1, fill: float = 0) -> Tensor:
        """Returns this rank's part of what has one entry per position in `dim`; `fill` stands for positions added."""
        self.length = tensor.shape[dim]
        return self._take(tensor, dim, fill)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the places [S] in the whole sequence of `length` that this rank's tokens have.

        Those added at the end stand at the last one: a model need not have embeddings for more.
        """
        return self.take(torch.arange(length, device=device), dim=0, fill=length - 1)

    def expect(self, length: int) -> None:
        """Says how long the sequence is whose parts come next, where a stage of a pipeline cuts none itself."""
        self.length = length

    def bounds(self, length: int, device: torch.device) -> Tensor | None:
        """Returns a mask [1, 1, 1, all keys] for where every query sees every key; None where none is needed."""
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
        """Mixes the values of all positions for this rank's queries: each [B, heads, S, W], of this rank's positions.

        `mask` broadcasts to [B, heads, all queries, all keys]: bool (True: may see), or numbers added to the scores.
        Without one, and without causality, every position is seen: see `bounds`.
        """
        if keys.shape[2] != queries.shape[2]:
            raise ConfigError(
                f"{queries.shape[2]} queries met {keys.shape[2]} keys on a rank, as with a cache of keys and values. "
                "A sequence that is split over ranks (runtime.mesh.context) has no such cache: call the model without."
            )
        if is_causal and mask is None and not dropout and (kernel := ring_kernel(queries, keys)):
            return ring_attention(queries, keys, values, group=self.group, kernel=kernel, scale=scale)
        keys, values = self.gather(keys, values)
        settings = {"dropout_p": dropout, "scale": scale, "enable_gqa": enable_gqa}
        if not dropout or torch.compiler.is_compiling():
            return self._attend_to_all(queries, keys, values, mask=mask, is_causal=is_causal, settings=settings)
        with own_random_numbers(queries.device, self.rank):
            return self._attend_to_all(queries, keys, values, mask=mask, is_causal=is_causal, settings=settings)

    def gather(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of all positions, those added at the end included, by one message."""
        all_keys, all_values = join_chunks(torch.stack((keys, values)), 3, self.group).unbind()
        return all_keys, all_values

    def mean(self, loss: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss over the whole sequence, from that over this rank's `targets` (ignored ones apart)."""
        loss = _undivided(loss)
        count = (_undivided(targets) != IGNORED_LABEL).sum()
        # Where all are ignored the loss is nan, and counts for nothing.
        total = torch.where(count > 0, loss, 0.0) * count
        summed, counted = sum_over(torch.stack((total, count.to(total.dtype))), self.group).unbind()
        return summed / counted

    def whole(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Returns the parts of all ranks along `dim`, in the order of positions, without any that were added."""
        dim = dim % tensor.dim()
        return join_chunks(_undivided(tensor), dim, self.group).narrow(dim, 0, self.length)

    def beside_loss(self, logits: Tensor) -> Tensor | None:
        """Returns the logits of the whole sequence, or None in a training step: nobody should wait for so many."""
        return None if torch.is_grad_enabled() else self.whole(logits)

    def _take(self, tensor: Tensor, dim: int, fill: float) -> Tensor:
        length, chunk = tensor.shape[dim], -(-tensor.shape[dim] // (2 * self.size))
        parts = []
        for number in self.chunks:
            start = min(number * chunk, length)
            part = tensor.narrow(dim, start, min(chunk, length - start))
            if part.shape[dim] < chunk:
                shape = list(tensor.shape)
                shape[dim] = chunk - part.shape[dim]
                part = torch.cat((part, tensor.new_full(shape, fill)), dim)
            parts.append(part)
        return torch.cat(parts, dim)

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
        """Mixes for this rank's queries, given the keys and values of all positions, added ones at the end."""
        if mask is None and not is_causal:
            return F.scaled_dot_product_attention(queries, keys, values, **settings)
        if mask is not None:
            rows = self._rows(mask, is_causal=is_causal)
            keys, values = (each[:, :, : mask.shape[-1]] for each in (keys, values))
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=rows, **settings)
        # Each chunk of queries meets the keys up to its end alone, which halves the work.
        length = queries.shape[2] // 2
        mixed = []
        for number, chunk in zip(self.chunks, queries.chunk(2, dim=2), strict=True):
            end = (number + 1) * length
            visible = torch.ones(length, end, dtype=torch.bool, device=queries.device).tril(end - length)
            keys_before, values_before = (each[:, :, :end] for each in (keys, values))
            mixed.append(
                F.scaled_dot_product_attention(chunk, keys_before, values_before, attn_mask=visible, **settings)
            )
        return torch.cat(mixed, dim=2)

    def _rows(self, mask: Tensor, *, is_causal: bool) -> Tensor:
        """Returns this rank's rows of a mask over all positions; positions added see whatever they like."""
        if is_causal:
            causal = torch.ones(mask.shape[-1], mask.shape[-1], dtype=torch.bool, device=mask.device).tril()
            mask = mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, float("-inf"))
        if mask.shape[-2] == 1:
            return mask
        return self._take(mask, mask.dim() - 2, fill=1 if mask.dtype == torch.bool else 0)


def split_sequences(model: nn.Module, mesh: Mesh, *, where: object | None = None) -> None:
    """Splits the model's sequences over the ranks along context, in place; nothing where there is one rank.

    `where` is the place of the setting, for what is rejected: a model that does not speak of its sequence, or a loss
    that cannot be taken in parts.
    """
    size = mesh.size("context")
    if size == 1:
        return
    modules = [module for module in model.modules() if _has_sequence(module)]
    if not modules:
        raise ConfigError(
            f"runtime.mesh.context: {size} ranks are to share each sequence, but {type(model).__name__} cannot split "
            "its own: neither it nor a module in it has a `sequence` (models/layers/attention.py). Llama, "
            "GPT2, Bert and models made like them have one. Use context: 1, and data or tensor for the ranks.",
            where=where,
        )
    for module in modules:
        _check_criterion(module, size, where)
    sequence = SplitSequence(rank=mesh.rank("context"), size=size, group=mesh.group("context"))
    for module in modules:
        module.sequence = sequence  # type: ignore[assignment]  # no module, but nn.Module's types know only those
    draw_apart(model, rank=sequence.rank)


def _has_sequence(module: nn.Module) -> bool:
    sequence = getattr(module, "sequence", None)
    return all(callable(getattr(sequence, verb, None)) for verb in VERBS)


def _check_criterion(module: nn.Module, size: int, where: object | None) -> None:
    """Rejects a loss whose mean over the whole cannot be told from the means of the parts."""
    criterion = getattr(module, "criterion", None)
    if criterion is None:
        return
    is_mean = getattr(criterion, "reduction", None) == "mean" and getattr(criterion, "weight", None) is None
    if not is_mean or getattr(criterion, "ignore_index", IGNORED_LABEL) != IGNORED_LABEL:
        raise ConfigError(
            f"runtime.mesh.context: {size} ranks each take the loss over some positions, from which that over all "
            f"follows for a plain mean over targets only; the criterion of {type(module).__name__} is {criterion}. "
            f"Use one with reduction mean, ignore_index {IGNORED_LABEL} and no weight, or context: 1.",
            where=where,
        )


def _undivided(tensor: Tensor) -> Tensor:
    """Returns a tensor that is split along another axis in whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
