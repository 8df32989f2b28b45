"""`checkpoint.contents: weights`: small checkpoints that are evaluated, exported and loaded, but not resumed from."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.messages import raises

from trainwright import RunConfig, Trainer, build_trainer, load_checkpoint, run_experiment
from trainwright.errors import CheckpointError
from trainwright.export.huggingface import export_run

PROJECT = Path(__file__).parents[1] / "project"
WEIGHTS = "checkpoint.contents=weights"


def load(tmp_path, *overrides):
    settings = ["trainer.max_steps=6", "evaluation.every_steps=2", "hooks=[{type: ema, decay: 0.8}]"]
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", *settings, *overrides])


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def are_equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_weights_are_evaluated_exported_and_loaded(tmp_path):
    full = build_trainer(load(tmp_path / "full"))
    full.train()
    trainer = build_trainer(load(tmp_path, WEIGHTS))
    logs = trainer.train()
    assert are_equal(weights(trainer.model), weights(full.model))
    folder = tmp_path / "small"
    assert not list(folder.glob("checkpoints/step-*/optimizers*"))
    assert sorted(trainer.context.store.parts(6)) == ["model", "training"]
    for choice in ("ema", "raw"):
        ours, theirs = (load_checkpoint(each, weights=choice) for each in (folder, tmp_path / "full/small"))
        assert are_equal(weights(ours), weights(theirs))
    assert run_experiment(load(tmp_path, WEIGHTS), mode="eval")[1] == logs
    exported = export_run(folder, tmp_path / "out", file_format="safetensors")
    assert are_equal(load_file(exported / "model.safetensors"), weights(load_checkpoint(folder)))


def test_resuming_from_weights_is_rejected_with_the_reason(tmp_path):
    build_trainer(load(tmp_path, WEIGHTS)).train()
    with raises(CheckpointError, "step-00000006") as caught:
        build_trainer(load(tmp_path, WEIGHTS, "trainer.max_steps=8"))
    assert "checkpoint.contents" in str(caught.value)
    with raises(CheckpointError, "step-00000006"):
        build_trainer(load(tmp_path, "trainer.max_steps=8"))
    assert build_trainer(load(tmp_path, WEIGHTS), fresh=True).step == 0


def test_a_finished_run_with_weights_stays_finished(tmp_path):
    logs = build_trainer(load(tmp_path, WEIGHTS)).train()
    again = build_trainer(load(tmp_path, WEIGHTS))
    assert again.is_finished
    assert again.train() == logs
    test = "data.test={type: parts.py:Points, size: 20, seed: 5}"
    _, tested = run_experiment(load(tmp_path, WEIGHTS, test))
    assert tested["test/loss"] == run_experiment(load(tmp_path, WEIGHTS, test), mode="eval")[1]["test/loss"]


@pytest.mark.parametrize("contents", ["full", "weights"])
def test_a_rollback_does_not_need_full_checkpoints(tmp_path, contents):
    class Diverging(Trainer):
        def forward(self, **batch):
            result = super().forward(**batch)
            is_bad = self.model.training and self.train_data.order_position == 24
            return {**result, "loss": result["loss"] * float("nan")} if is_bad else result

    rollback = ("anomalies={non_finite: rollback, snapshot_every_steps: 4}", "checkpoint.every_steps=2")
    trainer = build_trainer(load(tmp_path, *rollback, f"checkpoint.contents={contents}"), Diverging)
    trainer.train()
    assert trainer.step == 6
