"""Linear layers whose matrix products run in fp8, with scales computed from the values of each call.

A layer with weight W [N, K] maps x [M, K] to y = x Wᵀ. Training needs the products of two gradients too,
gx = g W and gW = gᵀ x. Weights and activations are e4m3, gradients e5m2; each tensor is divided by a scale so that its
largest value is the largest of the format, and the product is multiplied by both scales.

| recipe     | scales of                 | y, gx | gW   | kept for the backward pass |
|------------|---------------------------|-------|------|----------------------------|
| tensorwise | each tensor               | fp8   | fp8  | x in fp8                   |
| rowwise    | each row of both factors  | fp8   | bf16 | x in bf16                  |

The matrix units read both factors along the dim that is summed, so a tensor that occurs in two products is cast into
two layouts. Casts are plain torch operations, which the compiler fuses with the kernels that produce the tensors. (A
Triton kernel that casts gradients into both layouts at once was not faster on an H200.) models/fp8.py chooses the
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.backends.backend import scales_rows
from trainwright.models.layers.quantized_linear import QuantizedLoRALinear
from trainwright.models.lora import LoRALinear, add_adapters

Recipe = Literal["tensorwise", "rowwise"]

FORWARD_DTYPE, GRADIENT_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""The sizes of both factors must be divisible by this, except for the rows of the first."""
_WIDE = 1024  # weights with this many outputs have a separate product, because joining gradients takes a pass over them
_SMALLEST_AMAX = 1e-12  # a tensor of zeros must not have a scale of 0


class Fp8Linear(nn.Linear):
    """A linear layer that trains in fp8; in evaluation and without gradients it computes like nn.Linear.

    `use_fp8` of models/fp8.py converts an nn.Linear to one. Parameters, state dict and hooks do not change.
    """

    evaluates_as: ClassVar[type[nn.Module]] = nn.Linear
    """The class whose forward runs outside of training."""
    fp8_recipe: Recipe

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., in] to [..., out]."""
        if not _computes_in_fp8(self, input):
            return super().forward(input)
        return _fp8_linears(input, [self])[0]


class Fp8LoRALinear(LoRALinear):
    """A linear layer with an adapter: multiplies with the frozen weight in fp8 and with the adapter in bf16."""

    evaluates_as: ClassVar[type[nn.Module]] = LoRALinear
    fp8_recipe: Recipe

    def base(self, input: Tensor) -> Tensor:
        """Returns the product with the frozen weight."""
        if not _computes_in_fp8(self, input):
            return super().base(input)
        return _fp8_linears(input, [self])[0]


def linears(input: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Returns the outputs of layers that read the same input.

    Layers in fp8 are computed as one product: the input is cast once, and the product also adds up its gradients. The
    first matrices of adapters without dropout are one product as well.
    """
    alike: list[Any] = list(layers)
    kind = type(alike[0])
    if any(type(layer) is not kind or _is_hooked(layer) for layer in alike):
        return [layer(input) for layer in layers]
    is_fp8 = kind in (Fp8Linear, Fp8LoRALinear) and all(_computes_in_fp8(layer, input) for layer in layers)
    if kind is Fp8Linear and is_fp8:
        return _fp8_linears(input, alike)
    # Each layer with dropout has a separate mask.
    has_adapters = kind in (LoRALinear, Fp8LoRALinear, QuantizedLoRALinear)
    if has_adapters and not any(layer.training and layer.lora_dropout for layer in alike):
        outputs = _fp8_linears(input, alike) if is_fp8 else [layer.base(input) for layer in alike]
        return add_adapters(input, alike, outputs)
    return [layer(input) for layer in layers]


def _is_hooked(layer: nn.Module) -> bool:
    """Returns True if calling the layer does more than its class's forward."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in vars(layer)


def _computes_in_fp8(layer: nn.Module, input: Tensor) -> bool:
    """Returns True while training in bf16; False where autocast is disabled and the input is fp32."""
    return layer.training and torch.is_grad_enabled() and _compute_dtype(input) == torch.bfloat16 and input.numel() > 0


def _compute_dtype(input: Tensor) -> torch.dtype:
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


def _fp8_linears(input: Tensor, layers: Sequence[Any]) -> list[Tensor]:
    """Returns the outputs of layers with the same recipe for one input."""
    rows = input.to(_compute_dtype(input)).reshape(-1, input.shape[-1])
    num_rows = rows.shape[0]
    padding = -num_rows % MULTIPLE
    if padding:  # gradients of weights are sums over rows; rows of zeros add nothing
        rows = F.pad(rows, (0, 0, 0, padding))
    product = {"tensorwise": _TensorwiseProduct, "rowwise": _RowwiseProduct}[layers[0].fp8_recipe]
    weights = [layer.weight for layer in layers]
    is_trained = any(weight.requires_grad for weight in weights)
    bias = _joined_bias(layers, rows.dtype)
    outputs = product.apply(is_trained, rows, bias, *weights)  # type: ignore[no-untyped-call]
    if padding:
        outputs = [output[:num_rows] for output in outputs]
    return [output.reshape(*input.shape[:-1], output.shape[-1]) for output in outputs]


def _joined_bias(layers: Sequence[Any], dtype: torch.dtype) -> Tensor | None:
    """Returns the biases as one vector, which the product adds while it writes; zeros for a layer without one."""
    if all(layer.bias is None for layer in layers):
        return None
    parts = [layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias for layer in layers]
    return _join([part.to(dtype) for part in parts], dim=0)


class _TensorwiseProduct(torch.autograd.Function):
    """Multiplies x [M, K] with several weights [N, K], with one scale for x and one for all weights."""

    @staticmethod
    def forward(ctx: Any, is_trained: bool, rows: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
        """Returns one output [M, N] for each weight; `bias` has the elements of all outputs."""
        row_scale = tensor_scale([rows], FORWARD_DTYPE)
        weight_scale = tensor_scale(weights, FORWARD_DTYPE)
        cast_rows = cast(rows, row_scale, FORWARD_DTYPE)
        cast_weights = _join([cast(each, weight_scale, FORWARD_DTYPE) for each in weights], dim=0)
        output = scaled_product(cast_rows, cast_weights, row_scale, weight_scale, rows.dtype, bias=bias, fast=True)
        # The weights are saved unchanged and cast again, because with FSDP a copy of each would be a copy of the whole
        # model.
        kept = [_transposed(cast_rows)] if is_trained else []
        ctx.save_for_backward(row_scale, weight_scale, *weights, *kept)
        ctx.num_weights = len(weights)
        return tuple(output.split_with_sizes([each.shape[0] for each in weights], dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of x, of the bias and of each weight."""
        row_scale, weight_scale, *rest = ctx.saved_tensors
        weights, kept = rest[: ctx.num_weights], rest[ctx.num_weights :]
        scale = tensor_scale(gradients, GRADIENT_DTYPE)
        cast_gradients = [cast(each, scale, GRADIENT_DTYPE) for each in gradients]
        row_gradient = None
        if ctx.needs_input_grad[1]:
            cast_weights = _join([_transposed(cast(each, weight_scale, FORWARD_DTYPE)) for each in weights], dim=1)
            joined, dtype = _join(cast_gradients, dim=1), gradients[0].dtype
            row_gradient = scaled_product(joined, cast_weights, scale, weight_scale, dtype)
        bias_gradient = _sum_rows(gradients) if ctx.needs_input_grad[2] else None
        if not kept:
            return (None, row_gradient, bias_gradient, *[None] * len(weights))
        transposed = [_transposed(each) for each in cast_gradients]
        dtype = _product_dtype(weights[0])
        if min(each.shape[0] for each in weights) >= _WIDE:
            parts = [scaled_product(each, kept[0], scale, row_scale, dtype) for each in transposed]
        else:
            gradient = scaled_product(_join(transposed, dim=0), kept[0], scale, row_scale, dtype)
            parts = list(gradient.split_with_sizes([each.shape[0] for each in weights], dim=0))
        trained = [part.to(each.dtype) for part, each in zip(parts, weights, strict=True)]
        return (None, row_gradient, bias_gradient, *trained)


class _RowwiseProduct(torch.autograd.Function):
    """Multiplies x [M, K] with several weights [N, K], with a scale for each row of x and of each weight.

    Gradients of weights are sums over tokens. Scales along that dim would need second casts of x and g, by columns, and
    these products lose most accuracy in fp8, so they are computed in bf16.
    """

    @staticmethod
    def forward(ctx: Any, is_trained: bool, rows: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
        """Returns one output [M, N] for each weight; `bias` has the elements of all outputs."""
        row_scale = scale_along([rows], FORWARD_DTYPE, dim=1)
        weight_scales = [scale_along([each], FORWARD_DTYPE, dim=1) for each in weights]
        cast_weights = [cast(*each, FORWARD_DTYPE) for each in zip(weights, weight_scales, strict=True)]
        output = scaled_product(
            cast(rows, row_scale, FORWARD_DTYPE),
            _join(cast_weights, dim=0),
            row_scale,
            _join(weight_scales, dim=0).t(),
            rows.dtype,
            bias=bias,
            fast=True,
        )
        kept = [rows] if is_trained else []
        ctx.save_for_backward(*weights, *kept)
        ctx.num_weights = len(weights)
        return tuple(output.split_with_sizes([each.shape[0] for each in weights], dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of x, of the bias and of each weight."""
        saved = ctx.saved_tensors  # once, because reading it again would recompute a checkpointed layer again
        weights, kept = saved[: ctx.num_weights], saved[ctx.num_weights :]
        row_gradient = None
        if ctx.needs_input_grad[1]:
            scale = scale_along(gradients, GRADIENT_DTYPE, dim=1)
            joined = _join([cast(each, scale, GRADIENT_DTYPE) for each in gradients], dim=1)
            weight_scale = scale_along(weights, FORWARD_DTYPE, dim=0)
            cast_weights = _join([_transposed(cast(each, weight_scale, FORWARD_DTYPE)) for each in weights], dim=1)
            row_gradient = scaled_product(joined, cast_weights, scale, weight_scale, gradients[0].dtype)
        bias_gradient = _sum_rows(gradients) if ctx.needs_input_grad[2] else None
        if not kept:
            return (None, row_gradient, bias_gradient, *[None] * len(weights))
        trained = [(each.t() @ kept[0]).to(weight.dtype) for each, weight in zip(gradients, weights, strict=True)]
        return (None, row_gradient, bias_gradient, *trained)


def tensor_scale(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the common scale of tensors that form one factor, a float32 scalar tensor."""
    # By rows first, which the compiler fuses with the kernel that produces the rows, such as a norm.
    largest = [each.abs().amax(dim=-1).amax() for each in tensors]
    return _scale(largest, dtype)


def scale_along(tensors: Sequence[Tensor], dtype: torch.dtype, *, dim: int) -> Tensor:
    """Returns the scales of the rows (dim 1) or columns (dim 0) of tensors that form one factor: [M, 1] or [1, K]."""
    return _scale([each.abs().amax(dim=dim, keepdim=True) for each in tensors], dtype)


def _scale(largest: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    overall = largest[0].float()
    for each in largest[1:]:
        overall = torch.maximum(overall, each.float())
    # nan and inf are kept: the output is then nan, which anomaly detection reports.
    return overall.clamp(min=_SMALLEST_AMAX) / torch.finfo(dtype).max


def cast(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor divided by its scale, in fp8."""
    return (tensor.float() * scale.reciprocal()).to(dtype)


def scaled_product(
    first: Tensor,
    second: Tensor,
    scale: Tensor,
    second_scale: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Returns first [M, K] × secondᵀ [K, N] of contiguous fp8 tensors, multiplied by their scales, plus a bias [N].

    `fast` accumulates with fewer bits on Hopper, as is usual for outputs but not for gradients. On a CPU torch
    multiplies the values in fp32.
    """
    # The public torch.nn.functional.scaled_mm is not in every supported version. On a CPU the operation calls others,
    # which autocast would run in bf16.
    with torch.autocast(first.device.type, enabled=False):
        if scale.ndim and not scales_rows(first.device):
            one = torch.ones((), device=first.device)
            product = torch._scaled_mm(first, second.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
            product = product * scale * second_scale
            return (product if bias is None else product + bias).to(dtype)
        return torch._scaled_mm(
            first, second.t(), scale_a=scale, scale_b=second_scale, bias=bias, out_dtype=dtype, use_fast_accum=fast
        )


def _sum_rows(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the gradient of the bias: the sums over all rows."""
    return _join([each.sum(dim=0) for each in gradients], dim=0)


def _transposed(tensor: Tensor) -> Tensor:
    """Returns a transposed copy."""
    return tensor.t().contiguous()


def _join(tensors: Sequence[Tensor], *, dim: int) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    with torch.autocast(tensors[0].device.type, enabled=False):  # its rule for cat rejects fp8
        return torch.cat(list(tensors), dim=dim)


def _product_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype in which the product writes a weight's gradient."""
    return torch.float32 if weight.dtype == torch.float32 else torch.bfloat16
