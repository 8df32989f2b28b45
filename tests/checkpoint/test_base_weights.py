"""Frozen pretrained weights are stored by reference: small checkpoints, verified against the folder that they name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.distributed.forked_launch import launch_well
from tests.export.runs import TEXT
from tests.messages import raises

from trainwright import Hook, Mean, RunConfig, build_trainer, load_checkpoint, run_experiment
from trainwright.checkpoint.base_weights import bit_checksums, hash_weights
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError
from trainwright.export.huggingface import export_run
from trainwright.models.llama import Llama
from trainwright.trainers.language_model import LanguageModelTrainer

RUN = """
name: adapted
model: {type: llama, pretrained: base, lora: {match: "*.q_proj", rank: 2}}
data:
  train: {type: pack, length: 16, tokenizer: bytes, source: {type: text, path: text.txt}}
  eval: {valid: {type: pack, length: 16, tokenizer: bytes, source: {type: text, path: text.txt}}}
trainer: {type: language_model, max_steps: 4, global_batch_size: 4, optimizer: {type: adamw, lr: 1e-2}}
evaluation: {every_steps: 2, batch_size: 8, max_batches: 2}
checkpoint: {every_steps: 2, keep_last: 4, keep_best: {metric: valid/loss}}
writers: []
runtime: {device: cpu}
"""
SIZES = {"vocab_size": 260, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "max_positions": 32}
FROZEN = "model={type: llama, pretrained: base, freeze: [model.layers.0.*]}"
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(3)
    return Llama(**SIZES).save_pretrained(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def project(tmp_path, base):
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def load(project, *overrides, output="runs"):
    return RunConfig.load(project / "run.yaml", [f"output_dir={project / output}", *overrides])


def train(project, *overrides, output="runs", trainer=None):
    built = build_trainer(load(project, *overrides, output=output), trainer)
    built.train()
    return built


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def are_equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def saved(trainer, step):
    folder = trainer.context.store.path(step)
    named = folder / "base.json"
    return load_file(folder / "model.safetensors"), json.loads(named.read_text())["hashes"] if named.exists() else {}


def change_base(project):
    path = project / "base" / "model.safetensors"
    tensors = load_file(path)
    tensors[WEIGHT][0, 0] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_checkpoint_of_adapters_has_only_what_is_trained(project):
    trainer = train(project)
    stored, hashes = saved(trainer, 4)
    assert stored.keys() == {name for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert all("lora_" in name for name in stored)
    assert hashes.keys() | stored.keys() == trainer.model.state_dict().keys()
    model = load_checkpoint(project / "runs/adapted")
    assert are_equal(weights(model), weights(trainer.model))
    assert export_run(project / "runs/adapted", project / "out").is_dir()
    assert run_experiment(load(project), mode="eval")[1] == trainer.eval_logs


def test_a_resumed_run_of_adapters_repeats_the_bits(project):
    whole = train(project, "trainer.max_steps=6", "trainer.schedule={type: constant}", output="whole")
    train(project, "trainer.schedule={type: constant}")
    resumed = build_trainer(load(project, "trainer.max_steps=6", "trainer.schedule={type: constant}"))
    assert resumed.step == 4
    assert resumed.train() == whole.eval_logs
    assert are_equal(weights(resumed.model), weights(whole.model))
    assert saved(resumed, 6)[1] == saved(whole, 6)[1] != {}


def test_a_changed_base_is_rejected_wherever_it_is_loaded(project):
    train(project)
    change_base(project)
    with raises(CheckpointError, "step-00000004", WEIGHT):
        load_checkpoint(project / "runs/adapted")
    with raises(CheckpointError, "step-00000004", WEIGHT):
        build_trainer(load(project, "trainer.max_steps=6"))
    with raises(CheckpointError, "step-00000004", WEIGHT):
        run_experiment(load(project), mode="eval")
    with raises(CheckpointError, "step-00000004", WEIGHT):
        export_run(project / "runs/adapted", project / "out")


def test_a_missing_base_is_named(project):
    train(project)
    (project / "base" / "model.safetensors").unlink()
    with raises(CheckpointError, str(project / "base")):
        load_checkpoint(project / "runs/adapted")
    shutil.rmtree(project / "base")
    # Without a golden text, which would have the folders of this machine.
    with pytest.raises(CheckpointError) as resumed:
        build_trainer(load(project, "trainer.max_steps=6"))
    with pytest.raises(CheckpointError) as loaded:
        load_checkpoint(project / "runs/adapted")
    assert all(str(project / "base") in str(caught.value) for caught in (resumed, loaded))


def test_a_moved_base_with_the_same_values_is_accepted(project):
    trainer = train(project)
    (project / "base").rename(project / "elsewhere")
    config = project / "runs/adapted/config.yaml"
    config.write_text(config.read_text().replace("pretrained: base", "pretrained: elsewhere"))
    assert are_equal(weights(load_checkpoint(project / "runs/adapted")), weights(trainer.model))


def test_frozen_layers_are_stored_by_reference_and_trained_ones_are_not(project):
    trainer = train(project, FROZEN)
    stored, hashes = saved(trainer, 4)
    assert hashes.keys() == {name for name, each in trainer.model.named_parameters() if not each.requires_grad}
    assert not hashes.keys() & stored.keys()
    assert are_equal(weights(load_checkpoint(project / "runs/adapted")), weights(trainer.model))


def test_random_frozen_weights_are_stored_in_full(project):
    sizes = ", ".join(f"{name}: {value}" for name, value in SIZES.items())
    trainer = train(project, f"model={{type: llama, {sizes}, freeze: [model.layers.0.*]}}")
    stored, hashes = saved(trainer, 4)
    assert WEIGHT in stored
    assert not hashes
    adapters = 'model={type: llama, pretrained: base, lora: {match: "*.q_proj", rank: 2}, freeze: ["*.lora_a"]}'
    trainer = train(project, adapters, "name=half")
    assert any("lora_a" in name for name in saved(trainer, 4)[0])


class Changing(Hook):
    """Changes a frozen weight after step 2, through `.data`."""

    def after_step(self):
        if self.trainer.step > 2:
            dict(self.trainer.model.named_parameters())[WEIGHT].data[0, 0] += 1.0


class Unfreezing(Hook):
    """Trains a frozen weight after step 2, by hand."""

    def after_step(self):
        if self.trainer.step > 2:
            weight = dict(self.trainer.model.named_parameters())[WEIGHT].requires_grad_(True)
            with torch.no_grad():
                weight.mul_(30.0)


def with_hook(hook):
    class Given(LanguageModelTrainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), hook()]

    return Given


@pytest.mark.parametrize("hook", [Changing, Unfreezing])
def test_a_frozen_weight_that_changes_is_stored_in_full_from_then_on(project, hook):
    kind = with_hook(hook)
    trainer = train(project, FROZEN, trainer=kind)
    assert WEIGHT in saved(trainer, 2)[1]
    stored, hashes = saved(trainer, 4)
    assert WEIGHT in stored
    assert WEIGHT not in hashes
    assert hashes
    assert are_equal(weights(load_checkpoint(project / "runs/adapted")), weights(trainer.model))
    early = load_checkpoint(project / "runs/adapted", 2)
    assert torch.equal(early.state_dict()[WEIGHT], load_file(project / "base/model.safetensors")[WEIGHT])
    resumed = build_trainer(load(project, FROZEN, "trainer.max_steps=6"), kind)
    assert are_equal(weights(resumed.model), weights(trainer.model))


def test_the_test_set_uses_the_base_weights_of_the_best_checkpoint(project):
    test = "data.test={type: pack, length: 16, tokenizer: bytes, source: {type: text, path: text.txt}}"
    evaluated = []

    class Recording(with_hook(Unfreezing)):
        def eval_begin(self):
            if self.eval_name == "test":
                evaluated.append(weights(self.model))

    worst = "checkpoint.keep_best={metric: valid/loss, mode: max}"
    trainer = train(project, FROZEN, test, worst, trainer=Recording)
    assert trainer.best.step == 2
    assert are_equal(evaluated[0], weights(load_checkpoint(project / "runs/adapted", 2)))
    assert are_equal(weights(trainer.model), weights(load_checkpoint(project / "runs/adapted", 4)))


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        return self.inner(**batch)


def test_base_weights_under_other_names_are_found_by_their_content(project):
    class Wrapping(LanguageModelTrainer):
        @classmethod
        def build_model(cls, build):
            model = build.model().requires_grad_(False)
            model.model.layers[1].requires_grad_(True)
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
            return Wrapped(model)

    whole = "model={type: llama, pretrained: base}"
    trainer = train(project, whole, trainer=Wrapping)
    stored, hashes = saved(trainer, 4)
    assert f"inner.{WEIGHT}" in hashes
    assert "inner.model.layers.0.mlp.up_proj.weight" in stored
    resumed = build_trainer(load(project, whole, "trainer.max_steps=6"), Wrapping)
    assert are_equal(weights(resumed.model), weights(trainer.model))


def test_a_rollback_restores_frozen_weights(project):
    class Diverging(with_hook(Unfreezing)):
        def forward(self, **batch):
            result = super().forward(**batch)
            is_bad = self.model.training and self.train_data.order_position == 16
            loss = result["loss"]
            return {**result, "loss": Mean(loss.total * float("nan"), loss.count)} if is_bad else result

    rollback = "anomalies={non_finite: rollback, snapshot_every_steps: 2}"
    trainer = train(
        project, FROZEN, rollback, "evaluation={}", "data.eval={}", "checkpoint.keep_best=null", trainer=Diverging
    )
    assert trainer.step == 4
    assert are_equal(weights(load_checkpoint(project / "runs/adapted")), weights(trainer.model))


def test_sharded_runs_and_remote_stores_store_references(project):
    plain = train(project, output="plain")

    def act(folder):
        overrides = ["runtime.mesh={fsdp: 2}", f"checkpoint.folder={folder / 'away'}"]
        half = build_trainer(load(folder, *overrides, "trainer.max_steps=2"))
        half.train()
        half.ranks.part()

    launch_well(project, 2, act)
    store = CheckpointStore(project / "away" / "adapted")
    assert all("lora_" in name for name in store.read(2, "model"))
    resumed = train(project, f"checkpoint.folder={project / 'away'}")
    torch.testing.assert_close(weights(resumed.model), weights(plain.model), rtol=1e-4, atol=1e-6)
    remote = train(project, "checkpoint.folder=memory://bucket/runs", "name=remote")
    assert are_equal(weights(load_checkpoint(project / "runs/remote")), weights(remote.model))
    assert all("lora_" in name for name in remote.context.store.read(4, "model"))


def test_checksums_notice_every_change_of_bits():
    tensors = [
        torch.randn(5, 3),
        torch.randn(7).bfloat16(),
        torch.arange(4),
        torch.tensor([True, False]),
        torch.empty(0),
    ]
    before = bit_checksums(tensors)
    assert bit_checksums([each.clone() for each in tensors]) == before
    for number, tensor in enumerate(tensors[:3]):
        changed = [each.clone() for each in tensors]
        changed[number] = tensor.flip(0)
        assert bit_checksums(changed) != before
    negative_zero = torch.tensor([-0.0, 1.0])
    assert bit_checksums([negative_zero]) != bit_checksums([negative_zero.abs()])
    assert hash_weights({"a": torch.zeros(2)}) != hash_weights({"a": torch.zeros(1, 2)})
