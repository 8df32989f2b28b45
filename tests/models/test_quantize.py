"""Which layers `model.quantize` chooses, what it rejects, and what becomes of the model."""

import copy

import pytest
import torch
from tests.messages import check_message, raises
from torch import nn

from trainwright.config import RunConfig
from trainwright.errors import ConfigError
from trainwright.models.fp8 import use_fp8
from trainwright.models.from_config import build_model_section
from trainwright.models.layers.quantized_linear import QuantizedLinear, QuantizedLoRALinear, quantized_layers
from trainwright.models.llama import Llama
from trainwright.models.lora import add_lora, lora_state, merge_lora
from trainwright.models.quantize import (
    count_weights,
    dequantize_model,
    describe_quantized,
    quantize_model,
    read_quantize,
)

TOKENS = torch.arange(24).reshape(2, 12) % 17
ATTENTION = tuple(f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo")
MLP = tuple(f"model.layers.{layer}.mlp.{name}_proj" for layer in (0, 1) for name in ("gate", "up", "down"))


def llama(**changes):
    torch.manual_seed(0)
    return Llama(**{"vocab_size": 17, "hidden_size": 64, "num_layers": 2, "num_heads": 2, **changes})


def adapted(match="*_proj", **changes):
    model = llama(**changes)
    add_lora(model, match=match, rank=2)
    return model


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(TOKENS)["logits"]


def names(model):
    return {name for name, _ in quantized_layers(model)}


@pytest.mark.parametrize("match", ["*_proj", "*.q_proj", ["*_proj", "lm_head"]], ids=["all", "queries", "head"])
def test_the_layers_with_an_adapter_are_quantized_but_not_the_head(match):
    model = adapted(match, tie_embeddings=False)
    before = set(model.state_dict())
    renamed = quantize_model(model, "nf4")
    expected = {name for name in (*ATTENTION, *MLP) if match != "*.q_proj" or name.endswith("q_proj")}
    assert names(model) == expected
    assert all(type(layer) is QuantizedLoRALinear for _, layer in quantized_layers(model))
    assert set(renamed) == {f"{name}.weight" for name in expected}
    assert set(model.state_dict()) == (before - renamed.keys()) | {code for codes in renamed.values() for code in codes}


def test_match_also_quantizes_layers_without_an_adapter():
    model = adapted("*.q_proj", tie_embeddings=False)
    quantize_model(model, {"type": "int8", "match": ["*_proj", "lm_head"]})
    assert names(model) == {*ATTENTION, *MLP, "lm_head"}
    kinds = {name: type(layer) for name, layer in quantized_layers(model)}
    assert {kind for name, kind in kinds.items() if name.endswith("q_proj")} == {QuantizedLoRALinear}
    assert {kind for name, kind in kinds.items() if not name.endswith("q_proj")} == {QuantizedLinear}
    model(TOKENS, labels=TOKENS)["loss"].backward()
    trained = {name for name, each in model.named_parameters() if each.grad is not None}
    assert trained == set(lora_state(model))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_model_computes_as_with_the_dequantized_weights(kind):
    model = adapted()
    exact = logits(model)
    quantize_model(model, kind)
    plain = copy.deepcopy(model)
    assert set(dequantize_model(plain)) == names(model)
    assert not names(plain)
    assert torch.equal(logits(model), logits(plain))
    assert 0 < float((logits(model) - exact).norm() / exact.norm()) < (0.2 if kind == "nf4" else 0.02)
    merged = copy.deepcopy(model)
    assert set(merge_lora(merged)) == names(model)
    assert torch.allclose(logits(merged), logits(model), atol=1e-5)
    assert set(merged.state_dict()) == set(llama().state_dict())


def test_only_the_adapters_are_trained_and_the_loss_falls():
    model = adapted(tie_embeddings=False)
    for name, parameter in model.named_parameters():  # large enough that the adapters have an effect
        if name.endswith("_proj.weight") or "lm_head" in name:
            nn.init.normal_(parameter, std=0.2)
    quantize_model(model, "nf4")
    frozen = {name: each.clone() for name, each in model.named_parameters() if not each.requires_grad}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    losses = []
    for _ in range(20):
        loss = model(TOKENS, labels=TOKENS)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(each, dict(model.named_parameters())[name]) for name, each in frozen.items())


def test_the_weights_are_counted_and_not_their_codes():
    model = adapted()
    expected = sum(each.numel() for each in model.parameters())
    quantize_model(model, "nf4")
    assert count_weights(model) == expected
    assert describe_quantized(llama()) is None


def test_the_log_line_names_what_is_quantized_and_why_the_rest_is_not():
    model = adapted("*_proj", tie_embeddings=False)
    quantize_model(model, {"type": "nf4", "match": "self_attn.*"})
    check_message(describe_quantized(model), "nf4: 8 of 15 linear layers", "*.q_proj", "lm_head", "not in match")
    check_message(describe_quantized_of("*.q_proj"), "nf4: 2 of 15 linear layers", "tied", "without an adapter")


def describe_quantized_of(match):
    model = adapted(match)
    quantize_model(model, "nf4")
    return describe_quantized(model)


def test_layers_in_fp8_do_not_include_quantized_ones():
    model = adapted("*.q_proj")
    quantize_model(model, "nf4")
    found = use_fp8(model, match=["*_proj"])
    assert set(found.chosen) == {name for name in (*ATTENTION, *MLP) if not name.endswith("q_proj")}
    assert any("quantized" in reason for reason in found.left)
    with raises(ConfigError, "runtime.fp8.match", "quantized"):
        use_fp8(model, match=["*.q_proj"])


def test_a_model_on_the_meta_device_gets_codes_without_memory():
    with torch.device("meta"):
        model = adapted()
        quantize_model(model, "nf4")
    codes = model.model.layers[0].mlp.up_proj
    assert codes.weight_codes.is_meta
    whole = adapted()
    quantize_model(whole, "nf4")
    shapes = [{name: each.shape for name, each in one.state_dict().items()} for one in (model, whole)]
    assert shapes[0] == shapes[1]


def build(tmp_path, *overrides):
    file = tmp_path / "run.yaml"
    file.write_text(
        """name: run
model:
  type: llama
  vocab_size: 17
  hidden_size: 64
  num_layers: 2
  num_heads: 2
  tie_embeddings: false
  lora: {match: "*_proj", rank: 2}
  quantize: {type: nf4}
"""
    )
    config = RunConfig.load(file, overrides)
    return build_model_section(config.model, project_dir=tmp_path, origin=config.origin)[0]


@pytest.mark.parametrize(
    "given", ["nf4", "{type: nf4}", "{type: nf4, match: '*_proj'}", "{type: int8, match: [mlp.*]}"]
)
def test_forms_of_the_setting(tmp_path, given):
    model = build(tmp_path, f"model.quantize={given}")
    assert names(model) == set(MLP if "mlp" in given else (*ATTENTION, *MLP))
    assert not names(build(tmp_path, "model.quantize=null"))


WRONG = {
    "no adapters": (["model.lora=null"], ["adapter", "model.lora"]),
    "an unknown type": (["model.quantize={type: nf5}"], ["quantize.type", "nf5", "nf4"]),
    "no type": (["model.quantize={match: '*'}"], ["quantize", "type: nf4"]),
    "a number": (["model.quantize=4"], ["quantize", "4"]),
    "an unknown key": (["model.quantize={type: nf4, matches: '*'}"], ["quantize.matches", "match"]),
    "no layer": (["model.quantize={type: nf4, match: '*.q_prj'}"], ["quantize.match", "*.q_prj", "*.q_proj"]),
    "an empty list": (["model.quantize={type: nf4, match: []}"], ["quantize.match"]),
    "a trained weight": (
        ["model.lora={match: '*.v_proj', train: '*.q_proj.weight'}", "model.quantize={type: nf4, match: '*_proj'}"],
        ["quantize.match", "model.layers.0.self_attn.q_proj", "trained"],
    ),
    "a tied head": (
        ["model.tie_embeddings=true", "model.quantize={type: nf4, match: lm_head}"],
        ["quantize.match", "lm_head", "tied"],
    ),
    "only the head": (["model.lora={match: lm_head}"], ["quantize", "lm_head", "the head"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_raises_with_its_name_and_line(tmp_path, case):
    overrides, words = WRONG[case]
    with raises(ConfigError, *words) as caught:
        build(tmp_path, *overrides)
    assert caught.value.problem.startswith("model.quantize")
    assert caught.value.where is not None


def test_an_error_in_the_file_has_its_line(tmp_path):
    with raises(ConfigError, "model.quantize", at="run.yaml:10"):
        build(tmp_path, "model.lora=null")


def test_codes_cannot_become_trainable_during_the_run(tmp_path):
    with raises(ConfigError, "model.freeze", "quantized", "weight_codes"):
        build(tmp_path, "model.freeze={match: 'model.layers.0.*', until_step: 3}")
    model = build(tmp_path, "model.freeze={match: 'model.layers.0.*norm*', until_step: 3}")
    assert names(model)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.MultiheadAttention(16, 2)
        self.layer = nn.TransformerEncoderLayer(16, 2)
        self.linear = nn.Linear(16, 16)
        self.complex = nn.Linear(16, 16, dtype=torch.complex64)


@pytest.mark.parametrize("glob", ["body.out_proj", "layer.linear1", "complex"])
def test_layers_that_cannot_be_quantized_raise_if_they_are_named(glob):
    model = Attention()
    add_lora(model, match="linear", rank=2)
    with raises(ConfigError, "quantize.match", glob):
        quantize_model(model, {"type": "nf4", "match": glob})
    assert not names(model)


def test_values_that_are_not_finite_raise_with_the_layer():
    model = adapted()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with raises(ConfigError, "quantize", "model.layers.1.mlp.up_proj", "not finite"):
        quantize_model(model, "nf4")


def test_read_settings_are_compared_by_value():
    assert read_quantize("nf4") == read_quantize({"type": "nf4"}) == read_quantize({"type": "nf4", "match": None})
    assert read_quantize({"type": "int8", "match": "*.q_proj"}).match == ("*.q_proj",)
