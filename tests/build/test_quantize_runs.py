"""Runs with `model.quantize`: losses, modes, exact resuming, checkpoints by reference, export, commands."""

import ctypes
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.build.test_fp8_runs import lines, losses, train
from tests.build.test_fp8_runs import load as load_plain
from tests.distributed.forked_launch import launch_well
from tests.messages import check_message, raises

from trainwright import AutoModel, RunConfig, build_trainer, load_checkpoint
from trainwright.analysis.check import check_run
from trainwright.analysis.estimate import estimate
from trainwright.analysis.explain import explain
from trainwright.build.run import build_evaluator, build_model
from trainwright.checkpoint.store import CheckpointStore
from trainwright.commands.explain import render
from trainwright.errors import CheckpointError, ConfigError
from trainwright.export.huggingface import export_run
from trainwright.models.layers.quantized_linear import quantized_layers
from trainwright.models.llama import Llama
from trainwright.models.lora import merge_lora
from trainwright.models.quantize import dequantize_model

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
TOKENS = torch.arange(16)[None] % 61
NF4 = "model.quantize=nf4"


def load(folder, *overrides, pretrained=False):
    sizes = ", ".join(f"{name}: {value}" for name, value in SIZES.items())
    source = f"pretrained: {folder.parent / 'base'}" if pretrained else sizes
    model = f"model={{type: llama, {source}, lora: {{match: '*_proj', rank: 4}}}}"
    return load_plain(folder, model, "runtime.precision=fp32", *overrides, fp8=False)


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    model = Llama(**SIZES)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.save_pretrained(tmp_path / "base")


def bits_of(model):
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS)["logits"]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_run_learns_nearly_as_with_the_exact_base(tmp_path, base, kind):
    short = ("trainer.max_steps=30", "evaluation={}", "data.eval={}")
    train(load(tmp_path / "exact", *short, pretrained=True))
    trainer = train(load(tmp_path / kind, *short, f"model.quantize={kind}", pretrained=True))
    assert len(dict(quantized_layers(trainer.model))) == 21
    expected, found = losses(tmp_path / "exact"), losses(tmp_path / kind)
    assert found != expected
    assert found[-1] < 0.8 * found[0]
    assert found[-1] == pytest.approx(expected[-1], rel=0.1 if kind == "nf4" else 0.02)


SETTINGS = {
    "eager": [],
    "int8": ["model.quantize=int8"],
    "graph": ["runtime.mode=graph"],
    "bf16": ["runtime.precision=bf16"],
    "weights in bf16": ["model.dtype=bf16", "runtime.precision=bf16"],
    "dropout": ["model.lora={match: '*_proj', rank: 4, dropout: 0.1}"],
    "recomputed": ["model.activation_checkpointing={layers: [DecoderLayer]}"],
    "some layers": ["model.lora={match: '*.q_proj'}", "model.quantize={type: nf4, match: '*_proj'}"],
    "compile": ["runtime.mode=compile", "runtime.compile_backend=aot_eager"],
    "repeated": ["model.compile_repeated_blocks=model.layers"],
}


@pytest.mark.parametrize("pretrained", [False, True], ids=["random base", "pretrained"])
@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind not in ("compile", "repeated")])
def test_an_interrupted_run_continues_with_the_same_bits(tmp_path, base, kind, pretrained):
    overrides = [NF4, *SETTINGS[kind]]
    whole = train(load(tmp_path / "whole", *overrides, pretrained=pretrained))
    train(load(tmp_path / "parts", *overrides, "trainer.max_steps=2", pretrained=pretrained))
    parts = train(load(tmp_path / "parts", *overrides, pretrained=pretrained))
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert_same(bits_of(parts.model), bits_of(whole.model))
    loaded = load_checkpoint(tmp_path / "whole" / "run")
    assert_same(bits_of(loaded), bits_of(whole.model))
    assert torch.equal(logits(loaded), logits(whole.model))


def test_memory_settings_and_modes_do_not_change_a_bit(tmp_path):
    kinds = ("eager", "graph", "recomputed", "compile", "repeated")
    for kind in kinds:
        train(load(tmp_path / kind, NF4, "evaluation={}", "data.eval={}", *SETTINGS[kind]))
    expected, *found = (losses(tmp_path / kind) for kind in kinds)
    assert found[:2] == [expected, expected]
    for each in found[2:]:
        assert each == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_has_the_adapters_and_refers_to_the_codes(tmp_path, base):
    train(load(tmp_path / "run", NF4, pretrained=True))
    store = CheckpointStore(tmp_path / "run" / "run" / "checkpoints")
    assert all(".lora_" in name for name in store.read(4, "model"))
    hashes = store.read(4, "base")["hashes"]
    assert {name.rpartition(".")[2] for name in hashes} == {
        *("weight", "weight_codes", "weight_scales", "weight_ranges"),
    }
    assert "model.layers.0.mlp.up_proj.weight_codes" in hashes
    with torch.no_grad():
        other = Llama.from_pretrained(base)
        other.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        other.save_pretrained(base)
    with raises(CheckpointError, "model.layers.0.mlp.up_proj.weight_codes", "base", golden=False):
        train(load(tmp_path / "run", NF4, "trainer.max_steps=6", pretrained=True))


def test_a_checkpoint_of_a_random_base_has_the_codes(tmp_path):
    trainer = train(load(tmp_path / "run", NF4))
    saved = CheckpointStore(tmp_path / "run" / "run" / "checkpoints").read(4, "model")
    codes = {name: each for name, each in saved.items() if name.endswith("weight_codes")}
    assert len(codes) == 21
    assert_same(codes, {name: each for name, each in bits_of(trainer.model).items() if name in codes})
    assert not any("table" in name for name in saved)


def test_the_setting_cannot_change_within_a_run(tmp_path):
    train(load(tmp_path / "run", NF4))
    with raises(CheckpointError, "model", golden=False):
        train(load(tmp_path / "run", "model.quantize=int8", "trainer.max_steps=6"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_export_has_the_dequantized_base_with_the_adapters(tmp_path, base, dtype):
    settings = ["model.lora={match: '*.q_proj'}", "model.quantize={type: nf4, match: '*_proj'}", f"model.dtype={dtype}"]
    train(load(tmp_path / "run", *settings, pretrained=True))
    folder = export_run(tmp_path / "run" / "run", tmp_path / "merged")
    expected = load_checkpoint(tmp_path / "run" / "run")
    found = AutoModel.from_pretrained(folder)
    assert torch.allclose(logits(found).float(), logits(expected).float(), atol=1e-5 if dtype == "fp32" else 0.03)
    dequantize_model(expected)
    merge_lora(expected)
    assert_same(bits_of(found), bits_of(expected))
    written = load_file(folder / "model.safetensors")
    assert {each.dtype for each in written.values()} == {torch.float32 if dtype == "fp32" else torch.bfloat16}
    plain = export_run(tmp_path / "run" / "run", tmp_path / "plain", file_format="safetensors")
    assert_same(load_file(plain / "model.safetensors"), {name: written[name] for name in written})


def test_a_run_evaluates_and_generates(tmp_path, base):
    trainer = train(load(tmp_path / "run", NF4, pretrained=True))
    evaluator = build_evaluator(load(tmp_path / "run", NF4, pretrained=True))
    evaluator.load_weights(4)
    last = json.loads((tmp_path / "run" / "run" / "metrics.json").read_text().splitlines()[-1])
    assert evaluator.evaluate()["valid/loss"] == pytest.approx(last["valid/loss"], rel=1e-6)
    model = load_checkpoint(tmp_path / "run" / "run")
    plain = load_checkpoint(tmp_path / "run" / "run")
    dequantize_model(plain)
    assert torch.equal(
        model.generate(TOKENS, max_new_tokens=4, temperature=0), plain.generate(TOKENS, max_new_tokens=4, temperature=0)
    )
    assert trainer.step == 4


def test_the_start_of_a_run_names_the_layers(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        build_trainer(load(tmp_path / "run", NF4, "model.dtype=bf16"))
    said = [record.getMessage() for record in caplog.records]
    plain = sum(each.numel() for each in Llama(**SIZES).parameters())
    adapters = plain and sum(
        each.numel()
        for name, each in build_trainer(load(tmp_path / "two")).model.named_parameters()
        if ".lora_" in name
    )
    assert any(f"{plain + adapters:,} parameters in bfloat16 and float32" in each for each in said)
    check_message(next(each for each in said if "nf4" in each), "nf4: 21 of 22 linear layers")


def test_fp8_skips_quantized_layers_with_the_reason(tmp_path, caplog):
    lora = "model.lora={match: '*.q_proj'}"
    with caplog.at_level(logging.INFO):
        train(load(tmp_path / "run", NF4, lora, "runtime.precision=fp8", "runtime.fp8={match: '*_proj'}"))
    assert any("3 quantized (model.quantize)" in record.getMessage() for record in caplog.records)
    with raises(ConfigError, "runtime.precision", "quantized"):
        train(load(tmp_path / "all", NF4, "runtime.precision=fp8"))


def test_estimate_counts_the_codes(tmp_path, base):
    exact = estimate(load(tmp_path / "exact", pretrained=True), world_size=1)
    for kind, bits in (("nf4", 4.2), ("int8", 8.3)):
        found = estimate(load(tmp_path / kind, f"model.quantize={kind}", pretrained=True), world_size=1)
        assert found.num_parameters == exact.num_parameters
        weights = sum(each.numel() for name, each in Llama(**SIZES).named_parameters() if "_proj" in name)
        saved = exact.most["parameters"] - found.most["parameters"]
        assert saved == pytest.approx(weights * (32 - bits) / 8, rel=0.05)
        assert found.checkpoint_bytes == exact.checkpoint_bytes


def test_check_and_explain_know_the_setting(tmp_path):
    config = load(tmp_path / "run", NF4)
    config.save(tmp_path / "saved.yaml")
    assert check_run(tmp_path / "saved.yaml").is_ok
    [line] = [line for line in render(explain(config)) if "stored as nf4" in line]
    assert "quantize the layers with an adapter" in line
    assert "21 layers (model.layers.0.self_attn.q_proj, " in line


@pytest.mark.parametrize("axis", ["fsdp", "tensor", "pipeline", "context"])
def test_axes_that_shard_the_model_raise(tmp_path, axis):
    with raises(ConfigError, "model.quantize", "replicate"):
        estimate(load(tmp_path / "run", NF4, f"runtime.mesh={{{axis}: 2}}"), world_size=2)


LARGE = {"hidden_size": 1024, "num_layers": 4, "num_heads": 8, "vocab_size": 512, "intermediate_size": 2048}
SMALL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 512}


_MMAP_THRESHOLD = -3  # malloc.h


def megabytes(field):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1000


def measure(folder):
    # glibc maps weights of 32 MB and more, so that their memory returns to the system. These are smaller.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    build_model(RunConfig.load(folder / "small.yaml"))  # imports at first use
    before = megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # starts the high-water mark again
    model = build_model(RunConfig.load(folder / "large.yaml"))
    held = sum(each.nbytes for each in model.parameters()) / 1e6
    measured = {"held": held, "peak": megabytes("VmHWM") - before, "rest": megabytes("VmRSS") - before}
    (folder / "measured.json").write_text(json.dumps(measured))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark of memory is Linux's")
def test_building_needs_no_more_memory_than_the_model_in_16_bits(tmp_path):
    for name, sizes in (("large", LARGE), ("small", SMALL)):
        model = Llama(**sizes).bfloat16()
        size = sum(each.nbytes for each in model.parameters()) / 1e6
        model.save_pretrained(tmp_path / name, max_shard_bytes=10_000_000)
        section = f"{{type: llama, pretrained: {name}, dtype: bf16, quantize: nf4, lora: {{match: '*_proj', rank: 2}}}}"
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\noutput_dir: {tmp_path}\nmodel: {section}\n")
        if name == "large":
            expected = size
    launch_well(tmp_path, 1, measure)
    found = json.loads((tmp_path / "measured.json").read_text())
    assert expected > 75
    assert found["held"] < 0.3 * expected
    assert found["peak"] < expected + 20  # a shard is mapped while it is read
    assert found["rest"] < found["held"] + 10
