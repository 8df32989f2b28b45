"""Quantized bases on a GPU: the bits of a CPU, what is saved and allocated, the modes, exact resuming, no waits."""

import copy

import pytest
import torch
from tests.build.test_quantize_runs import NF4, SETTINGS, load, losses, train
from tests.checkpoint.test_resume import same, weights
from tests.gpu.test_no_waits_cuda import load as load_watched
from tests.gpu.test_no_waits_cuda import watched, write_rows
from tests.models.layers.test_quantized_linear import KINDS, WEIGHTS
from torch import nn

from trainwright.models.layers.quantized_linear import dequantize, encode, num_weights, quantize
from trainwright.models.llama import Llama
from trainwright.models.lora import add_lora
from trainwright.models.quantize import quantize_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_sync_debug_mode(0)
    torch._dynamo.reset()


@every_kind
@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_codes_and_dequantized_weights_have_the_bits_of_a_cpu(kind, name):
    torch.manual_seed(0)
    weight = WEIGHTS[name]((70, 300))
    for here, there in zip(encode(weight, kind), encode(weight.cuda(), kind), strict=True):
        assert torch.equal(here, there.cpu())
    layer = nn.Linear(300, 70)
    layer.weight.data.copy_(weight)
    quantize(layer.requires_grad_(False), kind)
    expected = layer.weight
    assert torch.equal(layer.cuda().weight.cpu(), expected)


def outcome(layer, *, compiled=False):
    value = torch.randn(64, layer.in_features, generator=torch.Generator().manual_seed(1)).cuda().requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    run = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cuda", dtype=torch.bfloat16),
    ):
        output = run(value)
    output.backward(torch.ones_like(output))
    return [output.detach(), value.grad], saved


@every_kind
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_with_the_dequantized_weight_and_saves_its_codes(kind, compiled, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(512, 1024).to("cuda", dtype).requires_grad_(False)
    quantize(layer, kind)
    plain = copy.deepcopy(layer)
    dequantize(plain)
    expected, _ = outcome(plain)
    found, saved = outcome(layer, compiled=compiled)
    for one, other in zip(found, expected, strict=True):
        if compiled:  # possibly other kernels
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(one, other)
    floating = sum(each.numel() for each in saved if each.is_floating_point())
    assert floating <= num_weights(layer) // 256, [(each.dtype, each.shape) for each in saved]


SHORT = ("runtime.device=cuda", "trainer.max_steps=12", "evaluation={}", "data.eval={}", "checkpoint.every_steps=6")
MODES = {
    "eager": [],
    "compile": ["runtime.mode=compile"],
    "graph": ["runtime.mode=graph"],
    "repeated": ["model.compile_repeated_blocks=model.layers"],
    "recomputed": ["runtime.mode=compile", *SETTINGS["recomputed"]],
    "weights in bf16": ["runtime.mode=compile", *SETTINGS["weights in bf16"]],
}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_learns_as_on_a_cpu(tmp_path, mode):
    train(load(tmp_path / "cpu", NF4, *SHORT, "runtime.device=cpu", "runtime.precision=bf16"))
    train(load(tmp_path / mode, NF4, *SHORT, "runtime.precision=bf16", *MODES[mode]))
    expected, found = losses(tmp_path / "cpu"), losses(tmp_path / mode)
    assert found[0] == pytest.approx(expected[0], rel=1e-2)
    assert found[-1] == pytest.approx(expected[-1], rel=0.05)


@every_kind
@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_a_resumed_run_has_the_same_bits(tmp_path, mode, kind):
    settings = (*SHORT, *MODES[mode], f"model.quantize={kind}", "runtime.deterministic=true")
    whole = train(load(tmp_path / "whole", *settings))
    train(load(tmp_path / "parts", *settings, "trainer.max_steps=6"))
    resumed = train(load(tmp_path / "parts", *settings))
    assert same(weights(whole), weights(resumed))


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_no_step_waits_for_the_device(tmp_path, mode):
    write_rows(tmp_path)
    sizes = "vocab_size: 128, hidden_size: 64, num_layers: 3, num_heads: 4, num_kv_heads: 2"
    adapters = "lora: {match: '*_proj', rank: 2}, quantize: nf4"
    config = load_watched(
        tmp_path,
        *(f"runtime.mode={mode}", "runtime.precision=bf16", f"data.train={{type: {tmp_path}/tokens.py:Rows}}"),
        *(f"model={{type: llama, {sizes}, {adapters}}}", "trainer.type=language_model"),
    )
    trainer, hook = watched(config)
    assert (trainer.step, hook.num_watched) == (124, 100)


SIZES = {"vocab_size": 512, "hidden_size": 2048, "num_layers": 6, "num_heads": 16, "intermediate_size": 5632}


def allocated(kind):
    """Returns the bytes of a small model on the device, and the peak of a step above them."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(**SIZES)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    add_lora(model, match="*_proj", rank=8)
    if kind is not None:
        quantize_model(model, kind)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model.cuda()
    held = torch.cuda.memory_allocated() - before
    tokens = torch.zeros(1, 256, dtype=torch.long, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(tokens, labels=tokens)["loss"]
    loss.backward()
    return held, torch.cuda.max_memory_allocated() - before - held


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4.2), ("int8", 8.3)])
def test_a_model_allocates_its_codes_and_one_dequantized_weight(kind, bits):
    torch.cuda.synchronize()
    plain_held, plain_peak = allocated(None)
    held, peak = allocated(kind)
    layer = 4 * SIZES["hidden_size"] ** 2 + 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    number = SIZES["num_layers"] * layer
    assert plain_held - held >= number * (16 - bits) / 8 * 0.99
    # In eager mode the largest weight is there in fp32 and in bf16.
    largest = SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert peak <= plain_peak + 8 * largest
