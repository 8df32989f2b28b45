"""Runs with moments in 8 bits and stochastic rounding: exact resume, changed settings, unfreezing, memory."""

from __future__ import annotations

import pytest
import torch
import yaml
from tests.messages import raises

from trainwright import Hook, RunConfig, Trainer, build_trainer
from trainwright.analysis.estimate import GRADIENTS, STATES, estimate
from trainwright.errors import CheckpointError, ConfigError

FILE = """
import torch


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(12) * (index + 1) + index) % 64
        return {"input_ids": ids, "labels": ids}
"""
EIGHT_BIT = {"type": "adamw", "lr": 0.01, "state": "8bit", "master_weights": "stochastic"}


def config_of(folder, *overrides, optimizer=EIGHT_BIT):
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").write_text(FILE)
    settings = {
        "name": "run",
        "output_dir": str(folder),
        "model": {"type": "llama", "preset": "tiny", "dtype": "bf16"},
        "data": {"train": {"type": "parts.py:Text"}},
        "trainer": {"max_steps": 4, "global_batch_size": 8, "optimizer": optimizer},
        "writers": [],
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return RunConfig.load(folder / "run.yaml", overrides)


def run(folder, *overrides, accept_changes=False, trainer=None, **parts):
    trained = build_trainer(config_of(folder, *overrides, **parts), trainer, accept_changes=accept_changes)
    trained.train()
    return trained


def everything(trainer):
    weights = dict(trainer.model.state_dict())
    states = trainer.optimizers["main"].state_dict()["state"]
    return weights | {f"{n}.{key}": value for n, state in states.items() for key, value in state.items()}


def assert_equal(one, other):
    one, other = everything(one), everything(other)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {torch.int8, torch.uint8} <= {value.dtype for value in one.values()}


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["runtime.mode=graph"],
        ["trainer.micro_batch_size=2", "trainer.max_grad_norm=0.5"],
        ["anomalies.non_finite=skip"],
        ["model.freeze=[{match: '*embed*', until_step: 1}]"],
        ["model.freeze=[{match: '*embed*', until_step: 3}]"],
        ["trainer.optimizer.master_weights=true"],
    ],
    ids=str,
)
def test_a_resumed_run_has_the_same_bits(tmp_path, overrides):
    whole = run(tmp_path / "whole", *overrides)
    run(tmp_path / "halves", *overrides, "trainer.max_steps=2")
    assert_equal(whole, run(tmp_path / "halves", *overrides))


def test_graph_mode_has_the_same_bits(tmp_path):
    assert_equal(run(tmp_path / "eager"), run(tmp_path / "graph", "runtime.mode=graph"))


def test_another_precision_of_the_state_is_rejected_or_accepted_and_converted(tmp_path):
    run(tmp_path, "trainer.max_steps=2")
    changed = {"type": "adamw", "lr": 0.01, "master_weights": True}
    with raises(CheckpointError, "trainer.optimizer.state", "8bit"):
        run(tmp_path, optimizer=changed)
    state = run(tmp_path, optimizer=changed, accept_changes=True).optimizers["main"].state
    assert all(set(each) == {"step", "exp_avg", "exp_avg_sq", "master"} for each in state.values())
    assert {each["exp_avg"].dtype for each in state.values()} == {torch.float32}
    back = run(tmp_path, "trainer.max_steps=6", accept_changes=True).optimizers["main"].state
    assert not any("master" in each for each in back.values())
    assert {each["exp_avg"].dtype for each in back.values()} == {torch.int8, torch.float32}


def test_other_optimizers_have_no_state_in_8_bits(tmp_path):
    with raises(ConfigError, "state", "Lion"):
        build_trainer(config_of(tmp_path, optimizer={"type": "lion", "lr": 0.01, "state": "8bit"}))


@pytest.mark.parametrize("value", ["random", "3"])
def test_other_values_of_master_weights_are_rejected(tmp_path, value):
    with raises(ConfigError, "trainer.optimizer.master_weights", "stochastic"):
        build_trainer(config_of(tmp_path, f"trainer.optimizer.master_weights={value}"))


def bytes_of(config):
    found = estimate(config, world_size=1)
    return {kind: found.most[kind] / found.num_parameters for kind in (GRADIENTS, STATES)}


def test_an_estimate_counts_two_bytes_of_state_per_parameter(tmp_path):
    wide = "model={type: llama, preset: tiny, hidden_size: 512, num_layers: 1, dtype: bf16}"
    assert bytes_of(config_of(tmp_path, wide))[STATES] == pytest.approx(2.03, abs=0.02)
    masters = bytes_of(config_of(tmp_path, wide, "trainer.optimizer.master_weights=true"))
    assert masters[STATES] == pytest.approx(6.03, abs=0.02)
    plain = {"type": "adamw", "lr": 0.01, "master_weights": True}
    assert bytes_of(config_of(tmp_path, wide, optimizer=plain))[STATES] == pytest.approx(12.0, abs=0.02)


def test_gradients_of_bf16_weights_have_two_bytes_unless_several_are_added(tmp_path):
    wide = "model={type: llama, preset: tiny, hidden_size: 512, num_layers: 1, dtype: bf16}"
    assert bytes_of(config_of(tmp_path, wide))[GRADIENTS] == pytest.approx(2.0, abs=0.02)
    assert bytes_of(config_of(tmp_path, wide, "trainer.micro_batch_size=4"))[GRADIENTS] == pytest.approx(4.0, abs=0.02)


class Watch(Hook):
    def after_step(self):
        parameters = list(self.trainer.model.parameters())
        self.dtypes = {each.grad.dtype for each in parameters}
        self.bytes = sum(each.grad.numel() * each.grad.element_size() for each in parameters)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(("micro", "dtype"), [(8, torch.bfloat16), (4, torch.float32)])
def test_gradients_are_fp32_only_where_they_are_accumulated(tmp_path, mode, micro, dtype):
    watch = Watch()

    class Watched(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), watch]

    settings = (f"trainer.micro_batch_size={micro}", f"runtime.mode={mode}", "trainer.max_steps=2")
    trainer = run(tmp_path, *settings, trainer=Watched)
    num_parameters = sum(each.numel() for each in trainer.model.parameters())
    assert watch.dtypes == {dtype}
    assert watch.bytes == num_parameters * dtype.itemsize
