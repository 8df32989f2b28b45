"""The weights that a run evaluates with are those that load_checkpoint, evaluate, export and generate use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.export.runs import RUN, train_run
from tests.messages import raises
from typer.testing import CliRunner

from trainwright import Hook, RunConfig, Trainer, build_trainer, load_checkpoint, run_experiment
from trainwright.cli import app
from trainwright.errors import CheckpointError, ConfigError
from trainwright.export.huggingface import export_run
from trainwright.export.text import load_text_model
from trainwright.hooks.ema import EMA

PROJECT = Path(__file__).parents[1] / "project"
BEST = "checkpoint={every_steps: 2, keep_last: 4, keep_best: {metric: valid/loss, mode: min}}"


def load(tmp_path, *overrides, hook="{type: ema, decay: 0.8}"):
    settings = ["trainer.max_steps=6", "trainer.schedule=null", "evaluation.every_steps=2", f"hooks=[{hook}]", BEST]
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", *settings, *overrides])


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def are_equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A run with averages: its folder, the trained weights, the averages."""
    output = tmp_path_factory.mktemp("runs")
    trainer = build_trainer(load(output))
    trainer.train()
    hook = next(hook for hook in trainer.hooks if isinstance(hook, EMA))
    assert not are_equal(weights(trainer.model), hook.averages)
    return output / "small", weights(trainer.model), {name: each.clone() for name, each in hook.averages.items()}


def test_load_checkpoint_returns_the_averages_that_were_evaluated(averaged):
    folder, trained, averages = averaged
    assert are_equal(weights(load_checkpoint(folder)), averages)
    assert are_equal(weights(load_checkpoint(folder, weights="ema")), averages)
    assert are_equal(weights(load_checkpoint(folder, weights="raw")), trained)
    with raises(ConfigError, "weights"):
        load_checkpoint(folder, weights="mean")


def test_the_best_checkpoint_has_the_metric_that_it_was_chosen_by(averaged, tmp_path):
    folder, _, _ = averaged
    model = load_checkpoint(folder, "best")
    trainer = build_trainer(load(tmp_path, "hooks=[]"))
    trainer.model.load_state_dict(model.state_dict())
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    best = min(line["valid/loss"] for line in lines if "valid/loss" in line)
    assert trainer.evaluate()["valid/loss"] == pytest.approx(best, rel=1e-6)


def test_an_averaged_checkpoint_stores_each_average_once(averaged):
    folder, _, _ = averaged
    stored = load_file(folder / "checkpoints" / "step-00000006" / "training.safetensors")
    assert sum("layers.0.weight" in key for key in stored) == 1


@pytest.mark.parametrize("choice", [None, "ema", "raw"])
def test_evaluate_uses_the_selected_weights(averaged, choice, capsys):
    folder, _, _ = averaged
    arguments = ["evaluate", str(folder)] + ([] if choice is None else ["--weights", choice])
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    is_as_evaluated = json.loads(result.stdout)["valid/loss"] == pytest.approx(lines[-1]["valid/loss"], rel=1e-9)
    assert is_as_evaluated == (choice != "raw")


def test_evaluate_uses_the_averages_of_a_checkpoint_without_the_hook(averaged):
    folder, _, _ = averaged
    config = RunConfig.load(folder / "config.yaml")
    _, logs = run_experiment(config, mode="eval")
    _, without = run_experiment(RunConfig.load(folder / "config.yaml", ["hooks=[]"]), mode="eval")
    assert without == logs


def test_a_run_that_does_not_evaluate_its_averages_delivers_the_trained_weights(tmp_path):
    trainer = build_trainer(load(tmp_path, hook="{type: ema, decay: 0.8, evaluate: false}"))
    trainer.train()
    hook = next(hook for hook in trainer.hooks if isinstance(hook, EMA))
    assert are_equal(weights(load_checkpoint(tmp_path / "small")), weights(trainer.model))
    assert are_equal(weights(load_checkpoint(tmp_path / "small", weights="ema")), hook.averages)


def test_averages_of_a_run_without_any_are_an_error(tmp_path):
    build_trainer(load(tmp_path, "hooks=[]")).train()
    with raises(CheckpointError, "step-00000006"):
        load_checkpoint(tmp_path / "small", weights="ema")
    with raises(CheckpointError, "step-00000006"):
        run_experiment(load(tmp_path, "hooks=[]"), mode="eval", weights="ema")
    with raises(ConfigError, "weights"):
        run_experiment(load(tmp_path / "other"), mode="train", weights="ema")


def test_exports_and_texts_use_the_selected_weights(tmp_path):
    folder, trainer = train_run(tmp_path, RUN, ["hooks=[{type: ema, decay: 0.8}]"])
    hook = next(hook for hook in trainer.hooks if isinstance(hook, EMA))
    trained = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    for choice, expected in ((None, hook.averages), ("raw", trained)):
        model, _ = load_text_model(folder, weights=choice)
        assert are_equal(dict(model.named_parameters()), expected)
        to = tmp_path / f"export-{choice}"
        arguments = [] if choice is None else ["--weights", choice]
        result = CliRunner().invoke(
            app, ["export", str(folder), "--to", str(to), "--format", "safetensors", *arguments]
        )
        assert result.exit_code == 0, result.output
        assert are_equal(load_file(to / "model.safetensors"), expected)
    export_run(folder, tmp_path / "hf")
    with raises(ConfigError, "hf"):
        load_text_model(tmp_path / "hf", weights="raw")


class Doubled(Hook):
    """Evaluates with weights that are in no state dict."""

    def averaged_weights(self):
        return {name: 2.0 * value.detach() for name, value in self.trainer.model.named_parameters()}


class Swapping(Hook):
    """Exchanges weights by itself, through `.data`, which no version counter notices."""

    def before_eval(self):
        self.own = weights(self.trainer.model)
        for parameter in self.trainer.model.parameters():
            parameter.data.mul_(2.0)

    def after_eval(self, logs):
        self.trainer.model.load_state_dict(self.own)


def with_hooks(*hooks):
    class Given(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), *(hook() for hook in hooks)]

    return Given


def test_weights_of_any_hook_are_delivered(tmp_path):
    trainer = build_trainer(load(tmp_path, "hooks=[]"), with_hooks(Doubled))
    logs = trainer.train()
    model = load_checkpoint(tmp_path / "small")
    expected = {name: 2.0 * value for name, value in weights(trainer.model).items()}
    assert are_equal(weights(model), expected)
    trainer.model.load_state_dict(model.state_dict())
    assert trainer.evaluate_sets(trainer.eval_data, with_hooks=False) == logs


def test_a_hook_that_exchanges_weights_by_itself_is_rejected(tmp_path):
    trainer = build_trainer(load(tmp_path, "hooks=[]"), with_hooks(Swapping))
    with raises(ConfigError, "test_averaged.py") as caught:
        trainer.train()
    assert "before_eval" in str(caught.value)
    trained = weights(trainer.model)
    assert are_equal(weights(build_trainer(load(tmp_path, "hooks=[]")).model), trained)


def test_two_hooks_with_averages_are_rejected(tmp_path):
    trainer = build_trainer(load(tmp_path), with_hooks(Doubled))
    with raises(ConfigError, "Doubled"):
        trainer.train()


class Recording(Trainer):
    """Keeps the weights of each evaluation by set."""

    def post_init(self):
        self.evaluated = {}

    def eval_begin(self):
        self.evaluated.setdefault(self.eval_name, []).append(weights(self.model))


@pytest.mark.parametrize("hook", ["", "{type: ema, decay: 0.8}"], ids=["trained", "averaged"])
def test_the_test_set_is_evaluated_with_the_best_checkpoint(tmp_path, hook):
    worst = BEST.replace("min", "max")  # the best one is an early one
    test = "data.test={type: parts.py:Points, size: 20, seed: 5}"
    trainer = build_trainer(load(tmp_path / "a", worst, test, hook=hook), Recording)
    logs = trainer.train()
    assert trainer.best.step == 2
    assert are_equal(trainer.evaluated["test"][0], trainer.evaluated["valid"][0])
    assert not are_equal(trainer.evaluated["test"][0], trainer.evaluated["valid"][-1])
    assert (
        logs["test/loss"] == json.loads((tmp_path / "a/small/metrics.json").read_text().splitlines()[-1])["test/loss"]
    )
    plain = build_trainer(load(tmp_path / "b", worst, hook=hook), Recording)
    plain.train()
    assert are_equal(weights(trainer.model), weights(plain.model))
    for part in ("model", "optimizers"):
        ours, theirs = (
            trained.context.store.path(6).joinpath(f"{part}.safetensors").read_bytes() for trained in (trainer, plain)
        )
        assert ours == theirs
    again = build_trainer(load(tmp_path / "a", worst, test, hook=hook), Recording)
    assert again.evaluate_test() == {"test/loss": logs["test/loss"], "test/accuracy": logs["test/accuracy"]}


def test_the_test_set_is_evaluated_with_the_last_weights_if_the_best_checkpoint_is_damaged(tmp_path, caplog):
    test = "data.test={type: parts.py:Points, size: 20, seed: 5}"

    class Damaging(Recording):
        def eval_begin(self):
            super().eval_begin()
            if self.step == 6 and self.eval_name == "valid":
                (self.context.store.path(2) / "model.safetensors").write_bytes(b"")

    trainer = build_trainer(load(tmp_path, BEST.replace("min", "max"), test, "hooks=[]"), Damaging)
    trainer.train()
    assert are_equal(trainer.evaluated["test"][0], weights(trainer.model))
    assert "step-00000002" in caplog.text


class Unfreezing(Trainer):
    """Trains a frozen weight from step 3 on, by hand."""

    def next_train_inputs(self, iterator):
        weight = self.model.layers[0].weight.requires_grad_(self.step >= 3)
        with torch.no_grad():
            weight.mul_(1.01 if self.step >= 3 else 1.0)
        return super().next_train_inputs(iterator)


def test_only_parameters_that_are_or_were_trained_are_averaged(tmp_path):
    frozen = load(tmp_path, "model.freeze=[layers.0.*]")
    trainer = build_trainer(frozen, Unfreezing)
    hook = next(hook for hook in trainer.hooks if isinstance(hook, EMA))
    trainer.train()
    assert "layers.0.bias" not in hook.averages
    assert not torch.equal(hook.averages["layers.0.weight"], trainer.model.layers[0].weight)
    resumed = build_trainer(frozen.derive({"trainer.max_steps": 8}), Unfreezing)
    resumed.train()
    whole = build_trainer(load(tmp_path / "whole", "model.freeze=[layers.0.*]", "trainer.max_steps=8"), Unfreezing)
    whole.train()
    assert are_equal(weights(load_checkpoint(tmp_path / "small")), weights(load_checkpoint(tmp_path / "whole/small")))
