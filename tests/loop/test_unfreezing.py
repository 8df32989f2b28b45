"""Parameters that are unfrozen or frozen during a run, against torch's own loop, and resumed."""

import json
import logging
from pathlib import Path

import pytest
import torch
from tests.messages import mentions, raises
from tests.optim.test_torch_schedules import lines_of, with_hooks
from tests.project.parts import Net, Points
from torch import nn

from trainwright import Hook, RunConfig, Trainer, build_trainer
from trainwright.errors import ConfigError

PROJECT = Path(__file__).parents[1] / "project"
ADAMW = {"type": "torch.optim:AdamW", "lr": 0.05, "weight_decay": 0.1}
SETTINGS = {
    "name": "run",
    "data": {"train": {"type": "parts.py:Points", "size": 16}, "shuffle": False},
    "model": {"type": "parts.py:Net", "freeze": "layers.0.*"},
    "trainer": {"max_steps": 6, "global_batch_size": 8, "optimizer": ADAMW},
    "log": {"every_steps": 1},
    "writers": ["json"],
}


class Unfreeze(Hook):
    def __init__(self, step=2, names=("layers.0.weight", "layers.0.bias")):
        self.at, self.names = step, names

    def after_step(self):
        if self.trainer.step == self.at:
            for name in self.names:
                self.trainer.model.get_parameter(name).requires_grad_(True)


def build(folder, *overrides, hooks=(), base=Trainer, **options):
    class Hooked(base):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), *hooks]

    given = [f"output_dir={folder}", *overrides]
    return build_trainer(RunConfig.from_dict(SETTINGS, project_dir=PROJECT, overrides=given), Hooked, **options)


def train(folder, *overrides, **options):
    trainer = build(folder, *overrides, **options)
    trainer.train()
    return trainer


def weights_of(trainer):
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


def names_in(trainer, group):
    names = {id(each): name for name, each in trainer.model.named_parameters()}
    return [names[id(each)] for each in group["params"]]


def weights_of_torch(initial, *, at=2, num_steps=6, limit=None):
    """The weights after a plain loop that unfreezes the first layer and adds it to the optimizer."""
    model, points = Net(), Points(16)
    model.load_state_dict(initial)
    model.layers[0].requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.1)
    for step in range(num_steps):
        if step == at:
            model.layers[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.layers[0].parameters())})
        rows = slice(step % 2 * 8, step % 2 * 8 + 8)
        optimizer.zero_grad()
        model(points.x[rows], points.y[rows])["loss"].backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("mode", ["eager", "graph", "compile"])
def test_an_unfrozen_parameter_is_trained_as_in_torch(mode, tmp_path, caplog):
    backend = ["runtime.compile_backend=aot_eager"] if mode == "compile" else []
    trainer = build(tmp_path, f"runtime.mode={mode}", "trainer.max_grad_norm=0.5", *backend, hooks=[Unfreeze()])
    initial = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    with caplog.at_level(logging.INFO, "trainwright"):
        trainer.train()
    expected = weights_of_torch(initial, limit=0.5)
    for name, value in weights_of(trainer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected["layers.0.weight"], initial["layers.0.weight"])
    assert any("layers.0.weight, layers.0.bias become trainable" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("freeze", ["{match: 'layers.0.*', until_step: 2}", "[{match: 'layers.0.*', until_epoch: 1}]"])
def test_freezing_until_a_step_or_an_epoch_ends_there(freeze, tmp_path):
    by_hook = train(tmp_path / "hook", hooks=[Unfreeze()])
    by_rule = train(tmp_path / "rule", f"model.freeze={freeze}")
    for name, value in weights_of(by_rule).items():
        assert torch.equal(value, weights_of(by_hook)[name])


def test_a_limit_that_the_run_does_not_reach_is_reported(tmp_path, caplog):
    train(tmp_path, "model.freeze={match: 'layers.0.*', until_step: 6}")
    assert any(mentions(each.getMessage(), "model.freeze", "until_step", 6) for each in caplog.records)


def test_a_plain_glob_keeps_what_a_limited_one_matches_too(tmp_path):
    freeze = "[layers.0.bias, {match: 'layers.0.*', until_step: 2}]"
    trainer = train(tmp_path, f"model.freeze={freeze}")
    assert trainer.model.layers[0].weight.requires_grad
    assert not trainer.model.layers[0].bias.requires_grad


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_run_resumed_after_unfreezing_continues_exactly(at, tmp_path):
    whole = train(tmp_path / "whole", hooks=[Unfreeze(2)])
    train(tmp_path / "halves", f"trainer.max_steps={at}", hooks=[Unfreeze(2)])
    halves = train(tmp_path / "halves", hooks=[Unfreeze(2)])
    for name, value in weights_of(halves).items():
        assert torch.equal(value, weights_of(whole)[name])
    names = [len(optimizer.state) for optimizer in (whole.optimizers["main"], halves.optimizers["main"])]
    assert names == [4, 4]
    assert [line["loss"] for line in lines_of(tmp_path / "whole")] == [
        line["loss"] for line in lines_of(tmp_path / "halves")
    ]


def test_parameters_join_the_groups_that_they_would_have_been_in(tmp_path):
    rules = [{"match": "*.bias", "weight_decay": 0.0, "lr": 0.01}]
    freeze = "model.freeze=['layers.*.bias', 'layers.0.weight']"
    optimizer = f"trainer.optimizer={json.dumps({'type': 'torch.optim:AdamW', 'lr': 0.05, 'groups': rules})}"
    with raises(ConfigError, "trainer.optimizer.groups.0"):  # of the trained parameters none is a bias
        build(tmp_path / "error", freeze, optimizer)
    freeze = "model.freeze='layers.0.*'"
    unfreeze = Unfreeze(2)
    schedule = "trainer.schedule={type: linear}"
    whole = train(tmp_path / "whole", freeze, optimizer, schedule, hooks=[unfreeze])
    groups = whole.optimizers["main"].param_groups
    assert [group["param_names"] for group in groups] == [
        ["layers.3.weight", "layers.0.weight"],
        ["layers.3.bias", "layers.0.bias"],
    ]
    assert groups[1]["weight_decay"] == 0.0
    train(tmp_path / "halves", freeze, optimizer, schedule, "trainer.max_steps=6", hooks=[Interrupt(3), unfreeze])
    halves = train(tmp_path / "halves", freeze, optimizer, schedule)
    for name, value in weights_of(halves).items():
        assert torch.equal(value, weights_of(whole)[name])


class Interrupt(Hook):
    def __init__(self, step):
        self.at = step

    def after_step(self):
        if self.trainer.step == self.at:
            self.trainer.interrupt("test")


class Marked(Trainer):
    @classmethod
    def build_model(cls, build):
        model = super().build_model(build)
        model.layers[0].weight.no_weight_decay = True
        model.layers[0].bias.lr_scale = 0.5
        return model


class Rates(Hook):
    """Keeps the rates of the groups, by the names of their members."""

    def __init__(self):
        self.seen = {}

    def after_step(self):
        groups = self.trainer.optimizers["main"].param_groups
        for group in groups:
            for name in names_in(self.trainer, group):
                self.seen.setdefault(name, {})[self.trainer.step] = float(group["lr"])


PLATEAU = "{type: reduce_on_plateau, metric: valid/loss, patience: 0, threshold: 10, threshold_mode: abs, factor: 0.5}"


@pytest.mark.parametrize("schedule", ["{type: linear}", PLATEAU])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_group_that_is_added_follows_the_schedule_from_its_first_step(schedule, mode, tmp_path):
    rates = Rates()
    evaluated = ("data.eval={valid: {type: 'parts.py:Points', size: 8, seed: 1}}", "evaluation.every_steps=1")
    overrides = (f"trainer.schedule={schedule}", f"runtime.mode={mode}", *evaluated)
    train(tmp_path, *overrides, hooks=[Unfreeze(3), rates], base=Marked)
    trained = rates.seen["layers.3.weight"]
    assert trained[4] < trained[1]
    for step in (4, 5, 6):
        assert rates.seen["layers.0.weight"][step] == pytest.approx(trained[step])
        assert rates.seen["layers.0.bias"][step] == pytest.approx(0.5 * trained[step])


def test_schedulefree_averages_the_weights_of_a_group_that_is_added(tmp_path):
    pytest.importorskip("schedulefree")
    optimizer = "trainer.optimizer={type: 'schedulefree:AdamWScheduleFree', lr: 0.05}"
    evaluated = []

    class Keep(Hook):
        def before_eval(self):
            evaluated.append(weights_of(self.trainer))

    settings = ("data.eval={valid: {type: 'parts.py:Points', size: 8}}", "evaluation.every_steps=5")
    trainer = train(tmp_path, optimizer, *settings, hooks=[Unfreeze(2), Keep()], base=Marked)
    trainer.optimizers["main"].eval()
    expected = weights_of(trainer)
    for name, value in evaluated[-1].items():
        torch.testing.assert_close(value, expected[name])
    trainer = train(tmp_path / "five", optimizer, *settings, "trainer.max_steps=5", hooks=[Unfreeze(2)], base=Marked)
    trainer.optimizers["main"].eval()
    for name, value in evaluated[0].items():
        torch.testing.assert_close(value, weights_of(trainer)[name])


class UnfreezeOnce(Hook):
    """Unfreezes the first layer for the third step only."""

    def after_step(self):
        if self.trainer.step in (2, 3):
            self.trainer.model.layers[0].requires_grad_(self.trainer.step == 2)


@pytest.mark.parametrize("accept_changes", [False, True])
def test_a_run_resumes_after_a_parameter_was_unfrozen_and_frozen_again(accept_changes, tmp_path):
    whole = train(tmp_path / "whole", hooks=[UnfreezeOnce()])
    train(tmp_path / "halves", "trainer.max_steps=4", hooks=[UnfreezeOnce()])
    halves = train(tmp_path / "halves", hooks=[UnfreezeOnce()], accept_changes=accept_changes)
    assert [each.requires_grad for each in halves.model.parameters()] == [False, False, True, True]
    assert len(halves.optimizers["main"].state) == 4
    for name, value in weights_of(halves).items():
        assert torch.equal(value, weights_of(whole)[name])


def test_freezing_more_has_an_effect_on_a_run_that_is_continued(tmp_path):
    first = train(tmp_path, "model.freeze=null", "trainer.max_steps=3")
    second = train(tmp_path, accept_changes=True)
    assert [each.requires_grad for each in second.model.parameters()] == [False, False, True, True]
    assert torch.equal(weights_of(first)["layers.0.weight"], weights_of(second)["layers.0.weight"])
    assert not torch.equal(weights_of(first)["layers.3.weight"], weights_of(second)["layers.3.weight"])


def test_a_parameter_with_settings_of_its_own_gets_a_group_that_is_resumed(tmp_path):
    schedule = "trainer.schedule={type: linear}"
    whole = train(tmp_path / "whole", schedule, hooks=[Unfreeze()], base=Marked)
    groups = whole.optimizers["main"].param_groups
    assert sorted((group["weight_decay"], *names_in(whole, group)) for group in groups) == [
        (0.0, "layers.0.weight"),
        (0.1, "layers.0.bias"),
        (0.1, "layers.3.weight", "layers.3.bias"),
    ]
    assert whole.context.updater.optimizers["main"].base_rates == [0.05, 0.025, 0.05]
    train(tmp_path / "halves", schedule, hooks=[Interrupt(4), Unfreeze()], base=Marked)
    halves = train(tmp_path / "halves", schedule, base=Marked)
    assert halves.context.updater.optimizers["main"].base_rates == [0.05, 0.025, 0.05]
    for name, value in weights_of(halves).items():
        assert torch.equal(value, weights_of(whole)[name])


def test_with_several_optimizers_match_decides(tmp_path):
    sections = {
        "weights": {"optimizer": {"type": "muon", "lr": 0.01}, "match": "*.weight"},
        "biases": {"optimizer": {"type": "sgd", "lr": 0.01}, "match": "*.bias"},
    }
    several = ("trainer.optimizer=null", f"trainer.optimizers={json.dumps(sections)}")
    trainer = train(tmp_path, *several, hooks=[Unfreeze()])
    names = {
        name: [each for group in one.param_groups for each in names_in(trainer, group)]
        for name, one in trainer.optimizers.items()
    }
    assert {name: sorted(each) for name, each in names.items()} == {
        "weights": ["layers.0.weight", "layers.3.weight"],
        "biases": ["layers.0.bias", "layers.3.bias"],
    }


def test_an_own_optimizer_of_several_groups_is_rejected_and_add_param_group_works(tmp_path):
    class Own(Trainer):
        @classmethod
        def build_optimizers(cls, build, model):
            trained = [each for each in model.parameters() if each.requires_grad]
            return torch.optim.AdamW([{"params": trained[:1]}, {"params": trained[1:]}], lr=0.05)

    class Add(Hook):
        def after_step(self):
            if self.trainer.step == 2:
                layer = self.trainer.model.layers[0].requires_grad_(True)
                self.trainer.optimizers["main"].add_param_group({"params": list(layer.parameters()), "lr": 0.01})

    trainer = build(tmp_path / "a", "trainer.optimizer=null", hooks=[Unfreeze()], base=Own)
    with raises(ConfigError, "layers.0.weight"):
        trainer.train()
    trainer = build(
        tmp_path / "b", "trainer.optimizer=null", "trainer.schedule={type: linear}", hooks=[Add()], base=Own
    )
    before = weights_of(trainer)
    trainer.train()
    assert not torch.equal(before["layers.0.weight"], weights_of(trainer)["layers.0.weight"])
    assert trainer.context.updater.optimizers["main"].base_rates == [0.05, 0.05, 0.01]


def test_a_parameter_that_is_frozen_during_the_run_stops_to_change(tmp_path):
    seen = []

    class Freeze(Hook):
        def after_step(self):
            layer = self.trainer.model.layers[3]
            if self.trainer.step == 2:
                layer.requires_grad_(False)
                self.trainer.model.layers[0].requires_grad_(True)
            seen.append(layer.weight.detach().clone())

    trainer = train(tmp_path, "trainer.max_steps=4", hooks=[Freeze()])
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], seen[3])
    resumed = build(tmp_path, "trainer.max_steps=6")
    assert [each.requires_grad for each in resumed.model.parameters()] == [True, True, False, False]
    resumed.train()
    assert torch.equal(seen[1], resumed.model.layers[3].weight)
    assert trainer.step == 4


def test_averages_include_what_was_unfrozen(tmp_path):
    trainer = train(tmp_path, "hooks=[ema]", hooks=[Unfreeze()], base=with_hooks())
    (ema,) = [hook for hook in trainer.hooks if type(hook).__name__ == "EMA"]
    assert "layers.0.weight" in ema.averages


@pytest.mark.parametrize(
    "freeze",
    [
        "{match: 'layers.0.*'}",
        "{match: 'layers.0.*', until: 3}",
        "{match: 'layers.0.*', until_step: 0}",
        "{until_step: 3}",
    ],
)
def test_a_wrong_entry_of_freeze_is_rejected(freeze, tmp_path):
    with raises(ConfigError, "model.freeze"):
        build(tmp_path, f"model.freeze={freeze}")
