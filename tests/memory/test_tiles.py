"""Layers in tiles of tokens: the same loss and gradients with less memory, in every combination."""

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory.models import SHIPPED, TEXT, make, update_of
from tests.messages import raises
from torch import nn

from trainwright.analysis.estimate import HeldBytes
from trainwright.errors import ConfigError
from trainwright.events.storage import EventStorage, get_event_storage
from trainwright.memory.module_paths import Around, put_around
from trainwright.memory.rewrite import apply_memory_settings
from trainwright.memory.tiles import choose_tiled, reject_mixing, tile_layers
from trainwright.models.fp8 import use_fp8
from trainwright.models.llama import Llama, SwiGLU
from trainwright.models.lora import add_lora
from trainwright.models.quantize import quantize_model

TILED = {"llama": "SwiGLU", "gpt2": "*.mlp", "bert": "*.intermediate", "vit": "MLP", "t5": "DenseReluDense"}
RECOMPUTED = {"activation_checkpointing": ["DecoderLayer"]}


def no_origin(label):
    return None


def precise(model, dtype=torch.float64):
    """In float64, in which sums over tiles differ by less than 1e-12, and without dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(dtype)


def llama(**options):
    return precise(make(SHIPPED["llama"][0]), **options)


def differences(expected, found):
    assert expected.keys() == found.keys()
    wrong = [name for name in expected if (expected[name] is None) != (found[name] is None)]
    assert not wrong
    return max((expected[name] - found[name]).abs().max().item() for name in expected if expected[name] is not None)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_has_the_same_loss_and_gradients(name):
    build, batch, *_ = SHIPPED[name]
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    model = precise(make(build)).eval()
    names, before = list(model.state_dict()), update_of(model, batch)
    layers = tile_layers(model, {"layers": TILED.get(name), "tokens": 7})
    assert layers
    assert list(model.state_dict()) == names
    assert differences(before, update_of(model, batch)) < 1e-12


@pytest.mark.parametrize(
    "others",
    [
        RECOMPUTED,
        {"activation_checkpointing": ["*.mlp"]},
        {**RECOMPUTED, "offload": ["decoder_input"]},
        {"activation_checkpointing": {"layers": ["DecoderLayer"], "save": ["mm"]}, "offload": ["decoder_input"]},
    ],
    ids=["recomputed", "the same layer recomputed", "offloaded", "products saved"],
)
def test_with_other_memory_settings(others):
    before, model = update_of(llama(), TEXT), llama()
    apply_memory_settings(model, {"tile": {"layers": ["SwiGLU"], "tokens": 7}, **others}, origin=no_origin)
    assert differences(before, update_of(model, TEXT)) < 1e-12


def shallow():
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24}
    return make(lambda: Llama(vocab_size=23, **sizes)).double()


def test_in_compiled_blocks_that_are_recomputed():
    before, model = update_of(shallow(), TEXT), shallow()
    others = {**RECOMPUTED, "compile_repeated_blocks": "model.layers"}
    apply_memory_settings(model, {"tile": {"layers": ["SwiGLU"], "tokens": 12}, **others}, origin=no_origin)
    assert differences(before, update_of(model, TEXT)) < 1e-12


def test_in_a_compiled_forward():
    before, model = update_of(shallow(), TEXT), shallow()
    tile_layers(model, {"layers": ["SwiGLU"], "tokens": 12})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    loss = compiled(**TEXT)["loss"]
    loss.backward()
    found = {"loss": loss.detach(), **{name: weight.grad for name, weight in model.named_parameters()}}
    assert differences(before, found) < 1e-12


def adapted(kind=None, *, dropout=0.0):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "intermediate_size": 128}
    model = Llama(vocab_size=64, **sizes)
    add_lora(model, match="*_proj", rank=4, dropout=dropout)
    for name, weight in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(weight)
    if kind is not None:
        quantize_model(model, kind)
    return model


@pytest.mark.parametrize("kind", [None, "nf4", "int8"])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_adapters_on_a_plain_and_a_quantized_base(kind, precision):
    batch = {"input_ids": torch.arange(33)[None], "labels": torch.arange(33)[None]}
    found = []
    for reserved in ({}, {"tile": {"layers": ["SwiGLU"], "tokens": 8}, **RECOMPUTED}):
        model = adapted(kind).to(torch.float64 if precision == "fp64" else torch.float32)
        apply_memory_settings(model, reserved, origin=no_origin)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            found.append(update_of(model, batch))
    assert any(name.endswith("mlp.down_proj.lora_a") and value is not None for name, value in found[0].items())
    if precision == "fp64":
        assert differences(*found) < 1e-12
    else:
        for name, value in found[0].items():
            assert value is None or torch.allclose(value, found[1][name], rtol=0.05, atol=0.02 * value.abs().max())


def test_adapters_of_peft():
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=23, **sizes))
    wanted = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(base, wanted).double()
    before = update_of(model, TEXT)
    assert len(tile_layers(model, {"layers": "*.mlp", "tokens": 7})) == 2
    assert differences(before, update_of(model, TEXT)) < 1e-12


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_models_of_transformers_by_class(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name.startswith("GPT2"):
        config = transformers.GPT2Config(vocab_size=23, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        layers = "GPT2MLP"
    else:
        config = transformers.T5Config(vocab_size=23, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
        config.decoder_start_token_id, layers = 0, "T5LayerFF"
    model = precise(getattr(transformers, name)(config)).eval()
    before = update_of(model, TEXT)
    tile_layers(model, {"layers": layers, "tokens": 7})
    assert differences(before, update_of(model, TEXT)) < 1e-12


def test_layers_in_fp8_compute_in_fp8_in_both_passes():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = SwiGLU(hidden_size=32, intermediate_size=64)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return {"loss": self.mlp(x).float().square().mean()}

    def made():
        model = make(Rows)
        use_fp8(model, match=["*_proj"], recipe="rowwise")
        return model

    batch = {"x": torch.randn(1, 48, 32, generator=torch.Generator().manual_seed(1))}
    before, model, in_bf16 = update_of(made(), batch), made(), update_of(make(Rows), batch)
    tile_layers(model, {"layers": "mlp", "tokens": 16})
    after = update_of(model, batch)
    # Scales of rows do not depend on the other rows, so the loss has no other error than that of its sum.
    assert after["loss"].item() == pytest.approx(before["loss"].item(), rel=1e-6)
    assert abs(in_bf16["loss"] - before["loss"]) > 1e-5 * before["loss"]
    for name, value in before.items():
        assert torch.allclose(value, after[name], rtol=0.02, atol=0.02 * value.abs().max()), name


class PlainTiles(Around):
    """Runs tiles one after the other, with plain autograd."""

    def __call__(self, hidden):
        return torch.cat([self.inner(tile) for tile in hidden.split(4, dim=1)], dim=1)


@pytest.mark.parametrize("recomputed", [False, True])
def test_dropout_is_the_same_in_both_passes(recomputed):
    model = adapted(dropout=0.4).double()
    tiled = copy.deepcopy(model)
    for name, module in model.named_modules():
        if name.endswith("mlp"):
            put_around(module, PlainTiles)
    reserved = RECOMPUTED if recomputed else {}
    apply_memory_settings(tiled, {"tile": {"layers": "*.mlp", "tokens": 4}, **reserved}, origin=no_origin)
    batch = {"input_ids": torch.arange(18)[None], "labels": torch.arange(18)[None]}
    assert differences(update_of(model, batch), update_of(tiled, batch)) < 1e-12
    after = torch.rand(3)  # the generator is where the plain model left it
    update_of(model, batch)
    assert torch.equal(after, torch.rand(3))
    assert differences(update_of(tiled, batch, seed=2), update_of(tiled, batch, seed=3)) > 1e-6


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 3), length=st.integers(1, 20), tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_any_shape_and_size_of_tiles(rows, length, tokens, seed):
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5)).double()
    tiled = copy.deepcopy(plain)
    holder = nn.ModuleDict({"mlp": tiled})
    tile_layers(holder, {"layers": "mlp", "tokens": tokens})
    for shape in ((rows, length, 6), (length, 6), (rows, length, 2, 6)):
        x = torch.randn(*shape, dtype=torch.float64)
        results = []
        for model in (plain, tiled):
            model.zero_grad()
            given_x = x.clone().requires_grad_()
            output = model(given_x)
            (output * torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)).sum().backward()
            results.append([output.detach(), given_x.grad, *(weight.grad.clone() for weight in model.parameters())])
        assert all(torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in zip(*results, strict=True))


def test_gradients_of_weights_in_16_bits_are_summed_precisely():
    torch.manual_seed(0)
    exact = nn.ModuleDict({"mlp": nn.Linear(8, 8, bias=False)})
    x, gradient = torch.rand(1, 4096, 8), torch.rand(1, 4096, 8)
    exact["mlp"](x).backward(gradient)
    model = copy.deepcopy(exact).bfloat16()
    model.zero_grad()
    tile_layers(model, {"layers": "mlp", "tokens": 8})
    model["mlp"](x.bfloat16()).backward(gradient.bfloat16())
    # Of 512 tiles; summed in bf16 the error is above 10 %.
    assert model["mlp"].weight.grad.dtype == torch.bfloat16
    error = model["mlp"].weight.grad.float() / exact["mlp"].weight.grad - 1
    assert error.abs().max() < 0.006


def held_at_most(tokens, length):
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": SwiGLU(hidden_size=16, intermediate_size=512)})
    if tokens:
        tile_layers(model, {"layers": "mlp", "tokens": tokens})
    x = torch.randn(1, length, 16, requires_grad=True)
    with HeldBytes() as held:
        held.begin_peak()
        model["mlp"](x).sum().backward()
    return sum(held.peak.values())


def test_memory_grows_with_the_tile_and_not_with_the_sequence():
    wide = 512 * 4
    assert held_at_most(None, 2048) > 3 * 2048 * wide
    assert held_at_most(64, 2048) < 7 * 64 * wide + 4 * 2048 * 16 * 4 + 3 * 3 * 512 * 16 * 4
    assert (held_at_most(64, 4096) - held_at_most(64, 2048)) / 2048 < 4 * 16 * 4  # bytes per token: no wide tensor


def test_frozen_layers_and_evaluations_have_no_gradients():
    model = llama()
    expected = make(lambda: llama()).eval()(**TEXT)["loss"]
    tile_layers(model, {"layers": "SwiGLU", "tokens": 7})
    with torch.no_grad():
        assert torch.allclose(model.eval()(**TEXT)["loss"], expected, rtol=1e-12)
    for weight in model.model.layers.parameters():
        weight.requires_grad_(False)
    found = update_of(model, TEXT)
    assert found["model.layers.0.mlp.up_proj.weight"] is None
    assert found["model.embed_tokens.weight"] is not None


def test_what_a_tile_puts_into_the_event_storage_is_averaged():
    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(2, 2)

        def forward(self, x):
            get_event_storage().put_scalar("mean", x.mean())
            return self.up(x)

    model = nn.ModuleDict({"mlp": Noted()})
    with EventStorage():
        tile_layers(model, {"layers": "mlp", "tokens": 2})
    with EventStorage() as storage:
        storage.step = 1
        model["mlp"](torch.tensor([[[1.0, 1], [1, 1], [3, 3], [3, 3]]])).sum().backward()
        storage.drain()
        assert storage.latest() == {"mean": (2.0, 1)}


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 4)
        nn.init.zeros_(self.out.weight)  # its own output is 0, so only other weights show that tokens are mixed

    def forward(self, x):
        return self.out(x - x.mean(dim=1, keepdim=True))


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


class Sorted(nn.Module):
    def forward(self, x):
        return x.cumsum(dim=1)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Pooled(), "token-wise"),
        (Sorted(), "token-wise"),
        (nn.GroupNorm(2, 6), "num_groups"),
        (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), "BatchNorm1d"),
        (nn.LSTM(4, 4, batch_first=True), "LSTM"),
        (Pair(4, 4), "a tuple"),
        (nn.Bilinear(4, 4, 4), "TypeError"),
    ],
)
def test_layers_that_mix_tokens_are_rejected(layer, said):
    with raises(ConfigError, "mlp", said):
        tile_layers(nn.ModuleDict({"mlp": layer}), "mlp")


def test_the_check_leaves_the_layer_and_the_generators_as_they_are():
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    layer[0].eval()
    before, state = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    reject_mixing("tile", "mlp", layer)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert [each.training for each in layer] == [False, True]


def test_a_call_with_other_arguments_is_rejected():
    class Scaled(nn.Linear):
        def forward(self, x, scale=None):
            return super().forward(x)

    model = nn.ModuleDict({"mlp": Scaled(4, 4)})
    tile_layers(model, "mlp", where="run.yaml:7")
    assert model["mlp"](x=torch.ones(1, 2, 4)).shape == (1, 2, 4)
    with raises(ConfigError, "mlp", "[1, 2, 4]", at="run.yaml:7"):
        model["mlp"](torch.ones(1, 2, 4), torch.ones(1))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("SwiGlu", "SwiGLU"),
        ({"tokens": 4}, "layers"),
        ({"layers": "SwiGLU", "tokens": 0}, "tokens"),
        ({"layers": "SwiGLU", "tokens": True}, "tokens"),
        ({"layers": "SwiGLU", "size": 4}, "size"),
        ({"model.layers.0": "SwiGLU", "model.layers.0.mlp": "Linear"}, "model.layers.0.mlp"),
        ("DecoderLayer", "rotations"),
    ],
)
def test_a_setting_that_cannot_be_is_rejected(setting, said):
    with raises(ConfigError, "tile", said):
        choose_tiled(llama(), setting)


def test_the_log_has_the_number_of_layers(caplog):
    with caplog.at_level(logging.INFO, logger="trainwright"):
        assert tile_layers(llama(), {"layers": ["*.mlp"]}) == [f"model.layers.{number}.mlp" for number in range(3)]
    assert [record.getMessage() for record in caplog.records] == [
        "model.tile: 3 SwiGLU run in tiles of up to 8192 tokens."
    ]
