"""Averaged weights: in for evaluations, out for everything else."""

from pathlib import Path

import pytest
import torch
from tests.messages import raises

from trainwright import Hook, RunConfig, Trainer, build_trainer
from trainwright.errors import CheckpointError, ConfigError
from trainwright.hooks.ema import EMA

PROJECT = Path(__file__).parents[1] / "project"


def load(tmp_path, *overrides, arguments="decay: 0.8", steps=6):
    hooks = f"hooks=[{{type: ema, {arguments}}}]"
    return RunConfig.load(
        PROJECT / "run.yaml", [f"output_dir={tmp_path}", f"trainer.max_steps={steps}", hooks, *overrides]
    )


def averaging(trainer):
    return next(hook for hook in trainer.hooks if isinstance(hook, EMA))


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


class Watching(Trainer):
    """Notes the weights after each update and those of each evaluation."""

    def post_init(self):
        self.trained, self.evaluated = [weights(self)], []

    def train_step(self, batch):
        result = super().train_step(batch)
        self.trained.append(weights(self))
        return result

    def eval_begin(self):
        self.evaluated.append(weights(self))


@pytest.mark.parametrize("every_steps", [1, 2])
def test_the_average_starts_as_the_weights_and_follows_the_formula(tmp_path, every_steps):
    trainer = build_trainer(load(tmp_path, arguments=f"decay: 0.8, every_steps: {every_steps}"), Watching)
    trainer.train()
    expected = trainer.trained[0]
    for step in range(every_steps, 7, every_steps):
        expected = {name: 0.8 * expected[name] + 0.2 * value for name, value in trainer.trained[step].items()}
    for name, average in averaging(trainer).averages.items():
        torch.testing.assert_close(average, expected[name])


def test_evaluations_use_the_averages_and_training_its_own_weights(tmp_path):
    plain = build_trainer(load(tmp_path / "plain", "hooks=[]"), Watching)
    plain.train()
    trainer = build_trainer(load(tmp_path / "averaged"), Watching)
    trainer.train()
    assert_equal(weights(trainer), weights(plain))
    assert_equal(trainer.evaluated[-1], averaging(trainer).averages)
    assert not torch.equal(trainer.evaluated[-1]["layers.0.weight"], plain.evaluated[-1]["layers.0.weight"])


def test_evaluate_false_keeps_the_averages_out_of_evaluations(tmp_path):
    trainer = build_trainer(load(tmp_path, arguments="decay: 0.8, evaluate: false"), Watching)
    trainer.train()
    assert_equal(trainer.evaluated[-1], trainer.trained[-1])
    assert not torch.equal(averaging(trainer).averages["layers.0.weight"], trainer.trained[-1]["layers.0.weight"])


def test_replacing_the_weights_restores_the_exact_bits(tmp_path):
    trainer = build_trainer(load(tmp_path), Watching)
    trainer.train()
    hook = averaging(trainer)
    with torch.no_grad():  # the bit patterns that arithmetic would lose
        next(trainer.model.parameters()).flatten()[:4] = torch.tensor([float("nan"), -0.0, 1e-45, 3e38])
    before, averages = weights(trainer), {name: value.clone() for name, value in hook.averages.items()}
    trainer.evaluate()
    assert_equal(trainer.evaluated[-1], averages)
    for name, value in weights(trainer).items():
        assert torch.equal(value.view(torch.int32), before[name].view(torch.int32))
    assert_equal(hook.averages, averages)


class FailingEvaluation(Watching):
    def eval_step(self, batch):
        raise ValueError("no evaluation today")


def test_a_failed_evaluation_leaves_and_saves_the_trained_weights(tmp_path):
    trainer = build_trainer(load(tmp_path), FailingEvaluation)
    with pytest.raises(ValueError, match="no evaluation today"):
        trainer.train()
    assert trainer.step == 5
    assert_equal(weights(trainer), trainer.trained[-1])
    again = build_trainer(load(tmp_path))
    assert again.step == 5
    assert_equal(weights(again), trainer.trained[-1])


class Rejecting(Hook):
    """A neighbour that raises after each evaluation."""

    def after_eval(self, logs):
        raise ValueError("not good enough")


class WithRejecting(Watching):
    @classmethod
    def build_hooks(cls, build):
        return [Rejecting(), *build.hooks()]


def test_averages_are_not_saved_as_weights_if_another_hook_raises_after_an_evaluation(tmp_path):
    trainer = build_trainer(load(tmp_path), WithRejecting)
    with pytest.raises(ValueError, match="not good enough"):
        trainer.train()
    assert_equal(weights(build_trainer(load(tmp_path))), trainer.trained[-1])


def test_a_resumed_run_continues_its_averages(tmp_path):
    constant = "trainer.schedule={type: constant}"
    whole = build_trainer(load(tmp_path / "whole", constant, steps=8))
    logs = whole.train()
    build_trainer(load(tmp_path / "halves", constant, steps=4)).train()
    resumed = build_trainer(load(tmp_path / "halves", constant, steps=8))
    assert resumed.step == 4
    assert resumed.train() == logs
    assert_equal(averaging(resumed).averages, averaging(whole).averages)


def test_averages_of_another_model_are_rejected(tmp_path):
    trainer = build_trainer(load(tmp_path))
    averaging(trainer).load_state_dict({"averages": {"head.weight": torch.ones(2)}})
    with raises(CheckpointError, "head.weight"):
        trainer.train()


def test_loaded_averages_are_on_the_device_of_the_weights(tmp_path):
    trainer = build_trainer(load(tmp_path))
    hook = averaging(trainer)
    trainer.model.to("meta")  # stands for an accelerator: a run that goes back loads from main memory
    loaded = {name: torch.ones(parameter.shape) for name, parameter in trainer.model.named_parameters()}
    hook.load_state_dict({"averages": loaded})
    assert {average.device.type for average in hook.averages.values()} == {"meta"}


class OneBadBatch(Watching):
    """The loss of the fifth batch is nan; keeps the weights of the steps that stand."""

    def post_init(self):
        super().post_init()
        self.standing = {}

    def forward(self, **batch):
        outputs = super().forward(**batch)
        is_bad = self.model.training and self.train_data.order_position == 40
        return {**outputs, "loss": outputs["loss"] * float("nan")} if is_bad else outputs

    def train_step(self, batch):
        result = super().train_step(batch)
        self.standing[self.step + 1] = self.trained[-1]
        return result


@pytest.mark.parametrize("snapshots", ["null", "2"])
def test_a_rollback_restores_the_averages_of_its_step(tmp_path, snapshots):
    anomalies = f"anomalies={{non_finite: rollback, snapshot_every_steps: {snapshots}}}"
    trainer = build_trainer(load(tmp_path, anomalies, "checkpoint.every_steps=3"), OneBadBatch)
    trainer.train()
    assert len(trainer.trained) == 1 + 6 + (2 if snapshots == "null" else 1)  # steps 4 and 5 again, or 5 alone
    expected = trainer.trained[0]
    for step in range(1, 7):
        expected = {name: 0.8 * expected[name] + 0.2 * value for name, value in trainer.standing[step].items()}
    for name, average in averaging(trainer).averages.items():
        torch.testing.assert_close(average, expected[name])


@pytest.mark.parametrize(("arguments", "message"), [({"decay": 1.0}, ("1.0",)), ({"every_steps": 0}, ())])
def test_settings_that_cannot_work_are_rejected(arguments, message):
    with raises(ConfigError, *message):
        EMA(**arguments)
