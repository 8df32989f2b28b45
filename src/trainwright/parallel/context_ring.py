"""Causal attention over split sequences by torch's ring: keys and values go round, no rank ever holds all of them.

torch's own entry (`context_parallel`) rewires attention for the whole process and cannot be left before backward;
here its two inner functions are called, as the forward and backward of one operation. They are not public: where a
torch lacks them or has them otherwise, `ring_kernel` finds none, and attention gathers keys and values instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.backends import waits_for_memory

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
