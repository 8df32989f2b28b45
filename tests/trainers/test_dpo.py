"""Preference losses: equal to TRL's, exact for any micro-batches, with a reference that does not move."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.forked_program import run_command
from tests.messages import raises
from tests.references import preference_cases as cases
from tests.trainers import preference_runs as runs

from trainwright import Mean, Task, build_trainer
from trainwright.build.components import Build
from trainwright.build.parallelize import reject_own_steps
from trainwright.errors import CheckpointError, ConfigError, DataError, TrainwrightError
from trainwright.parallel.mesh import AXES, Mesh
from trainwright.trainers.dpo import DPOTrainer, sequence_log_probs
from trainwright.trainers.reference_table import TABLE_FILE

TRL = json.loads((Path(__file__).parents[1] / "references" / "preferences_trl.json").read_text())
PAIRED = [name for name in cases.LOSSES if name != "kto"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    runs.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def singles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("singles")
    runs.prepare(folder, paired=False)
    return folder


def train(folder, tmp_path, *overrides, **settings):
    content = runs.settings(folder, **settings)
    content["output_dir"] = str(tmp_path / "runs")
    trainer = build_trainer(runs.load(folder, content, *overrides))
    trainer.train()
    return trainer, runs.lines_of(tmp_path)


@pytest.mark.parametrize("model", ["transformers:LlamaForCausalLM", "llama"])
@pytest.mark.parametrize("loss_type", cases.LOSSES)
def test_losses_and_metrics_are_those_of_trl(pairs, singles, tmp_path, loss_type, model):
    folder = singles if loss_type == "kto" else pairs
    _, lines = train(folder, tmp_path, loss_type=loss_type, model=model, **cases.LOSSES[loss_type])
    assert len(lines) == len(TRL[loss_type]) == cases.STEPS
    for line, expected in zip(lines, TRL[loss_type], strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        # Rewards are differences of numbers near 50, whose last bit in fp32 is 4e-6.
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("loss_type", cases.LOSSES)
def test_accumulation_changes_nothing(pairs, singles, tmp_path, loss_type, micro_batch_size):
    folder = singles if loss_type == "kto" else pairs
    options = {"loss_type": loss_type, **cases.LOSSES[loss_type]}
    _, whole = train(folder, tmp_path / "whole", **options)
    _, split = train(folder, tmp_path / "split", f"trainer.micro_batch_size={micro_batch_size}", **options)
    for line, expected in zip(split, whole, strict=True):
        untimed = {name: value for name, value in expected.items() if not name.endswith(runs.TIMED)}
        assert {name: line[name] for name in untimed} == pytest.approx(untimed, rel=2e-5, abs=2e-5)


def with_adapters(folder, tmp_path, **adapters):
    content = runs.settings(folder, loss_type="sigmoid", steps=2)
    content["output_dir"] = str(tmp_path / "runs")
    content["model"] |= adapters
    return build_trainer(runs.load(folder, content))


ADAPTERS = {
    "lora": {"lora": {"match": "*_proj", "rank": 4, "dropout": 0.5}},
    "peft": {"peft": {"type": "lora", "r": 4, "target_modules": "all-linear", "lora_dropout": 0.5}},
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_reference_of_adapters_is_their_base(pairs, tmp_path, kind):
    trainer = with_adapters(pairs, tmp_path, **ADAPTERS[kind])
    assert not trainer.context.frozen_models
    batch = next(iter(trainer.train_data.batches(trainer.batches_to_device)))
    trainer.train()
    found = trainer.reference_log_probs(batch)
    base = build_trainer(runs.load(pairs, runs.settings(pairs), f"output_dir={tmp_path}/base"))
    torch.testing.assert_close(found, base.reference_log_probs(batch), rtol=0, atol=0)
    assert all(module.training for module in trainer.model.modules())
    trained = {name for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    with torch.no_grad():  # the adapters have an effect outside of the reference
        policy = sequence_log_probs(trainer._logits_of(trainer.model.eval(), batch), batch["labels"])
    assert not torch.allclose(policy, found)


@pytest.mark.parametrize(
    "adapters",
    [
        {"lora": {"match": "*_proj", "rank": 4, "train": "lm_head*"}},
        {"peft": {"type": "lora", "r": 4, "target_modules": "all-linear", "init_lora_weights": False}},
    ],
    ids=["trained-head", "random-adapters"],
)
def test_a_model_that_differs_from_its_base_has_a_frozen_copy(pairs, tmp_path, adapters):
    trainer = with_adapters(pairs, tmp_path, **adapters)
    reference = trainer.context.frozen_models["reference"]
    batch = next(iter(trainer.train_data.batches(trainer.batches_to_device)))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name))
    before = trainer.reference_log_probs(batch)
    trainer.train()
    torch.testing.assert_close(trainer.reference_log_probs(batch), before, rtol=0, atol=0)


def test_the_frozen_copy_is_in_no_optimizer_and_no_checkpoint(pairs, tmp_path):
    trainer, _ = train(pairs, tmp_path)
    reference = trainer.context.frozen_models["reference"]
    owned = {id(each) for group in trainer.optimizers["main"].param_groups for each in group["params"]}
    assert not any(id(each) in owned or each.requires_grad for each in reference.parameters())
    saved = sum(file.stat().st_size for file in (tmp_path / "runs/run/checkpoints").rglob("*.safetensors"))
    assert saved < 1.5 * sum(each.nbytes for each in trainer.model.parameters())
    first = transformers.AutoModelForCausalLM.from_pretrained(pairs / "base").state_dict()
    for name, value in reference.state_dict().items():
        assert torch.equal(value, first[name])
        assert name.endswith("norm.weight") or not torch.equal(value, trainer.model.state_dict()[name])


@pytest.mark.parametrize("loss_type", ["sigmoid", "kto"])
def test_a_resumed_run_repeats_every_bit_with_the_first_reference(pairs, singles, tmp_path, loss_type):
    folder = singles if loss_type == "kto" else pairs
    options = {"loss_type": loss_type, "optimizer": {"type": "adamw", "lr": 0.01}}
    whole, lines = train(folder, tmp_path / "whole", steps=5, **options)
    train(folder, tmp_path / "parts", steps=2, **options)
    resumed, resumed_lines = train(folder, tmp_path / "parts", steps=5, **options)
    for line, expected in zip(resumed_lines, lines, strict=True):
        untimed = {name: value for name, value in expected.items() if not name.endswith(runs.TIMED)}
        assert {name: line[name] for name in untimed} == untimed
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)


def test_a_resumed_run_rejects_another_base(tmp_path):
    runs.prepare(tmp_path)
    train(tmp_path, tmp_path, steps=1)
    weights = tmp_path / "base" / "model.safetensors"
    save_file({name: value + 0.01 for name, value in load_file(weights).items()}, weights, metadata={"format": "pt"})
    with raises(CheckpointError, "reference", "--fresh", at="frozen_models.json"):
        train(tmp_path, tmp_path, steps=2)


def test_a_random_model_has_itself_as_the_reference(pairs, tmp_path):
    content = runs.settings(pairs, steps=2)
    content["output_dir"] = str(tmp_path / "runs")
    content["model"] = {"type": "llama", "vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    trainer = build_trainer(runs.load(pairs, content))
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, trainer.context.frozen_models["reference"].get_parameter(name))
    trainer.train()
    assert runs.lines_of(tmp_path)[0]["loss"] == pytest.approx(0.6931472)


def test_evaluation_gives_the_values_of_the_whole_set(pairs, tmp_path):
    for loss_type in PAIRED:
        content = runs.settings(pairs, loss_type=loss_type, steps=1, **cases.LOSSES[loss_type])
        content["data"]["eval"] = {"valid": dict(content["data"]["train"])}
        logs = []
        for size in (12, 5):
            content["output_dir"] = str(tmp_path / f"{loss_type}-{size}")
            content["evaluation"] = {"batch_size": size}
            trainer = build_trainer(runs.load(pairs, content))
            logs.append(trainer.evaluate())
        assert logs[0] == pytest.approx(logs[1], rel=2e-5, abs=2e-5)
        assert trainer.train()["valid/loss"] < logs[0]["valid/loss"]


@pytest.mark.parametrize("adapters", [{}, ADAPTERS["lora"]], ids=["full", "lora"])
def test_a_precomputed_reference_gives_the_same_run_without_a_second_model(pairs, tmp_path, adapters):
    content = runs.settings(pairs, steps=4, micro_batch_size=2)
    content["data"] |= {"shuffle": True, "split": {"valid": 3}}
    content["model"] |= adapters
    logs = []
    for name in ("false", "true"):
        overrides = [f"trainer.precompute_reference={name}", f"output_dir={tmp_path}/{name}/runs"]
        trainer = build_trainer(runs.load(pairs, content, *overrides))
        trainer.train()
        logs.append(runs.lines_of(tmp_path / name))
    assert not trainer.context.frozen_models
    for line, expected in zip(*reversed(logs), strict=True):
        untimed = {name: value for name, value in expected.items() if not name.endswith(runs.TIMED)}
        if expected["step"] == 1:
            del untimed["rewards/accuracies"]  # the model is the reference: the signs of the rewards are rounding
        assert {name: line[name] for name in untimed} == pytest.approx(untimed, rel=1e-5, abs=1e-5)


def test_a_resumed_run_reads_the_precomputed_reference(pairs, tmp_path):
    options = {"precompute_reference": True}
    _, lines = train(pairs, tmp_path / "whole", steps=5, **options)
    train(pairs, tmp_path / "parts", steps=2, **options)
    table = tmp_path / "parts" / "runs" / "run" / TABLE_FILE
    before = table.read_bytes()
    _, resumed_lines = train(pairs, tmp_path / "parts", steps=5, **options)
    assert table.read_bytes() == before
    assert [line["loss"] for line in resumed_lines] == [line["loss"] for line in lines]
    table.unlink()
    with raises(CheckpointError, TABLE_FILE, "--fresh"):
        train(pairs, tmp_path / "parts", steps=6, **options)


def test_changed_data_has_no_precomputed_reference(tmp_path):
    runs.prepare(tmp_path)
    train(tmp_path, tmp_path, steps=1, precompute_reference=True)
    rows = cases.make_rows()
    rows[5]["chosen"] = "changed"
    cases.write_rows(tmp_path / "rows.jsonl", rows)
    content = runs.settings(tmp_path, steps=3, precompute_reference=True)
    with raises(DataError, "precompute_reference", 1):
        build_trainer(runs.load(tmp_path, content), accept_changes=True).train()


def test_a_stream_cannot_be_precomputed(pairs, tmp_path):
    content = runs.settings(pairs, precompute_reference=True)
    content["data"]["train"]["streaming"] = True
    with raises(ConfigError, "precompute_reference", "streaming"):
        build_trainer(runs.load(pairs, content, f"output_dir={tmp_path}")).train()


def test_a_precomputed_reference_serves_checks_and_evaluations_of_a_checkpoint(pairs, tmp_path, monkeypatch):
    content = runs.settings(pairs, steps=2, precompute_reference=True)
    content["data"]["eval"] = {"valid": dict(content["data"]["train"])}
    content["output_dir"] = str(tmp_path / "runs")
    trainer = build_trainer(runs.load(pairs, content))
    expected = trainer.train()
    shown = run_command("evaluate", str(tmp_path / "runs" / "run")).stdout
    assert json.loads(shown[shown.index("{") :]) == pytest.approx(expected)
    batch = next(iter(trainer.train_data.batches(lambda batches: batches)))
    with raises(TrainwrightError, "precompute_reference"):
        trainer.run_forward(batch)
    monkeypatch.chdir(tmp_path)
    assert run_command("check", str(pairs / "run.yaml")).returncode == 0


def test_a_user_s_subclass_has_the_options_and_its_own(pairs, tmp_path):
    content = runs.settings(pairs, steps=1)
    content["trainer"] |= {"type": "tests.trainers.test_dpo:Scaled", "scale": 3.0}
    content["output_dir"] = str(tmp_path / "runs")
    trainer = build_trainer(runs.load(pairs, content))
    trainer.train()
    assert runs.lines_of(tmp_path)[0]["loss"] == pytest.approx(3 * 0.6931472)
    with raises(ConfigError, "trainer.beta", at="run.yaml:20"):
        build_trainer(runs.load(pairs, content | {"trainer": {"beta": "x", **content["trainer"]}}))


class Scaled(DPOTrainer):
    """Multiplies the loss by an option of its own."""

    def post_init(self):
        self.scale = self.config.trainer.scale

    def forward(self, **batch):
        loss, metrics = super().forward(**batch)
        return Mean(loss.total * self.scale, loss.count), metrics


def test_kto_needs_two_samples_per_rank(singles, tmp_path):
    with raises(ConfigError, "kto", "global_batch_size 1", at="run.yaml:21"):
        train(singles, tmp_path, "trainer.global_batch_size=1", loss_type="kto")


def test_another_collator_or_the_other_rows_are_rejected(pairs, singles, tmp_path):
    with raises(DataError, "input_ids [4, 2, 24]", "label", "kto"):
        train(pairs, tmp_path, loss_type="kto")
    with raises(DataError, "[samples, 2, width]", "preferences", "kto"):
        train(singles, tmp_path / "singles")


def test_a_pipeline_is_rejected_because_the_loss_is_computed_in_forward(pairs):
    config = runs.load(pairs, runs.settings(pairs, model="llama"))
    model = Build(config).model()
    with raises(ConfigError, "DPOTrainer.forward", "pipeline"):
        reject_own_steps(DPOTrainer, Task(), model, config, Mesh({**dict.fromkeys(AXES, 1), "pipeline": 2}))
