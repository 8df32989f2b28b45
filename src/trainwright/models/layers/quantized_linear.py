"""Linear layers whose frozen weight is stored in 4 or 8 bits and dequantized for each product.

| type | codes                                 | block       | scale                            | bits per weight |
|------|---------------------------------------|-------------|----------------------------------|-----------------|
| nf4  | 16 quantiles of a normal distribution | 64 weights  | 8 bits, and a range for each 256 | 4.1             |
| int8 | the integers from -127 to 127         | 256 weights | fp32                             | 8.1             |

A block consists of consecutive weights of the flattened matrix; the largest absolute value defines its scale, as in
QLoRA. Codes and scales are frozen integer parameters: checkpoints save or reference them, and a cast of the model does
not change them. Encoding and decoding are bitwise identical on every device. models/quantize.py chooses the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.backends.private_torch import FakeTensor
from trainwright.models.lora import LoRALinear

QuantizedType = Literal["nf4", "int8"]

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of the codes, published with QLoRA: quantiles of a normal distribution, and an exact 0."""

NF4_BLOCK, INT8_BLOCK, SCALE_GROUP = 64, 256, 256
LARGEST = 1e38
"""The largest absolute weight: a scale is rounded, and must not become infinite."""
_CHUNK = 1 << 18
"""The number of weights that are encoded at a time: temporary tensors have about 14 bytes for each."""
_STORED = {"nf4": ("weight_codes", "weight_scales", "weight_ranges"), "int8": ("weight_codes", "weight_scales")}


class QuantizedLinear(nn.Linear):
    """A linear layer with a quantized weight; `quantize` converts an nn.Linear to one."""

    quantized_type: QuantizedType
    weight_dtype: torch.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight, computed at each access."""
        return dequantized_weight(self)

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., in] to [..., out]."""
        return _product(input, self)

    def extra_repr(self) -> str:
        """Adds the type to the representation."""
        return f"{super().extra_repr()}, {self.quantized_type}"


class QuantizedLoRALinear(LoRALinear):
    """A linear layer with an adapter and a quantized weight."""

    quantized_type: QuantizedType
    weight_dtype: torch.dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight, computed at each access."""
        return dequantized_weight(self)

    def base(self, input: Tensor) -> Tensor:
        """Returns the output without the adapter."""
        return _product(input, self)

    def restore_weight(self) -> None:
        """Makes the dequantized weight a parameter."""
        dequantize(self)

    def extra_repr(self) -> str:
        """Adds the type to the representation."""
        return f"{super().extra_repr()}, {self.quantized_type}"


_QUANTIZED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: QuantizedLinear, LoRALinear: QuantizedLoRALinear}
"""The classes of layers that can be quantized, with the class that replaces each."""


def can_quantize(layer: nn.Module) -> bool:
    """Returns True for the classes that `quantize` accepts."""
    return type(layer) in _QUANTIZED


def is_quantized(layer: nn.Module) -> TypeGuard[QuantizedLinear | QuantizedLoRALinear]:
    """Returns True for a layer with a quantized weight."""
    return isinstance(layer, QuantizedLinear | QuantizedLoRALinear)


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear | QuantizedLoRALinear]]:
    """Yields the name and the layer of each quantized weight."""
    for name, module in model.named_modules():
        if is_quantized(module):
            yield name, module


def num_weights(layer: QuantizedLinear | QuantizedLoRALinear) -> int:
    """Returns the number of weights that the codes represent."""
    return layer.out_features * layer.in_features


def stored_names(kind: QuantizedType) -> tuple[str, ...]:
    """Returns the names of the parameters that a layer has instead of `weight`."""
    return _STORED[kind]


@torch.no_grad()
def quantize(layer: nn.Module, kind: QuantizedType) -> None:
    """Replaces the weight of a layer with codes and scales, in place; raises ValueError for values that cannot be
    encoded."""
    module: Any = layer
    weight = module.weight
    encoded = encode(weight, kind)
    # As in models/lora.py: changing the class keeps hooks, and a layer that the model has twice is still one layer.
    del module.weight
    module.__class__ = _QUANTIZED[type(layer)]
    module.quantized_type, module.weight_dtype = kind, weight.dtype
    for name, tensor in zip(_STORED[kind], encoded, strict=True):
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    if kind == "nf4":
        # A buffer, because a copy from the host cannot be captured in a graph; integers, because casts do not change
        # them.
        table = torch.tensor(NF4, device=weight.device).view(torch.int32)
        module.register_buffer("weight_table", table, persistent=False)


@torch.no_grad()
def dequantize(layer: QuantizedLinear | QuantizedLoRALinear) -> None:
    """Reverses `quantize`, in place: the weight has the dtype that it had before, and is frozen."""
    module: Any = layer
    weight = dequantized_weight(layer)
    table = ("weight_table",) if layer.quantized_type == "nf4" else ()
    for name in (*_STORED[layer.quantized_type], *table, "quantized_type", "weight_dtype"):
        delattr(module, name)
    module.__class__ = next(plain for plain, kind in _QUANTIZED.items() if kind is type(layer))
    module.weight = nn.Parameter(weight, requires_grad=False)


def dequantized_weight(layer: QuantizedLinear | QuantizedLoRALinear) -> Tensor:
    """Returns the dequantized weight [out, in], in the dtype of the original weight."""
    shape = (layer.out_features, layer.in_features)
    return decode(layer.quantized_type, _stored(layer), shape).to(layer.weight_dtype)


def encode(weight: Tensor, kind: QuantizedType) -> tuple[Tensor, ...]:
    """Returns the codes and scales of a weight, in the order of `stored_names`."""
    size, encode_blocks = (NF4_BLOCK, _encode_nf4) if kind == "nf4" else (INT8_BLOCK, _encode_int8)
    flat = weight.detach().reshape(-1)
    blocks = F.pad(flat, (0, -flat.numel() % size)).view(-1, size)
    largest = torch.cat([chunk.abs().amax(dim=1).float() for chunk in torch.split(blocks, _CHUNK // size)])
    has_values = not (weight.is_meta or isinstance(weight, FakeTensor))  # `trainwright estimate` builds without values
    if has_values and not bool((largest <= LARGEST).all()):  # a nan is not
        raise ValueError(f"has values that are not finite, or above {LARGEST:g}")
    # The largest value of a block has the largest code. A block of zeros is divided by 1. 127 is a tensor, because on a
    # GPU torch multiplies by the reciprocal of a number, which can change the last bit.
    scales = largest if kind == "nf4" else largest / torch.full_like(largest, 127.0)
    divisors = scales.where(scales > 0, 1.0)[:, None]
    chunks = zip(*(torch.split(each, _CHUNK // size) for each in (blocks, divisors)), strict=True)
    codes = torch.cat([encode_blocks(chunk.float() / divisor) for chunk, divisor in chunks]).view(-1)
    return (codes, *_encode_scales(scales)) if kind == "nf4" else (codes, scales.view(torch.int32))


def decode(kind: QuantizedType, stored: Sequence[Tensor], shape: tuple[int, int]) -> Tensor:
    """Returns the fp32 weight of codes and scales; `stored` ends with the table of values for nf4."""
    if kind == "nf4":
        codes, scale_codes, ranges, table = stored
        scales = _decode_scales(scale_codes, ranges)
        # One gather of two values for each byte.
        values = table.view(torch.float32)
        pairs = torch.stack([values[:, None].expand(16, 16), values.expand(16, 16)], dim=-1).view(256, 2)
        blocks = pairs.index_select(0, codes.int()).view(-1, NF4_BLOCK)
    else:
        codes, scale_bits = stored
        scales, blocks = scale_bits.view(torch.float32), codes.float().view(-1, INT8_BLOCK)
    blocks *= scales[:, None]  # in place, so that there is one fp32 copy of the weight
    return blocks.view(-1)[: shape[0] * shape[1]].view(shape)


def _encode_nf4(blocks: Tensor) -> Tensor:
    """Returns the nearest codes of values from -1 to 1, two in a byte."""
    values = torch.tensor(NF4, dtype=torch.float64, device=blocks.device)
    borders = ((values[:-1] + values[1:]) / 2).float()
    codes = torch.bucketize(blocks, borders, out_int32=True).to(torch.uint8)
    return codes[:, 0::2] << 4 | codes[:, 1::2]


def _encode_int8(blocks: Tensor) -> Tensor:
    return blocks.round().clamp(-127, 127).to(torch.int8)


def _encode_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns 8-bit codes of scales, and for each group the bits of its lowest scale and the step between codes.

    The codes are evenly spaced in the bits of the scales, which grow with the logarithm. The relative error is at most
    0.2 % if the scales of a group differ by a factor of 2, and 3 % for a factor of 65,000. The scale of a block of
    zeros has no effect.
    """
    bits = scales.view(torch.int32)
    groups = F.pad(bits, (0, -len(bits) % SCALE_GROUP)).view(-1, SCALE_GROUP)
    high = groups.amax(dim=1)
    low = groups.where(groups > 0, high[:, None]).amin(dim=1)
    step = (high - low + 254).div(255, rounding_mode="floor")
    nearest = (groups - low[:, None] + step[:, None] // 2).div(step.clamp(min=1)[:, None], rounding_mode="floor")
    codes = nearest.clamp(0, 255).to(torch.uint8).view(-1)[: len(bits)]
    return codes.contiguous(), torch.stack([low, step], dim=1)


def _decode_scales(codes: Tensor, ranges: Tensor) -> Tensor:
    num_groups = ranges.shape[0]
    groups = F.pad(codes.int(), (0, num_groups * SCALE_GROUP - codes.shape[0])).view(-1, SCALE_GROUP)
    bits = ranges[:, :1] + ranges[:, 1:] * groups
    return bits.view(-1)[: codes.shape[0]].view(torch.float32)


def _stored(layer: QuantizedLinear | QuantizedLoRALinear) -> tuple[Tensor, ...]:
    module: Any = layer
    stored = tuple(getattr(module, name) for name in _STORED[layer.quantized_type])
    return (*stored, module.weight_table) if layer.quantized_type == "nf4" else stored


def _product(input: Tensor, layer: QuantizedLinear | QuantizedLoRALinear) -> Tensor:
    """Returns the product of the input and the dequantized weight, plus the bias, in autocast's dtype if it is on."""
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
    bias = None if layer.bias is None else layer.bias.to(dtype)
    facts = (layer.quantized_type, (layer.out_features, layer.in_features), layer.weight_dtype)
    output: Tensor = _Product.apply(input.to(dtype), bias, facts, *_stored(layer))  # type: ignore[no-untyped-call]
    return output


class _Product(torch.autograd.Function):
    """A linear layer that saves the codes of its weight for the backward pass instead of the weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, facts: Any, *stored: Tensor) -> Tensor:
        """Returns input × weightᵀ + bias; `facts` are the type, the shape and the dtype of the weight."""
        kind, shape, dtype = facts
        ctx.facts = facts
        ctx.save_for_backward(*stored)
        return F.linear(input, decode(kind, stored, shape).to(dtype).to(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the input and of the bias."""
        kind, shape, dtype = ctx.facts
        codes, scales, *rest = ctx.saved_tensors
        if torch.compiler.is_compiling():
            # The compiler would decode the weight once and keep it for the backward pass. If the codes depend on the
            # gradient, it cannot; the sum of an empty slice is 0.
            zero = gradient[:0].sum()
            codes, scales = codes + zero.to(codes.dtype), scales + zero.to(scales.dtype)
        input_gradient = None
        if ctx.needs_input_grad[0]:
            weight = decode(kind, (codes, scales, *rest), shape)
            input_gradient = gradient @ weight.to(dtype).to(gradient.dtype)
        bias_gradient = gradient.reshape(-1, shape[0]).sum(dim=0) if ctx.needs_input_grad[1] else None
        return (input_gradient, bias_gradient, *[None] * (3 + len(rest)))
