"""Running the same command again: what may change, what is rejected, where it goes on."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from tests.messages import mentions, raises

from trainwright import Every, RunConfig, Trainer, build_trainer, run_experiment
from trainwright.checkpoint.resume import changed_settings, pick_step
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config import KeepBest
from trainwright.errors import CheckpointError

PROJECT = Path(__file__).parents[1] / "project"
TIMES = {"seconds_per_step", "samples_per_second"}


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", *overrides])


def lines_of(tmp_path, name="small"):
    lines = [json.loads(line) for line in (tmp_path / name / "metrics.json").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def all_files(folder):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of 12 steps without a break: (its folder's parent, its weights)."""
    tmp_path = tmp_path_factory.mktemp("undisturbed")
    trainer = build_trainer(load(tmp_path))
    trainer.train()
    return tmp_path, weights(trainer)


def test_a_larger_max_steps_continues_a_finished_run(tmp_path, undisturbed):
    constant = ["trainer.schedule={type: constant}"]
    build_trainer(load(tmp_path, "trainer.max_steps=6", *constant)).train()
    trainer = build_trainer(load(tmp_path, *constant))
    assert trainer.step == 6
    trainer.train()
    whole = build_trainer(load(tmp_path, *constant, "name=whole"))
    whole.train()
    assert same(weights(trainer), weights(whole))
    losses = {line["step"]: line["loss"] for line in lines_of(tmp_path, "whole") if "loss" in line}
    assert {line["step"]: line["loss"] for line in lines_of(tmp_path) if "loss" in line} == losses


def test_the_log_says_how_a_larger_max_steps_changes_the_rate(tmp_path, caplog):
    build_trainer(load(tmp_path, "trainer.max_steps=6")).train()
    with caplog.at_level(logging.INFO, logger="trainwright"):
        build_trainer(load(tmp_path, "trainer.max_steps=12"))
    assert "max_steps 6 → 12" in caplog.text


def test_a_finished_run_changes_nothing(tmp_path):
    config = load(tmp_path)
    run_experiment(config)
    before = all_files(tmp_path)
    assert before
    model, _ = run_experiment(load(tmp_path))
    assert all_files(tmp_path) == before
    assert same(dict(model.state_dict()), CheckpointStore(tmp_path / "small" / "checkpoints").read(12, "model"))


def test_a_run_that_stopped_early_stays_stopped_and_changes_nothing(tmp_path):
    overrides = (
        "hooks=[{type: early_stopping, metric: valid/loss, patience: 1, min_delta: 10}]",
        "evaluation.every_steps=2",
    )
    run_experiment(load(tmp_path, *overrides))
    before = all_files(tmp_path)
    assert lines_of(tmp_path)[-1]["step"] == 4
    run_experiment(load(tmp_path, *overrides))
    assert all_files(tmp_path) == before


class TwoBatchesAStep(Trainer):
    def next_train_inputs(self, iterator):
        next(iterator)
        return next(iterator)


def test_a_run_whose_data_ran_out_is_finished(tmp_path):
    settings = ("trainer.max_epochs=1", "trainer.max_steps=null", "checkpoint.every_steps=null")
    for _ in range(2):
        trainer = build_trainer(load(tmp_path, *settings), TwoBatchesAStep)
        trainer.train()
    # 50 samples are 7 batches of 8, of which three steps take two each.
    assert trainer.step == 3
    # The final evaluation has a line of its own, for that of step 3 was written before anybody knew it was the last.
    assert [(line["step"], "loss" in line, "valid/loss" in line) for line in lines_of(tmp_path)] == [
        (3, True, False),
        (3, False, True),
    ]


def test_a_folder_without_a_checkpoint_starts_at_0(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "metrics.json").write_text('{"step": 3, "loss": 99.0}\n')
    load(tmp_path, "seed=1").save(folder / "config.yaml")
    trainer = build_trainer(load(tmp_path))
    assert trainer.step == 0
    trainer.train()
    assert [line["step"] for line in lines_of(tmp_path)] == [3, 5, 6, 9, 10, 12]
    assert lines_of(tmp_path)[0]["loss"] != 99.0


def test_a_damaged_newest_checkpoint_falls_back(tmp_path, undisturbed, caplog):
    build_trainer(load(tmp_path)).train()
    newest = tmp_path / "small" / "checkpoints" / "step-00000012"
    damaged = newest / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0" if damaged.read_bytes()[-1:] != b"\0" else b"short")
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer = build_trainer(load(tmp_path))
    assert trainer.step == 8
    assert "Using step-00000008 instead" in caplog.text
    assert lines_of(tmp_path)[-1]["step"] == 6
    trainer.train()
    assert lines_of(tmp_path) == lines_of(undisturbed[0])
    assert same(weights(trainer), undisturbed[1])


def test_a_half_written_line_is_dropped(tmp_path, undisturbed):
    build_trainer(load(tmp_path)).train()
    path = tmp_path / "small" / "metrics.json"
    CheckpointStore(tmp_path / "small" / "checkpoints").delete(12)
    path.write_text(path.read_text() + '{"step": 13, "lo')
    build_trainer(load(tmp_path)).train()
    assert lines_of(tmp_path) == lines_of(undisturbed[0])


class SavesInTheMidst(Trainer):
    """Saves after update 3, before that step is written, and dies in the next one."""

    @classmethod
    def build_hooks(cls, build):
        return [*build.hooks(), Every(3)(lambda trainer: trainer.save())]

    def train_step(self, batch):
        if self.step == 3:
            raise RuntimeError("killed")
        return super().train_step(batch)


def test_a_step_that_was_saved_before_it_was_written_is_written_once(tmp_path, undisturbed):
    with pytest.raises(RuntimeError, match="killed"):
        build_trainer(load(tmp_path), SavesInTheMidst).train()
    assert [line["step"] for line in lines_of(tmp_path)] == [3]
    build_trainer(load(tmp_path)).train()
    assert lines_of(tmp_path) == lines_of(undisturbed[0])


FREE = [
    "trainer.max_steps=20",
    "trainer.micro_batch_size=2",
    "data.num_workers=1",
    "data.eval={}",
    "data.test={type: parts.py:Points, size: 5}",
    "evaluation.every_steps=1",
    "checkpoint={every_steps: 1, keep_last: 9}",
    "hooks=[{type: time_steps}]",
    "writers=[]",
    "log.every_steps=1",
    "runtime.device=cpu",
    "runtime.mesh={replicate: 1}",
    "imports=[json]",
]


def test_settings_that_leave_the_mathematics_alone_may_change(tmp_path):
    assert changed_settings(load(tmp_path), load(tmp_path, *FREE)) == {}


def test_how_many_processes_call_the_function_of_the_data_may_change(tmp_path):
    one, two = (load(tmp_path, f"data.process={{type: a.b, num_workers: {number}}}") for number in (1, 2))
    assert changed_settings(one, two) == {}
    three = load(tmp_path, "data.process={type: a.b, num_workers: 1, version: 3}")
    assert changed_settings(one, three) == {"data.process.version": (None, 3)}


def test_writing_a_default_of_the_order_is_not_a_change(tmp_path):
    plain = load(tmp_path)
    assert changed_settings(plain, load(tmp_path, "data.shuffle=true", "data.last_batch=straddle")) == {}
    assert changed_settings(plain, load(tmp_path, "data.last_batch=short")) == {
        "data.last_batch": ("straddle", "short")
    }
    sampler = "data.sampler={type: weighted, weights: w.json}"
    assert changed_settings(load(tmp_path, sampler), load(tmp_path, sampler, "data.shuffle=false")) == {}


def test_nan_is_not_a_change_of_nan(tmp_path):
    override = "data.train={type: parts.py:Points, noise: .nan, seed: [.nan, 1]}"
    assert changed_settings(load(tmp_path, override), load(tmp_path, override)) == {}
    assert "data.train.noise" in changed_settings(load(tmp_path, override), load(tmp_path))


@pytest.mark.parametrize(
    ("override", "name", "then", "now"),
    [
        ("seed=8", "seed", 7, 8),
        ("model.width=16", "model.width", 8, 16),
        ("data.train.noise=0.2", "data.train.noise", 0.1, 0.2),
        ("data.shuffle=false", "data.shuffle", True, False),
        ("data.split=[9, 1]", "data.split", None, [9, 1]),
        ("trainer.type=classification", "trainer.type", "trainer", "classification"),
        ("trainer.global_batch_size=16", "trainer.global_batch_size", 8, 16),
        ("trainer.max_grad_norm=null", "trainer.max_grad_norm", 1.0, None),
        ("trainer.optimizer.lr=1.0", "trainer.optimizer.lr", 0.01, 1.0),
        ("trainer.optimizer.betas=[0.8, 0.9]", "trainer.optimizer.betas", None, [0.8, 0.9]),
        ("trainer.schedule.warmup_steps=1", "trainer.schedule.warmup_steps", 3, 1),
        ("runtime.precision=bf16", "runtime.precision", "auto", "bf16"),
    ],
)
def test_settings_of_the_mathematics_are_named_with_then_and_now(tmp_path, override, name, then, now):
    assert changed_settings(load(tmp_path), load(tmp_path, override)) == {name: (then, now)}


def changed_project(tmp_path, **replacements):
    text = (PROJECT / "run.yaml").read_text()
    for old, new in replacements.values():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "parts.py").write_text((PROJECT / "parts.py").read_text())
    return tmp_path / "run.yaml"


def test_a_rejected_change_says_where_it_is_written_and_what_to_do(tmp_path):
    build_trainer(load(tmp_path, "trainer.max_steps=2")).train()
    path = changed_project(tmp_path, width=("width: 8", "width: 16"), clip=("  max_grad_norm: 1.0\n", ""))
    before = all_files(tmp_path / "small")
    with pytest.raises(CheckpointError) as caught:
        build_trainer(RunConfig.load(path, [f"output_dir={tmp_path}", "seed=8"]))
    message = str(caught.value)
    lines = [line.split(":")[0] for line in path.read_text().splitlines()]
    assert f"/run.yaml:{lines.index('model') + 1}: model.width: 8 → 16" in message
    assert f"/run.yaml:{lines.index('trainer') + 1}: trainer.max_grad_norm: 1.0 → None" in message
    assert "override seed=8: seed: 7 → 8" in message
    for advice in ("--accept-changes", "--fresh", "another name"):
        assert advice in message
    assert all_files(tmp_path / "small") == before


def test_a_change_made_in_python_is_rejected_without_a_location(tmp_path):
    build_trainer(load(tmp_path, "trainer.max_steps=2")).train()
    settings = {**load(tmp_path).to_dict(), "seed": 8}
    with raises(CheckpointError, "7"):
        build_trainer(RunConfig.from_dict(settings, project_dir=PROJECT))


def test_accepted_changes_resume_from_the_checkpoint(tmp_path):
    build_trainer(load(tmp_path, "trainer.max_steps=4")).train()
    changed = load(tmp_path, "trainer.optimizer={type: adamw, lr: 0.5, weight_decay: 0.25}", "seed=8")
    trainer = build_trainer(changed, accept_changes=True)
    assert trainer.step == 4
    assert trainer.optimizers["main"].param_groups[0]["weight_decay"] == 0.25
    trainer.train()
    assert trainer.step == 12
    assert RunConfig.load(tmp_path / "small" / "config.yaml") == changed.derive({"runtime.precision": "fp32"})
    # The changes are the run's settings now.
    assert build_trainer(changed).step == 12


def test_fresh_sets_the_earlier_run_aside(tmp_path):
    run_experiment(load(tmp_path, "trainer.max_steps=4"))
    before = {path.relative_to(tmp_path / "small"): content for path, content in all_files(tmp_path / "small").items()}
    trainer = build_trainer(load(tmp_path, "trainer.max_steps=4", "seed=8"), fresh=True)
    assert trainer.step == 0
    aside = tmp_path / "small.old"
    assert {path.relative_to(aside): content for path, content in all_files(aside).items()} == before
    trainer.train()
    assert [line["step"] for line in lines_of(tmp_path)] == [3, 4]


def test_a_rejected_config_sets_nothing_aside(tmp_path):
    build_trainer(load(tmp_path, "trainer.max_steps=2")).train()
    before = all_files(tmp_path)
    with pytest.raises(Exception, match="no optimizer"):
        build_trainer(load(tmp_path, "trainer.optimizer={type: adamv}"), fresh=True)
    assert all_files(tmp_path) == before


def test_a_rejected_config_leaves_no_folder(tmp_path):
    with pytest.raises(Exception, match="no optimizer"):
        build_trainer(load(tmp_path, "trainer.optimizer={type: adamv}"))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_code_changed_is_rejected_with_both_shapes(tmp_path):
    build_trainer(load(tmp_path, "trainer.max_steps=2")).train()
    build_trainer(load(tmp_path, "trainer.max_steps=3"))  # unchanged: it goes on

    class Other(Trainer):
        @classmethod
        def build_model(cls, build):
            model = build.model()
            model.layers[0] = torch.nn.Linear(4, 9)
            return model

    with raises(CheckpointError, "layers.0.weight", "8", "4", "9"):
        build_trainer(load(tmp_path, "trainer.max_steps=3"), Other)


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    for step, loss in ((10, 2.0), (20, 1.0), (30, float("nan"))):
        store.write(step, {"model": {"w": torch.zeros(1)}}, metrics={"valid/loss": loss})
    return store


def test_a_checkpoint_is_picked_by_name_or_number(store):
    best = KeepBest(metric="valid/loss")
    assert pick_step(store, "latest", best=None) == 30
    assert pick_step(store, "best", best=best) == 20
    assert pick_step(store, 10, best=None) == 10
    assert pick_step(store, "10", best=None) == 10


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (15, ("15", "10", "20", "30")),
        ("best", ("checkpoint.keep_best", "10", "20", "30")),
        ("newest", ("newest",)),
        (-1, ()),
    ],
)
def test_a_checkpoint_that_is_not_there_is_a_clear_error(store, step, problem):
    with raises(CheckpointError, *problem):
        pick_step(store, step, best=None)


def test_a_damaged_checkpoint_that_was_asked_for_is_rejected(store):
    (store.path(10) / "model.safetensors").write_bytes(b"x")
    with raises(CheckpointError, "model.safetensors", "1"):
        pick_step(store, 10, best=None)


def test_a_run_without_checkpoints_is_a_clear_error(tmp_path):
    with raises(CheckpointError):
        pick_step(CheckpointStore(tmp_path / "none"), "latest", best=None)


def test_another_optimizer_starts_without_state_where_the_change_is_accepted(tmp_path, caplog):
    build_trainer(load(tmp_path, "trainer.max_steps=4")).train()
    changed = load(tmp_path, "trainer.optimizer={type: sgd, lr: 0.1}")
    with caplog.at_level(logging.INFO, logger="trainwright"):
        trainer = build_trainer(changed, accept_changes=True)
    assert mentions(caplog.text, "adamw", "sgd", "4", "trainer.optimizer.type")
    assert "it starts without state" in caplog.text
    trainer.train()
    assert trainer.step == 12


def test_a_damaged_older_manifest_does_not_prevent_saving(tmp_path):
    keep = ("checkpoint={every_steps: 4, keep_best: {metric: valid/loss}, keep_last: null}", "evaluation.every_steps=4")
    build_trainer(load(tmp_path, *keep)).train()
    (tmp_path / "small" / "checkpoints" / "step-00000004" / "MANIFEST.json").write_text("{")
    assert build_trainer(load(tmp_path, *keep, "trainer.max_steps=16")).step == 12
    store = CheckpointStore(tmp_path / "small" / "checkpoints")
    assert pick_step(store, "best", best=load(tmp_path, *keep).checkpoint.keep_best) in (8, 12)


def test_a_reader_sets_nothing_aside(tmp_path):
    build_trainer(load(tmp_path)).train()
    newest = tmp_path / "small" / "checkpoints" / "step-00000012"
    (newest / "model.safetensors").write_bytes(b"short")
    assert pick_step(CheckpointStore(newest.parent), "latest", best=None) == 8
    assert newest.exists()


def test_a_run_that_has_ended_keeps_its_config_when_its_limit_is_lowered(tmp_path):
    run_experiment(load(tmp_path))
    before = (tmp_path / "small" / "config.yaml").read_text()
    run_experiment(load(tmp_path, "trainer.max_steps=5"))
    assert (tmp_path / "small" / "config.yaml").read_text() == before
