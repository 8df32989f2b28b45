"""`trainer.optimizer_in_backward`: the same updates as after the backward, without all gradients at once."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from tests.messages import raises

from trainwright import Hook, RunConfig, Trainer, build_trainer
from trainwright.analysis.estimate import GRADIENTS, estimate
from trainwright.build.run import reject_steps_in_backward
from trainwright.config import BatchPlan
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.loop import backward_steps
from trainwright.parallel.collectives import Ranks

FILE = """
import torch


class Text(torch.utils.data.Dataset):
    def __init__(self, ignored=()):
        self.ignored = ignored

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(12) * (index + 1) + index) % 64
        labels = torch.where(torch.arange(12) < index % 5, -100, ids)  # rows count different numbers of labels
        return {"input_ids": ids, "labels": torch.full_like(ids, -100) if index in self.ignored else labels}


class Sgd(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


class OwnParts(Sgd):
    steps_in_parts = True
"""
OPTIMIZERS = {
    "adamw": {"type": "adamw", "lr": 0.01},
    "8bit": {"type": "adamw", "lr": 0.01, "state": "8bit"},
    "lion": {"type": "lion", "lr": 0.001},
    "sgd": {"type": "torch.optim:SGD", "lr": 0.1, "momentum": 0.9},
    "own": {"type": "parts.py:OwnParts", "lr": 0.1},
}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(backward_steps, "PENDING_BYTES", 20_000)


def config_of(folder, *overrides, optimizer=None):
    (folder / "parts.py").write_text(FILE)
    settings = {
        "name": "run",
        "output_dir": str(folder),
        "model": {"type": "llama", "preset": "tiny", "num_layers": 3},
        "data": {"train": {"type": "parts.py:Text"}},
        "trainer": {"max_steps": 4, "global_batch_size": 8, "optimizer": optimizer or OPTIMIZERS["adamw"]},
        "log": {"every_steps": 1},
        "writers": ["json"],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return RunConfig.load(folder / "run.yaml", overrides)


class Watch(Hook):
    def __init__(self):
        self.results, self.gradients = [], []

    def after_step(self):
        self.gradients.append(sum(each.grad is not None for each in self.trainer.model.parameters()))


def run(folder, *overrides, trainer=Trainer, **parts):
    folder.mkdir(exist_ok=True)
    watch = Watch()

    class Watched(trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), watch]

    trained = build_trainer(config_of(folder, *overrides, **parts), Watched)
    trained.train()
    watch.results = [json.loads(line) for line in (folder / "run" / "metrics.json").read_text().splitlines()]
    return {name: each.detach().clone() for name, each in trained.model.named_parameters()}, watch


def assert_same_runs(one, other, *, tolerance=0.0):
    for name, value in one[0].items():
        torch.testing.assert_close(other[0][name], value, rtol=tolerance, atol=tolerance, msg=name)
    for ours, theirs in zip(other[1].results, one[1].results, strict=True):
        for key in ("step", "loss", "grad_norm", "lr"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key


IN_BACKWARD = "trainer.optimizer_in_backward=true"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_losses_and_norms_are_those_of_steps_after_the_backward(tmp_path, name):
    plain = run(tmp_path / "plain", optimizer=OPTIMIZERS[name])
    early = run(tmp_path / "early", IN_BACKWARD, optimizer=OPTIMIZERS[name])
    assert_same_runs(plain, early)
    assert plain[1].gradients[0] > 0
    assert early[1].gradients == [0] * 4


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.compile_repeated_blocks=model.layers"],
        ["model.activation_checkpointing=[DecoderLayer]"],
        ["runtime.mode=compile", "runtime.compile_backend=aot_eager", "model.compile_repeated_blocks=model.layers"],
        ["runtime.mode=graph", "model.compile_repeated_blocks=model.layers"],
        ["model.dtype=bf16"],
        ["model.tie_embeddings=false"],
        ["data.last_batch=short", "trainer.max_steps=9", "trainer.global_batch_size=10"],
    ],
    ids=str,
)
def test_other_settings_work_with_it(tmp_path, overrides):
    optimizer = {"type": "adamw", "lr": 0.01, "state": "8bit"}
    plain = run(tmp_path / "plain", *overrides, optimizer=optimizer)
    assert_same_runs(plain, run(tmp_path / "early", IN_BACKWARD, *overrides, optimizer=optimizer))


class WithMeans(Trainer):
    def forward(self, **batch):
        from trainwright import Mean

        count = (batch["labels"][:, 1:] != -100).sum()
        return Mean(self.model(**batch)["loss"] * count, count)


class Plain(Trainer):
    def forward(self, **batch):
        return self.model(**batch)["loss"] * 1.0


@pytest.mark.parametrize("trainer", [WithMeans, Plain])
def test_means_and_plain_losses_propagate_their_mean(tmp_path, trainer):
    plain = run(tmp_path / "plain", trainer=trainer)
    early = run(tmp_path / "early", IN_BACKWARD, trainer=trainer)
    assert_same_runs(plain, early, tolerance=1e-4)


def test_an_update_without_a_label_that_counts_changes_nothing(tmp_path):
    empty = f"data.train={{type: 'parts.py:Text', ignored: {list(range(64))}}}"
    weights, _ = run(tmp_path / "early", IN_BACKWARD, empty, "trainer.max_steps=1")
    start = build_trainer(config_of(tmp_path / "early", IN_BACKWARD, empty, "name=other")).model
    assert all(torch.equal(weights[name], each) for name, each in start.named_parameters())


def test_a_resumed_run_has_the_same_bits_and_the_setting_may_change(tmp_path):
    whole, _ = run(tmp_path / "whole")
    run(tmp_path / "halves", IN_BACKWARD, "trainer.max_steps=2")
    halves, _ = run(tmp_path / "halves")
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_parameters_that_become_trainable_are_stepped_too(tmp_path):
    freeze = "model.freeze=[{match: '*embed*', until_step: 2}]"
    assert_same_runs(run(tmp_path / "plain", freeze), run(tmp_path / "early", IN_BACKWARD, freeze))


def test_several_optimizers_step_their_own_parameters(tmp_path):
    optimizers = (
        "trainer.optimizers={a: {optimizer: {type: adamw, lr: 0.01}, match: '*layers*'}, "
        "b: {optimizer: {type: lion, lr: 0.001}, match: ['*embed*', 'model.norm.weight']}}"
    )
    settings = (optimizers, "trainer.optimizer=null")
    plain, early = run(tmp_path / "plain", *settings), run(tmp_path / "early", IN_BACKWARD, *settings)
    assert_same_runs(plain, early)
    assert {"lr/a", "lr/b"} <= early[1].results[0].keys()


def test_not_all_gradients_are_in_memory_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(backward_steps, "PENDING_BYTES", 1)
    sizes = "model={type: llama, preset: tiny, num_layers: 12}"
    most = {
        early: estimate(config_of(tmp_path, sizes, f"trainer.optimizer_in_backward={early}"), world_size=1).most[
            GRADIENTS
        ]
        for early in ("false", "true")
    }
    assert most["true"] < 0.2 * most["false"]


class Twice(Trainer):
    def train_step(self, batch):
        update = self.begin_update()
        for _ in range(2):
            update.backward(self.run_forward(batch))
        return update.apply()


def test_a_second_backward_in_an_update_is_rejected(tmp_path):
    with raises(TrainwrightError, "optimizer_in_backward", "backward"):
        run(tmp_path, IN_BACKWARD, trainer=Twice)


def test_a_model_without_a_gradient_is_rejected(tmp_path):
    class Other(Trainer):
        def forward(self, **batch):
            return torch.zeros((), requires_grad=True) * 2.0

    with raises(TrainwrightError, "gradient"):
        run(tmp_path, IN_BACKWARD, trainer=Other)


def test_the_location_of_the_setting_is_named(tmp_path):
    config = config_of(tmp_path)
    text = (tmp_path / "run.yaml").read_text().replace("trainer:", "trainer:\n  optimizer_in_backward: true")
    (tmp_path / "run.yaml").write_text(text + "anomalies:\n  spike: skip\n")
    line = next(n for n, each in enumerate(text.splitlines(), start=1) if "optimizer_in_backward" in each)
    config = RunConfig.load(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=f"run.yaml:{line}"):
        build_trainer(config)


def test_several_processes_are_rejected(tmp_path):
    config = config_of(tmp_path, IN_BACKWARD)
    with raises(ConfigError, "optimizer_in_backward", "2 processes"):
        reject_steps_in_backward({}, config, Ranks(0, 2), BatchPlan(8, 4, 1))


class BadBatch(Trainer):
    """Its third step has a loss that is nan, once."""

    def forward(self, **batch):
        is_bad = self.step == 2 and not self.has_failed
        self.has_failed = self.has_failed or is_bad
        loss = self.model(**batch)["loss"]
        return loss * torch.nan if is_bad else loss

    def post_init(self):
        self.has_failed = False


def test_a_rollback_restores_weights_that_were_stepped_with_nan(tmp_path):
    settings = ("anomalies.non_finite=rollback", "anomalies.snapshot_every_steps=1")
    weights, watch = run(tmp_path / "early", IN_BACKWARD, *settings, trainer=BadBatch)
    assert all(each.isfinite().all() for each in weights.values())
    assert watch.results[-1]["step"] == 4


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["trainer.micro_batch_size=2"], "micro_batch_size"),
        (["trainer.micro_batch_size=auto"], "micro_batch_size: auto"),
        (["runtime.mode=compile"], "compile_repeated_blocks"),
        (["trainer.max_grad_norm=1.0"], "max_grad_norm"),
        (["trainer.max_grad_value=1.0"], "max_grad_value"),
        (["runtime.precision=fp16"], "precision"),
        (["anomalies.non_finite=skip"], "non_finite"),
        (["anomalies.spike=skip"], "spike"),
        (["trainer.optimizer={type: 'torch.optim:LBFGS'}"], "LBFGS"),
        (["trainer.optimizer={type: adamw, report: true}"], "report"),
        (["trainer.optimizer={type: adamw, repair_nan: true}"], "repair_nan"),
        (["trainer.optimizer={type: 'parts.py:Sgd'}"], "steps_in_parts"),
    ],
)
def test_what_needs_all_gradients_first_is_rejected(tmp_path, overrides, problem):
    with raises(ConfigError, "optimizer_in_backward", problem):
        build_trainer(config_of(tmp_path, IN_BACKWARD, *overrides))
