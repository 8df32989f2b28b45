"""Runs with `runtime.precision: fp8` on a CPU, which rounds as a GPU does: losses, resuming, settings, commands."""

import json
import logging

import pytest
import torch
from tests.messages import check_message, raises
from torch import nn

from trainwright import Hook, RunConfig, Trainer, build_trainer
from trainwright.analysis.check import check_run
from trainwright.analysis.estimate import estimate
from trainwright.build.run import build_evaluator
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.layers.fp8_linear import Fp8Linear, Fp8LoRALinear

EVERYWHERE = "runtime.fp8={match: '*_proj'}"


class Rows(torch.utils.data.Dataset):
    """Rows of 16 tokens that count up by 1, 2 or 3."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = (torch.arange(16) * (1 + index % 3) + index) % 61
        return {"input_ids": row, "labels": row}


def load(folder, *overrides, fp8=True):
    folder.mkdir(exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(
        f"""name: run
output_dir: {folder}
model: {{type: llama, vocab_size: 64, hidden_size: 64, num_layers: 3, num_heads: 4, num_kv_heads: 2}}
data:
  train: {{type: "{__name__}:Rows"}}
  eval: {{valid: {{type: "{__name__}:Rows"}}}}
  collator: stack
trainer:
  type: language_model
  max_steps: 4
  global_batch_size: 8
  micro_batch_size: 4
  optimizer: {{type: adamw, lr: 1e-2}}
evaluation: {{every_steps: 2, max_batches: 1}}
checkpoint: {{every_steps: 2}}
writers: [json]
log: {{every_steps: 1}}
runtime: {{device: cpu, precision: bf16}}
"""
    )
    return RunConfig.load(file, [*(["runtime.precision=fp8", EVERYWHERE] if fp8 else []), *overrides])


def train(config, trainer_class=None):
    trainer = build_trainer(config, trainer_class)
    trainer.train()
    return trainer


def lines(folder):
    found = [json.loads(line) for line in (folder / "run" / "metrics.json").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in found]


def losses(folder):
    return [line["loss"] for line in lines(folder)]


def test_a_run_in_fp8_learns_as_one_in_bf16(tmp_path):
    for name, fp8 in (
        ("bf16", []),
        ("tensorwise", [EVERYWHERE]),
        ("rowwise", ["runtime.fp8={match: '*_proj', recipe: rowwise}"]),
    ):
        overrides = ["runtime.precision=fp8", *fp8] if fp8 else []
        train(load(tmp_path / name, "trainer.max_steps=30", "evaluation={}", "data.eval={}", *overrides, fp8=False))
    expected = losses(tmp_path / "bf16")
    assert expected[-1] < 0.5 * expected[0]
    for recipe in ("tensorwise", "rowwise"):
        found = losses(tmp_path / recipe)
        assert found != expected
        assert found[0] == pytest.approx(expected[0], rel=5e-3)
        assert found[-1] == pytest.approx(expected[-1], rel=0.1)


SETTINGS = {
    "eager": [],
    "compile": ["runtime.mode=compile", "runtime.compile_backend=aot_eager"],
    "graph": ["runtime.mode=graph"],
    "masters": ["model.dtype=bf16", "trainer.optimizer={type: adamw, lr: 1e-2, master_weights: true}"],
    "rowwise": ["runtime.fp8={match: '*_proj', recipe: rowwise}"],
    "lora": ["model.lora={match: '*_proj', rank: 4, dropout: 0.1}"],
    "recomputed": ["model.activation_checkpointing={layers: [DecoderLayer]}"],
    "repeated": ["model.compile_repeated_blocks=model.layers"],
}


@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind not in ("compile", "repeated")])
def test_an_interrupted_run_continues_with_the_same_bits(tmp_path, kind):
    overrides = SETTINGS[kind]
    whole = train(load(tmp_path / "whole", *overrides))
    assert any(isinstance(layer, Fp8Linear | Fp8LoRALinear) for layer in whole.model.modules())
    train(load(tmp_path / "parts", *overrides, "trainer.max_steps=2"))
    train(load(tmp_path / "parts", *overrides))
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    stores = [CheckpointStore(tmp_path / name / "run" / "checkpoints") for name in ("whole", "parts")]
    for part in ("model", "optimizers"):
        _assert_equal(*(store.read(4, part) for store in stores))


def _assert_equal(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            _assert_equal(left[key], right[key])


def test_memory_settings_and_modes_do_not_change_a_bit(tmp_path):
    kinds = ("eager", "graph", "recomputed", "compile", "repeated")
    for kind in kinds:
        train(load(tmp_path / kind, "evaluation={}", "data.eval={}", *SETTINGS[kind]))
    expected, *found = (losses(tmp_path / kind) for kind in kinds)
    assert found[:2] == [expected, expected]
    for each in found[2:]:
        assert each == pytest.approx(expected, rel=1e-3)


def test_operations_that_are_kept_include_products_in_fp8(tmp_path):
    setting = "model.activation_checkpointing={layers: [DecoderLayer], save: [mm]}"
    from tests.models.layers.test_fp8_linear import counting

    def count(*overrides):
        trainer = build_trainer(load(tmp_path / str(len(overrides)), *overrides))
        with counting() as counts:
            trainer.train()
        return counts["_scaled_mm"]

    assert count(setting) == count()


def test_a_checkpoint_is_that_of_any_run_and_precision_counts_as_a_change(tmp_path):
    train(load(tmp_path, "trainer.max_steps=2"))
    saved = CheckpointStore(tmp_path / "run" / "checkpoints").read(2, "model")
    plain = build_trainer(load(tmp_path / "plain", fp8=False))
    assert {name: (value.shape, value.dtype) for name, value in saved.items()} == {
        name: (value.shape, value.dtype) for name, value in plain.model.state_dict().items() if name in saved
    }
    with raises(CheckpointError, "runtime.precision", "--accept-changes"):
        build_trainer(load(tmp_path, fp8=False))
    with raises(CheckpointError, "runtime.precision", "runtime.fp8.match"):  # auto does not keep fp8 without its layers
        build_trainer(load(tmp_path, "runtime.precision=auto", fp8=False))
    trainer = build_trainer(load(tmp_path, fp8=False), accept_changes=True)
    trainer.train()
    assert trainer.step == 4
    assert not any(isinstance(layer, Fp8Linear) for layer in trainer.model.modules())


def test_evaluation_runs_in_bf16(tmp_path):
    train(load(tmp_path / "fp8", "trainer.optimizer.lr=1e-30"))
    train(load(tmp_path / "bf16", "trainer.optimizer.lr=1e-30", fp8=False))
    found, expected = lines(tmp_path / "fp8"), lines(tmp_path / "bf16")
    assert [line.get("valid/loss") for line in found] == [line.get("valid/loss") for line in expected]
    assert [line["loss"] for line in found] != [line["loss"] for line in expected]
    evaluator = build_evaluator(load(tmp_path / "fp8", "runtime.device=auto"))
    assert not any(isinstance(layer, Fp8Linear) for layer in evaluator.model.modules())


def test_the_start_summary_lists_the_layers(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        build_trainer(load(tmp_path, "runtime.fp8={match: 'mlp.*', skip: [layers.0.*]}"))
    [line] = [each for each in caplog.messages if "train in fp8" in each]
    check_message(line, "6 of 22", "*.gate_proj", "7 in runtime.fp8.skip")


def test_settings_without_effect_and_devices_without_fp8_raise(tmp_path, monkeypatch):
    with raises(ConfigError, "runtime.fp8", "bf16"):
        load(tmp_path, "runtime.fp8={recipe: rowwise}", fp8=False)
    with raises(ConfigError, "runtime.precision", "too small"):
        build_trainer(load(tmp_path, "runtime.fp8=null"))
    with raises(ConfigError, "runtime.fp8.match", "*.projj"):
        build_trainer(load(tmp_path, "runtime.fp8={match: '*.projj'}"))
    with raises(ConfigError, "runtime.fp8.recipe"):
        load(tmp_path, "runtime.fp8={recipe: row}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(ConfigError, "runtime.precision", "8.9", "bf16", golden=False):
        build_trainer(load(tmp_path, "runtime.device=auto"))
    with raises(ConfigError, "runtime.precision", "runtime.mesh.tensor"):
        estimate(load(tmp_path, "runtime.mesh={tensor: 2}"), world_size=2)


def test_auto_does_not_continue_a_run_in_fp8_in_another_precision(tmp_path, monkeypatch):
    monkeypatch.setattr("trainwright.models.fp8.SMALLEST_GAIN", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train(load(tmp_path, "trainer.max_steps=2", "runtime.fp8=null"))
    with raises(CheckpointError, "runtime.precision", golden=False):
        build_trainer(load(tmp_path, "runtime.precision=auto", "runtime.fp8=null", "runtime.device=auto"))
    with raises(ConfigError, "runtime.precision", "8.9", golden=False):
        build_trainer(load(tmp_path, "runtime.fp8=null", "runtime.device=auto"))


def test_a_gpu_before_ada_is_rejected(monkeypatch):
    from trainwright.backends.cuda import CudaBackend

    backend = CudaBackend(torch.device("cuda", 0))
    monkeypatch.setattr(CudaBackend, "describe", lambda self: "cuda:0 (NVIDIA A100, 80 GiB)")
    for capability, reason in (
        ((8, 0), "cuda:0 (NVIDIA A100, 80 GiB) has 8.0"),
        ((8, 9), None),
        ((9, 0), None),
        ((12, 0), None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert backend.missing_fp8("cuda") == reason


def test_a_loss_that_is_not_finite_is_seen(tmp_path):
    class Bad(Hook):
        def before_step(self):
            if self.trainer.step == 1:
                with torch.no_grad():
                    self.trainer.model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")

    class Breaking(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [Bad()]

    config = load(tmp_path, "trainer.type=trainer")
    with pytest.raises(Exception, match="nan"):
        train(config, Breaking)


def test_check_and_estimate_know_the_precision(tmp_path):
    config = load(tmp_path)
    report = check_run(tmp_path / "run.yaml", ["runtime.precision=fp8", EVERYWHERE])
    assert report.is_ok, report.render()
    assert report.skipped == []
    fp8, bf16 = (estimate(each, world_size=1) for each in (config, load(tmp_path / "bf16", fp8=False)))
    assert fp8.peak_bytes != bf16.peak_bytes
    sharded = load(tmp_path / "fsdp", "runtime.mesh={fsdp: 2}", "runtime.gather_precision=bf16")
    assert estimate(sharded, world_size=2).peak_bytes > 0


def test_blocks_that_differ_in_fp8_alone_are_compiled_as_a_stack(tmp_path):
    train(load(tmp_path / "plain", "runtime.fp8={match: 'layers.1.*'}", "trainer.max_steps=1"))
    train(load(tmp_path / "stack", "runtime.fp8={match: 'layers.1.*'}", "trainer.max_steps=1", *SETTINGS["repeated"]))
    assert losses(tmp_path / "stack") == pytest.approx(losses(tmp_path / "plain"), rel=1e-3)


def test_a_hook_of_a_layer_sees_its_output(tmp_path):
    trainer = build_trainer(load(tmp_path))
    seen = []
    layer = trainer.model.model.layers[0].self_attn.k_proj
    layer.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    trainer.train()
    assert seen[0] == (4, 16, 32)
    assert isinstance(layer, nn.Linear)
