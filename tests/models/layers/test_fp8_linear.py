"""Linear layers in fp8: products as written down plainly, errors of fp8's size, and inputs at the edges of the format.

On a CPU torch multiplies the values of fp8 tensors in fp32: the casts, scales and layouts are those of a GPU.
"""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.models.fp8 import use_fp8
from trainwright.models.layers.fp8_linear import (
    FORWARD_DTYPE,
    GRADIENT_DTYPE,
    Fp8Linear,
    cast,
    linears,
    scale_along,
    scaled_product,
    tensor_scale,
)
from trainwright.models.llama import SwiGLU
from trainwright.models.lora import LoRALinear, add_lora

RECIPES = ("tensorwise", "rowwise")


def make_layer(width_in=64, width_out=48, *, recipe="tensorwise", bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width_in, width_out, bias=bias)).to(dtype)
    use_fp8(model, recipe=recipe, match=["*"])
    return model[0]


def make_input(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def run(layer, value, gradient=None, *, autocast=True):
    """Returns the output and the gradients of the input and of the parameters."""
    value = value.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = layer(value)
    gradient = make_input(*output.shape, dtype=output.dtype) if gradient is None else gradient
    return [output, *torch.autograd.grad(output, (value, *layer.parameters()), gradient)]


def error_of(found, expected):
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())


def rounded(tensor, scale, dtype):
    return (tensor.float() * (1 / scale)).to(dtype).float() * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_outputs_and_gradients_are_near_those_of_fp32(recipe, dtype):
    layer = make_layer(recipe=recipe, dtype=dtype)
    value, gradient = make_input(4, 8, 64), make_input(4, 8, 48)
    plain = nn.Linear(64, 48)
    plain.load_state_dict(layer.state_dict())
    found = run(layer, value, gradient)
    expected = run(plain, value.float(), gradient.float(), autocast=False)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.bfloat16, dtype, dtype]
    errors = [error_of(*pair) for pair in zip(found, expected, strict=True)]
    # e4m3 has 3 bits after the point (rms error about 2.6 %), e5m2 has 2; the bias is added in bf16.
    assert all(each < limit for each, limit in zip(errors, (0.045, 0.07, 0.07, 0.005), strict=True)), errors
    assert min(errors[:2]) > 0.01, "these products are not in fp8"
    assert (errors[2] > 0.02) == (recipe == "tensorwise"), "rowwise computes gradients of weights in bf16"


def test_a_tensorwise_layer_computes_what_is_written_down_plainly():
    layer = make_layer(bias=False)
    value, gradient = make_input(32, 64), make_input(32, 48)
    output, value_gradient, weight_gradient = run(layer, value, gradient)
    weight = layer.weight.detach()
    scales = {name: each.float().abs().max() for name, each in [("x", value), ("w", weight), ("g", gradient)]}
    x = rounded(value, scales["x"] / 448, FORWARD_DTYPE)
    w = rounded(weight, scales["w"] / 448, FORWARD_DTYPE)
    g = rounded(gradient, scales["g"] / 57344, GRADIENT_DTYPE)
    assert torch.equal(output, (x @ w.t()).bfloat16())
    assert torch.equal(value_gradient, (g @ w).bfloat16())
    torch.testing.assert_close(weight_gradient, g.t() @ x, rtol=1e-5, atol=1e-5)


def test_a_rowwise_layer_computes_what_is_written_down_plainly():
    layer = make_layer(bias=False, recipe="rowwise")
    value, gradient = make_input(32, 64), make_input(32, 48)
    value[3] *= 1000  # one scale for all would lose the other rows
    output, value_gradient, weight_gradient = run(layer, value, gradient)
    weight = layer.weight.detach()
    x = rounded(value, value.float().abs().amax(1, keepdim=True) / 448, FORWARD_DTYPE)
    w = rounded(weight, weight.abs().amax(1, keepdim=True) / 448, FORWARD_DTYPE)
    g = rounded(gradient, gradient.float().abs().amax(1, keepdim=True) / 57344, GRADIENT_DTYPE)
    columns = rounded(weight, weight.abs().amax(0, keepdim=True) / 448, FORWARD_DTYPE)
    torch.testing.assert_close(output, (x @ w.t()).bfloat16(), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(value_gradient, (g @ columns).bfloat16(), rtol=1e-2, atol=1e-2)
    assert torch.equal(weight_gradient, (gradient.t() @ value).float())


@pytest.mark.parametrize("first", [FORWARD_DTYPE, GRADIENT_DTYPE])
def test_torchs_product_on_a_cpu_is_that_of_the_values(first):
    a, b = make_input(16, 32), make_input(48, 32)
    scales = tensor_scale([a], first), tensor_scale([b], FORWARD_DTYPE)
    factors = cast(a, scales[0], first), cast(b, scales[1], FORWARD_DTYPE)
    expected = (factors[0].float() * scales[0]) @ (factors[1].float() * scales[1]).t()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        product = scaled_product(*factors, *scales, dtype, fast=dtype == torch.bfloat16)
        # CPUs add up the products in different orders.
        torch.testing.assert_close(product, expected.to(dtype), rtol=tolerance, atol=1e-5)
    bias = make_input(48)
    product = scaled_product(*factors, *scales, torch.bfloat16, bias=bias)
    torch.testing.assert_close(product, (expected + bias.float()).bfloat16(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_give_zeros(recipe):
    layer = make_layer(recipe=recipe, bias=False)
    found = run(layer, torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(16, 48, dtype=torch.bfloat16))
    assert all(torch.equal(each, torch.zeros_like(each)) for each in found)
    with torch.no_grad():
        layer.weight.zero_()
    found = run(layer, make_input(16, 64))
    assert all(each.isfinite().all() for each in found)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_that_are_not_finite_are_not_hidden(recipe, value):
    layer = make_layer(recipe=recipe)
    bad = make_input(32, 64)
    bad[5, 7] = value
    output, *gradients = run(layer, bad)
    assert not output[5].isfinite().any()
    assert not gradients[1].isfinite().all(), "the gradient of the weight reads the input"
    bad = make_input(32, 48)
    bad[5, 7] = value
    _, *gradients = run(layer, make_input(32, 64), bad)
    assert not gradients[0][5].isfinite().any()
    assert not gradients[1].isfinite().all()
    with torch.no_grad():
        layer.weight[3, 3] = value
    assert not run(layer, make_input(32, 64))[0].isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_tokens_works(recipe):
    layer = make_layer(recipe=recipe)
    whole = run(layer, make_input(32, 64), torch.ones(32, 48, dtype=torch.bfloat16))
    for number in (1, 7, 17, 31):
        output, value_gradient, weight_gradient, bias_gradient = run(layer, make_input(number, 64))
        assert output.shape == (number, 48)
        assert value_gradient.shape == (number, 64)
        assert all(each.isfinite().all() for each in (weight_gradient, bias_gradient))
    padded = run(layer, make_input(32, 64)[:31], torch.ones(31, 48, dtype=torch.bfloat16))
    assert error_of(padded[0], whole[0][:31]) < 0.02  # another largest value, at most
    empty = run(layer, make_input(0, 5, 64))
    assert [tuple(each.shape) for each in empty] == [(0, 5, 48), (0, 5, 64), (48, 64), (48,)]


def test_evaluation_is_that_of_a_plain_layer():
    layer = make_layer()
    plain = nn.Linear(64, 48)
    plain.load_state_dict(layer.state_dict())
    value = make_input(16, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(value)
        assert not torch.equal(layer(value), expected)
        with torch.no_grad():
            assert torch.equal(layer(value), expected)
        assert torch.equal(layer.eval()(value), expected)
    layer.train()
    assert torch.equal(layer(value.float()), plain(value.float())), "autocast is disabled: fp32, as the user asks"


def test_layers_that_share_an_input_are_one_product():
    class Projections(nn.Module):
        def __init__(self, one):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 48), nn.Linear(64, 16), nn.Linear(64, 32, bias=False)])
            self.one = one

        def forward(self, value):
            outputs = linears(value, *self.layers) if self.one else [layer(value) for layer in self.layers]
            return torch.cat(outputs, dim=-1)

    def count(model):
        with counting() as counts:
            found = run(model, make_input(2, 16, 64), make_input(2, 16, 96))
        return found, counts["_scaled_mm"]

    for recipe, products in (("tensorwise", (9, 3)), ("rowwise", (6, 2))):
        torch.manual_seed(0)
        separate = Projections(one=False)
        together = copy.deepcopy(separate)
        together.one = True
        plain = run(separate, make_input(2, 16, 64))
        assert all(map(torch.equal, plain, run(together, make_input(2, 16, 64))))
        for model in (separate, together):
            use_fp8(model, recipe=recipe, match=["*"])
        (expected, number), (found, fewer) = count(separate), count(together)
        assert (number, fewer) == products
        for one, other in zip(found, expected, strict=True):
            assert 0 < error_of(one, other) < 0.1 or torch.equal(one, other)
        together.layers[1].register_forward_hook(lambda *_: None)
        assert count(together)[1] == number, "a hook must see its layer's input and output"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bias_is_added_by_the_product(recipe):
    layer = make_layer(recipe=recipe)
    with torch.no_grad():
        layer.bias.copy_(make_input(48).float())
    value, gradient = make_input(4, 7, 64), make_input(4, 7, 48)
    without = run(make_layer(recipe=recipe, bias=False), value, gradient)
    output, value_gradient, weight_gradient, bias_gradient = run(layer, value, gradient)
    # Rounded once, after the addition: more exact than rounding the product first.
    added = without[0].float() + layer.bias.detach().bfloat16()
    torch.testing.assert_close(output.float(), added, rtol=2**-7, atol=2**-7)
    assert torch.equal(value_gradient, without[1])
    assert torch.equal(weight_gradient, without[2])
    torch.testing.assert_close(bias_gradient, gradient.float().sum((0, 1)), rtol=2**-7, atol=1e-3)
    layer.bias.requires_grad_(False)
    value = value.requires_grad_()
    run_forward(layer, value).backward(gradient)
    assert layer.bias.grad is None
    assert torch.equal(value.grad, value_gradient)


def test_gradients_of_wide_weights_are_products_of_their_own():
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(32, 1024), nn.Linear(32, 1040, bias=False)])
    use_fp8(layers, match=["*"])
    value = make_input(32, 32).requires_grad_()
    with counting() as counts:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = linears(value, *layers)
        sum(each.float().square().sum() for each in outputs).backward()
    assert counts["_scaled_mm"] == 4, "both outputs, the gradient of the input, and those of two weights"
    for layer, output in zip(layers, outputs, strict=True):
        assert error_of(layer.weight.grad, 2 * output.detach().float().t() @ value.detach().float()) < 0.1


def test_a_frozen_weight_keeps_no_input_for_the_backward_pass():
    layer = make_layer(bias=False)
    sizes = {}
    for is_trained in (True, False):
        layer.weight.requires_grad_(is_trained)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each, kept=kept: kept.append(each) or each, lambda each: each
        ):
            run_forward(layer, make_input(160, 64))
        sizes[is_trained] = sum(each.nbytes for each in kept if each.shape != layer.weight.shape)
    assert sizes[True] - sizes[False] == 160 * 64, "the input is kept in fp8, one byte for each value"


def run_forward(layer, value):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(value.requires_grad_())


def test_recomputation_repeats_all_bits():
    for recipe in RECIPES:
        layer = make_layer(recipe=recipe)

        def recomputed(value, layer=layer):
            return checkpoint(layer, value, use_reentrant=False)

        recomputed.parameters = layer.parameters
        for one, other in zip(run(layer, make_input(32, 64)), run(recomputed, make_input(32, 64)), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_compute_the_same_without_a_graph_break(recipe):
    layer = make_layer(recipe=recipe)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for one, other in zip(run(layer, make_input(32, 64)), run(compiled, make_input(32, 64)), strict=True):
        assert torch.equal(one, other)


def test_the_adapter_of_a_lora_layer_is_not_in_fp8():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48))
    add_lora(model, match="0", rank=4)
    with torch.no_grad():
        model[0].lora_b.normal_()
    plain = copy.deepcopy(model)
    use_fp8(model, match=["*"])
    assert isinstance(model[0], LoRALinear)
    value = make_input(32, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        base = F.linear(value, model[0].weight, model[0].bias)
        added = plain(value) - base
        assert 0.01 < error_of(model(value) - added, base) < 0.05
        assert torch.equal(model.eval()(value), plain(value))
    model.train()
    loss = run_forward(model, value).float().square().sum()
    loss.backward()
    assert model[0].weight.grad is None
    assert model[0].lora_a.grad is not None


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
def test_adapters_that_share_an_input_are_one_product(is_fp8):
    torch.manual_seed(0)
    separate = nn.ModuleList([nn.Linear(64, 48), nn.Linear(64, 16), nn.Linear(64, 32, bias=False)])
    add_lora(separate, match="*", rank=4)
    for layer in separate:
        nn.init.normal_(layer.lora_b)
    if is_fp8:
        use_fp8(separate, match=["*"])
    together = copy.deepcopy(separate)

    def run_all(layers, *, one):
        value = make_input(32, 64).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16), counting() as counts:
            outputs = linears(value, *layers) if one else [layer(value) for layer in layers]
            sum(each.float().square().sum() for each in outputs).backward()
        adapters = [each.grad for layer in layers for each in (layer.lora_a, layer.lora_b)]
        return [*(each.detach() for each in outputs), value.grad, *adapters], counts

    expected, many = run_all(separate, one=False)
    found, few = run_all(together, one=True)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert error_of(one.float(), other.float()) < 0.05
    # The first matrices of three adapters, forward and for two gradients: three products instead of nine.
    assert many["mm"] - few["mm"] == 6
    assert (many["_scaled_mm"], few["_scaled_mm"]) == ((6, 2) if is_fp8 else (0, 0))
    for layer in separate:
        layer.lora_dropout = 0.5
    torch.manual_seed(1)
    expected, _ = run_all(separate, one=False)
    torch.manual_seed(1)
    found, _ = run_all(separate, one=True)
    assert torch.equal(found[0], expected[0]), "each adapter has a mask of its own"
    assert torch.equal(found[1], expected[1])
    for layer in separate:
        layer.lora_dropout = 0.0
    seen = []
    separate[1].register_forward_hook(lambda *_: seen.append(True))
    _, counts = run_all(separate, one=True)
    assert seen
    assert counts["mm"] == many["mm"], "a hook must see its layer's input and output"


def test_scales_along_a_dim_have_the_shapes_that_products_need():
    value = make_input(16, 32)
    assert scale_along([value], FORWARD_DTYPE, dim=1).shape == (16, 1)
    assert scale_along([value], FORWARD_DTYPE, dim=0).shape == (1, 32)
    assert scale_along([value, 2 * value], FORWARD_DTYPE, dim=1).equal(2 * scale_along([value], FORWARD_DTYPE, dim=1))


class counting:
    """Counts the operations below autograd."""

    def __enter__(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        counts = Counter()

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                counts[func.overloadpacket.__name__] += 1
                return func(*args, **(kwargs or {}))

        self.mode = Mode()
        self.mode.__enter__()
        return counts

    def __exit__(self, *error):
        self.mode.__exit__(*error)


def test_the_class_of_a_layer_names_the_one_that_evaluates_alike():
    assert isinstance(make_layer(), Fp8Linear)
    assert type(make_layer()).evaluates_as is nn.Linear


def test_the_compiler_keeps_no_copy_of_a_weight_for_the_backward_pass():
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=record,
        bw_compiler=record,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.manual_seed(0)
    block = nn.Sequential(nn.RMSNorm(64), SwiGLU(hidden_size=64, intermediate_size=176)).bfloat16()
    use_fp8(block, match=["*"])
    run(torch.compile(block, backend=backend, fullgraph=True, dynamic=False), make_input(512, 64))
    [output] = graphs[0].graph.find_nodes(op="output")
    kept = [node.meta["val"] for node in output.args[0][1:]]
    assert not [
        each for each in kept if each.dtype == FORWARD_DTYPE and each.numel() % (176 * 64) == 0 and 64 in each.shape
    ]
    casts = [
        node.meta["val"].dtype
        for graph in graphs
        for node in graph.graph.nodes
        if node.op == "call_function" and "convert_element_type" in str(node.target)
    ]
    assert casts.count(GRADIENT_DTYPE) == 3, "one for each output"
    assert casts.count(FORWARD_DTYPE) <= 10, "two inputs and three weights, and perhaps again in the backward pass"
