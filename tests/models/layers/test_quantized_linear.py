"""Codes of 4 and 8 bits: their errors, their memory, and layers that compute as with the dequantized weight."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.models.layers.quantized_linear import (
    INT8_BLOCK,
    NF4,
    NF4_BLOCK,
    SCALE_GROUP,
    QuantizedLinear,
    QuantizedLoRALinear,
    decode,
    dequantize,
    encode,
    num_weights,
    quantize,
    stored_names,
)
from trainwright.models.lora import add_lora, merge_lora

KINDS = ("nf4", "int8")
BITS = {"nf4": 4.2, "int8": 8.3}
BLOCKS = {"nf4": NF4_BLOCK, "int8": INT8_BLOCK}
TABLE = torch.tensor(NF4)
WIDEST_GAP = float((TABLE[1:] - TABLE[:-1]).max())
SUBNORMAL = 127 * 1.5e-45
"""The error of a subnormal scale, the distance of two floats, for the largest code."""
every_kind = pytest.mark.parametrize("kind", KINDS)


def decoded(weight, kind):
    stored = encode(weight, kind)
    return decode(kind, (*stored, TABLE.view(torch.int32)) if kind == "nf4" else stored, tuple(weight.shape))


def codes_of(weight, kind):
    return encode(weight, kind)[0]


def in_blocks(weight, kind):
    flat = weight.float().reshape(-1)
    return nn.functional.pad(flat, (0, -flat.numel() % BLOCKS[kind])).view(-1, BLOCKS[kind])


def largest_error(weight, kind):
    """The bound of each block: half of the widest gap between codes, and the error of the scale."""
    largest = in_blocks(weight, kind).abs().amax(dim=1, keepdim=True)
    if kind == "int8":
        return largest / 127 * 0.5001
    bits = largest.view(torch.int32)
    bits = nn.functional.pad(bits.view(-1), (0, -len(bits) % SCALE_GROUP)).view(-1, SCALE_GROUP)
    high = bits.amax(dim=1)
    low = bits.where(bits > 0, high[:, None]).amin(dim=1)
    relative = ((high - low).double() / 255 + 1) / 2 / 2**23  # bits that differ by 2^23 differ by a factor of 2
    relative = relative[:, None].expand_as(bits).reshape(-1)[: len(largest), None]
    return (largest.double() * (WIDEST_GAP / 2 + 2 * relative + 1e-6)).float()


def linear(shape, dtype=torch.float32, *, bias=True):
    torch.manual_seed(0)
    return nn.Linear(shape[1], shape[0], bias=bias).to(dtype).requires_grad_(False)


WEIGHTS = {
    "normal": lambda shape: torch.randn(shape),
    "outliers": lambda shape: torch.randn(shape) * torch.where(torch.rand(shape) < 0.01, 1000.0, 1.0),
    "zeros": lambda shape: torch.zeros(shape),
    "rows of zeros": lambda shape: torch.randn(shape) * (torch.arange(shape[0]) % 3 > 0)[:, None],
    "rows of all sizes": lambda shape: torch.randn(shape) * 10.0 ** torch.linspace(-30, 30, shape[0])[:, None],
    "subnormal": lambda shape: torch.randn(shape) * 1e-42,
    "one value": lambda shape: torch.full(shape, -0.3),
}
shapes = st.tuples(st.integers(1, 40), st.integers(1, 90))


@every_kind
@given(shape=shapes, name=st.sampled_from(sorted(WEIGHTS)), seed=st.integers(0, 99))
def test_every_weight_is_within_the_bound_of_its_block(kind, shape, name, seed):
    torch.manual_seed(seed)
    weight = WEIGHTS[name](shape)
    found = decoded(weight, kind)
    errors = (in_blocks(found, kind) - in_blocks(weight, kind)).abs()
    assert found.shape == weight.shape
    assert bool((errors <= largest_error(weight, kind) + SUBNORMAL).all())
    assert bool((found[weight == 0] == 0).all())


@every_kind
@given(
    shape=shapes,
    name=st.sampled_from([name for name in sorted(WEIGHTS) if name != "subnormal"]),
    seed=st.integers(0, 99),
)
def test_a_dequantized_weight_has_the_same_codes(kind, shape, name, seed):
    torch.manual_seed(seed)
    weight = WEIGHTS[name](shape)
    found = decoded(weight, kind)
    assert torch.equal(codes_of(found, kind), codes_of(weight, kind))


@every_kind
def test_the_error_of_normal_weights_is_that_of_the_format(kind):
    torch.manual_seed(0)
    weight = torch.randn(512, 512)
    error = float((decoded(weight, kind) - weight).norm() / weight.norm())
    assert error == pytest.approx({"nf4": 0.0918, "int8": 0.0070}[kind], rel=0.02)


def test_scales_of_very_different_sizes_are_within_three_percent():
    largest = 2.0 ** -torch.linspace(0, 16, SCALE_GROUP)
    weight = torch.zeros(SCALE_GROUP, NF4_BLOCK)
    weight[:, 5] = largest
    assert float(((decoded(weight, "nf4")[:, 5] - largest) / largest).abs().max()) < 0.032


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_bytes_are_held(kind, dtype):
    layer = linear((256, 384), dtype)
    plain = layer.weight.nbytes
    quantize(layer, kind)
    held = [*layer.parameters(), *layer.buffers()]
    num_bytes = sum(each.nbytes for each in held) - layer.bias.nbytes
    assert 8 * num_bytes <= BITS[kind] * num_weights(layer) < 8 * plain
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in held)


def outcome(layer, dtype, *, autocast=False, compiled=None, shape=(3, 5)):
    torch.manual_seed(1)
    value = torch.randn(*shape, layer.in_features).to(dtype).requires_grad_()
    gradient = torch.randn(*shape, layer.out_features)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    call = layer if compiled is None else torch.compile(layer, backend=compiled, fullgraph=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
    ):
        output = call(value)
    output.backward(gradient.to(output.dtype))
    return [output.detach(), value.grad], saved


@every_kind
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_the_dequantized_weight(kind, dtype, autocast, bias):
    layer = linear((70, 50), dtype, bias=bias)
    quantize(layer, kind)
    assert type(layer) is QuantizedLinear
    plain = copy.deepcopy(layer)
    dequantize(plain)
    assert type(plain) is nn.Linear
    assert plain.weight.dtype == dtype
    expected, _ = outcome(plain, dtype, autocast=autocast)
    found, _ = outcome(layer, dtype, autocast=autocast)
    assert found[0].dtype == expected[0].dtype
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_trained_bias_gets_its_gradient():
    layer = linear((70, 50))
    quantize(layer, "nf4")
    layer.bias.requires_grad_(True)
    plain = copy.deepcopy(layer)
    dequantize(plain)
    for each in (layer, plain):
        outcome(each, torch.float32)
    assert torch.allclose(layer.bias.grad, plain.bias.grad, atol=1e-6)


@every_kind
@pytest.mark.parametrize("compiled", [None, "aot_eager", "aot_eager_decomp_partition"])
def test_nothing_dequantized_is_saved_for_the_backward_pass(kind, compiled):
    torch._dynamo.reset()
    layer = linear((128, 256))
    quantize(layer, kind)
    expected, _ = outcome(layer, torch.float32)
    found, saved = outcome(layer, torch.float32, compiled=compiled)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    floating = sum(each.numel() for each in saved if each.is_floating_point())
    assert floating <= max(512, num_weights(layer) // INT8_BLOCK), [(each.dtype, each.shape) for each in saved]
    assert sum(each.nbytes for each in saved) <= 1.1 * sum(each.nbytes for each in layer.parameters()) + 2048


@pytest.mark.slow
@every_kind
def test_inductor_saves_only_codes_and_computes_the_same_bits(kind):
    test_nothing_dequantized_is_saved_for_the_backward_pass(kind, "inductor")


@every_kind
def test_a_cast_of_the_model_does_not_change_the_codes(kind):
    layer = linear((64, 64))
    quantize(layer, kind)
    expected = layer.weight
    layer.to(torch.bfloat16)
    assert torch.equal(layer.weight, expected)
    output = layer(torch.ones(2, 64, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert torch.equal(copy.deepcopy(layer).weight, expected)


@every_kind
def test_the_state_dict_has_codes_and_loads_exactly(kind):
    layer, other = linear((33, 65)), linear((33, 65))
    with torch.no_grad():
        other.weight.mul_(2)
    for each in (layer, other):
        quantize(each, kind)
    assert set(layer.state_dict()) == {"bias", *stored_names(kind)}
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, layer.weight)


@every_kind
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_values_without_a_code_raise_and_leave_the_layer(kind, value):
    layer = linear((8, 8))
    layer.weight[3, 3] = value
    with pytest.raises(ValueError, match="not finite, or above 1e"):
        quantize(layer, kind)
    assert type(layer) is nn.Linear
    assert isinstance(layer.weight, nn.Parameter)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_adds_the_adapter_to_the_dequantized_weight(kind, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(dtype)
    add_lora(model, match="*", rank=2)
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.lora_b)
        quantize(layer, kind)
        assert type(layer) is QuantizedLoRALinear
    expected = [layer.weight + 8 * layer.lora_b @ layer.lora_a for layer in (model[0], model[2])]
    assert merge_lora(model) == ["0", "2"]
    assert all(
        type(layer) is nn.Linear and list(layer.state_dict()) == ["bias", "weight"] for layer in (model[0], model[2])
    )
    for layer, weight in zip((model[0], model[2]), expected, strict=True):
        assert torch.equal(layer.weight, weight.to(dtype))
        assert not layer.weight.requires_grad
