"""Optimizers with special needs: schedulefree's, LBFGS and torch's Muon, each against a plain loop."""

import json
from pathlib import Path

import pytest
import torch
from tests.messages import raises
from tests.project.parts import Net, Points

from trainwright import Hook, RunConfig, Trainer, build_trainer, load_checkpoint
from trainwright.errors import ConfigError

PROJECT = Path(__file__).parents[1] / "project"
SETTINGS = {
    "name": "run",
    "data": {
        "train": {"type": "parts.py:Points", "size": 16},
        "eval": {"valid": {"type": "parts.py:Points", "size": 8, "seed": 1}},
        "shuffle": False,
    },
    "model": {"type": "parts.py:Net"},
    "trainer": {"max_steps": 6, "global_batch_size": 8},
    "evaluation": {"every_steps": 2},
    "log": {"every_steps": 1},
    "writers": ["json"],
}


def build(folder, optimizer, *overrides, trainer=Trainer, **options):
    given = [f"output_dir={folder}", f"trainer.optimizer={json.dumps(optimizer)}", *overrides]
    return build_trainer(RunConfig.from_dict(SETTINGS, project_dir=PROJECT, overrides=given), trainer, **options)


def train(folder, *given, **options):
    trainer = build(folder, *given, **options)
    trainer.train()
    return trainer


def lines_of(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.json").read_text().splitlines()]


def loop(initial, make, *, limit=None):
    """A plain loop over the same batches; returns the model and the optimizer."""
    model, points = Net(), Points(16)
    model.to(initial["layers.0.weight"].dtype).load_state_dict(initial)
    points.x = points.x.to(initial["layers.0.weight"].dtype)
    optimizer = make(model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(6):
        rows = slice(step % 2 * 8, step % 2 * 8 + 8)

        def closure(rows=rows):
            optimizer.zero_grad()
            loss = model(points.x[rows], points.y[rows])["loss"]
            loss.backward()
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return model, optimizer


def assert_equal(state, expected, **tolerances):
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, **tolerances)


SCHEDULE_FREE = [
    {"type": "schedulefree:AdamWScheduleFree", "lr": 0.05, "warmup_steps": 2},
    {"type": "schedulefree:SGDScheduleFree", "lr": 0.5},
    {"type": "schedulefree:RAdamScheduleFree", "lr": 0.05},
]


@pytest.mark.parametrize("component", SCHEDULE_FREE, ids=lambda component: component["type"])
def test_schedulefree_trains_evaluates_and_saves_as_its_documentation_says(component, tmp_path):
    schedulefree = pytest.importorskip("schedulefree")
    trainer = build(tmp_path, component)
    initial = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    logs = trainer.train()
    kind = getattr(schedulefree, component["type"].partition(":")[2])
    model, optimizer = loop(
        initial, lambda parameters: kind(parameters, **{k: v for k, v in component.items() if k != "type"})
    )
    assert_equal(dict(trainer.model.state_dict()), model.state_dict(), rtol=0, atol=0)
    optimizer.eval()
    assert_equal(load_checkpoint(tmp_path / "run").state_dict(), model.state_dict(), rtol=0, atol=0)
    points = Points(8, seed=1)
    assert logs["valid/loss"] == pytest.approx(float(model(points.x, points.y)["loss"].detach()), rel=1e-6)


@pytest.mark.parametrize("component", SCHEDULE_FREE, ids=lambda component: component["type"])
@pytest.mark.parametrize("accept_changes", [False, True])
def test_a_resumed_schedulefree_run_has_the_same_bits(component, accept_changes, tmp_path):
    pytest.importorskip("schedulefree")
    whole = train(tmp_path / "whole", component)
    train(tmp_path / "halves", component, "trainer.max_steps=3")
    halves = train(tmp_path / "halves", component, accept_changes=accept_changes)
    assert_equal(dict(halves.model.state_dict()), whole.model.state_dict(), rtol=0, atol=0)
    assert halves.optimizers["main"].param_groups[0]["k"] == 6


def test_schedulefree_with_averaged_weights_is_rejected(tmp_path):
    pytest.importorskip("schedulefree")
    trainer = build(tmp_path, SCHEDULE_FREE[0], "hooks=[ema]")
    with raises(ConfigError, "AdamWScheduleFree"):
        trainer.train()


class Double(Trainer):
    @classmethod
    def build_model(cls, build):
        return super().build_model(build).double()

    def forward(self, x, labels):
        return self.model(x.double(), labels)


LBFGS = {"type": "torch.optim:LBFGS", "lr": 0.1, "max_iter": 4, "history_size": 5}


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("micro_batch_size", [8, 4])
@pytest.mark.parametrize("limit", [None, 0.1])
def test_lbfgs_repeats_the_step_as_a_closure_does(line_search, micro_batch_size, limit, tmp_path):
    component = {**LBFGS, "line_search_fn": line_search}
    overrides = [f"trainer.micro_batch_size={micro_batch_size}", f"trainer.max_grad_norm={json.dumps(limit)}"]
    trainer = build(tmp_path, component, *overrides, trainer=Double)  # rounding would select other directions
    initial = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    trainer.train()
    make = lambda parameters: torch.optim.LBFGS(  # noqa: E731
        parameters, lr=0.1, max_iter=4, history_size=5, line_search_fn=line_search
    )
    model, _ = loop(initial, make, limit=limit)
    assert_equal(dict(trainer.model.state_dict()), model.state_dict(), rtol=1e-5, atol=1e-6)
    points = Points(16)
    fresh = Net().double()
    fresh.load_state_dict(initial)
    first = float(fresh(points.x[:8].double(), points.y[:8])["loss"].detach())
    assert lines_of(tmp_path)[0]["loss"] == pytest.approx(first, rel=1e-5)  # of the weights before the step


def test_a_resumed_lbfgs_run_has_the_same_bits(tmp_path):
    whole = train(tmp_path / "whole", LBFGS)
    train(tmp_path / "halves", LBFGS, "trainer.max_steps=3")
    halves = train(tmp_path / "halves", LBFGS)
    assert_equal(dict(halves.model.state_dict()), whole.model.state_dict(), rtol=0, atol=0)


def test_lbfgs_works_with_an_own_step(tmp_path):
    class Own(Trainer):
        def train_step(self, batch):
            update = self.begin_update()
            update.backward(self.model(**batch)["loss"])
            return tuple(update.apply())

    ours, own = train(tmp_path / "ours", LBFGS), train(tmp_path / "own", LBFGS, trainer=Own)
    assert_equal(dict(own.model.state_dict()), ours.model.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("micro_batch_size", [8, 4])
def test_lbfgs_trains_weights_of_16_bits(micro_batch_size, tmp_path):
    class Short(Trainer):
        @classmethod
        def build_model(cls, build):
            return super().build_model(build).bfloat16()

        def forward(self, x, labels):
            return self.model(x.bfloat16(), labels)

    train(tmp_path, LBFGS, f"trainer.micro_batch_size={micro_batch_size}", trainer=Short)
    lines = lines_of(tmp_path)
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_step_that_is_repeated_has_its_metrics(tmp_path):
    class Measured(Trainer):
        def forward(self, x, labels):
            return self.model(x, labels)["loss"], {"seen": 1.0}

        def train_step(self, batch):
            result = super().train_step(batch)
            result.metrics["twice"] = 2 * result.metrics["seen"]
            return result

    train(tmp_path, LBFGS, trainer=Measured)
    assert lines_of(tmp_path)[-1]["twice"] == 2.0


def test_lbfgs_rejects_a_step_with_several_updates(tmp_path):
    class Alternating(Trainer):
        def train_step(self, batch):
            first = self.begin_update()
            first.backward(self.model(**batch)["loss"])
            result = first.apply(("weights",))
            second = self.begin_update()
            second.backward(3 * self.model(**batch)["loss"])
            second.apply(("biases",))
            return result

    sections = {
        "weights": {"optimizer": LBFGS, "match": "*.weight"},
        "biases": {"optimizer": {"type": "adamw", "lr": 0.01}, "match": "*.bias"},
    }
    given = [f"output_dir={tmp_path}", f"trainer.optimizers={json.dumps(sections)}"]
    trainer = build_trainer(RunConfig.from_dict(SETTINGS, project_dir=PROJECT, overrides=given), Alternating)
    with raises(ConfigError, "LBFGS", "apply 2 times"):
        trainer.train()


@pytest.mark.parametrize("overrides", [("runtime.precision=fp16",), ("runtime.mode=graph",)])
def test_lbfgs_is_rejected_where_a_step_cannot_be_repeated(overrides, tmp_path):
    with raises(ConfigError, "LBFGS"):
        build(tmp_path, LBFGS, *overrides)


def test_lbfgs_rejects_a_parameter_that_becomes_trainable(tmp_path):
    class Unfreeze(Hook):
        def after_step(self):
            self.trainer.model.requires_grad_(True)

    class Hooked(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), Unfreeze()]

    trainer = build(tmp_path, LBFGS, "model.freeze=layers.0.*", trainer=Hooked)
    with raises(ConfigError, "LBFGS"):
        trainer.train()


def test_an_optimizer_may_say_that_it_computes_the_loss_again(tmp_path):
    trainer = train(tmp_path, {"type": "parts.py:Sharpness", "lr": 0.1})
    assert trainer.optimizers["main"].num_evaluations == 6


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_torchs_muon_explains_match(tmp_path):
    with raises(ConfigError, "trainer.optimizers", "layers.0.bias"):
        build(tmp_path, {"type": "torch.optim:Muon", "lr": 0.01})
    sections = {
        "muon": {"optimizer": {"type": "torch.optim:Muon", "lr": 0.01}, "match": "*.weight"},
        "rest": {"optimizer": {"type": "adamw", "lr": 0.01}, "match": "*.bias"},
    }
    given = [f"output_dir={tmp_path}", f"trainer.optimizers={json.dumps(sections)}"]
    build_trainer(RunConfig.from_dict(SETTINGS, project_dir=PROJECT, overrides=given)).train()
