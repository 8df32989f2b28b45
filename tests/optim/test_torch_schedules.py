"""Schedulers of torch as components, `reduce_on_plateau`, and rates that hooks write: each against torch's own loop."""

import json
import logging
from pathlib import Path

import pytest
import torch
from tests.messages import raises
from torch.optim import lr_scheduler

from trainwright import Hook, RunConfig, Trainer, build_trainer
from trainwright.errors import ConfigError

PROJECT = Path(__file__).parents[1] / "project"
SETTINGS = {
    "name": "run",
    "data": {"train": {"type": "parts.py:Points", "size": 16}},
    "model": {"type": "parts.py:Net"},
    "trainer": {"max_steps": 12, "global_batch_size": 8, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}},
    "log": {"every_steps": 1},
    "writers": ["json"],
}


def with_hooks(*hooks):
    class Hooked(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), *hooks]

    return Hooked


def build(folder, *overrides, hooks=(), settings=SETTINGS, **options):
    config = RunConfig.from_dict(settings, project_dir=PROJECT, overrides=[f"output_dir={folder}", *overrides])
    return build_trainer(config, with_hooks(*hooks), **options)


def train(folder, *overrides, **options):
    trainer = build(folder, *overrides, **options)
    trainer.train()
    return trainer


def lines_of(folder, name="run"):
    return [json.loads(line) for line in (folder / name / "metrics.json").read_text().splitlines()]


def rates_of(folder, key="lr"):
    return [line[key] for line in lines_of(folder) if key in line]


class ReadMomentum(Hook):
    def __init__(self):
        self.values = []

    def after_step(self):
        self.values.append(self.trainer.optimizers["main"].param_groups[0]["momentum"])


def rates_of_torch(make, *, num_steps=12, every=1, lr=0.1):
    """The rates and momenta of a plain loop."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=lr, momentum=0.9)
    scheduler = make(optimizer)
    rates, momenta = [], []
    for step in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        if (step + 1) % every == 0:
            scheduler.step()
    return rates, momenta


SCHEDULERS = {
    "StepLR": {"step_size": 3, "gamma": 0.5},
    "MultiStepLR": {"milestones": [2, 5, 5], "gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 8, "eta_min": 0.01},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 12},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 3},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 9},
    "LinearLR": {"total_iters": 4},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_and_momenta_are_those_of_torchs_loop_also_after_a_resume(name, tmp_path):
    schedule = json.dumps({"type": f"torch.optim.lr_scheduler:{name}", **SCHEDULERS[name]})
    expected = rates_of_torch(lambda optimizer: getattr(lr_scheduler, name)(optimizer, **SCHEDULERS[name]))
    momenta = ReadMomentum()
    train(tmp_path / "whole", f"trainer.schedule={schedule}", hooks=[momenta])
    assert rates_of(tmp_path / "whole") == pytest.approx(expected[0], rel=1e-12)
    assert momenta.values == pytest.approx(expected[1])

    class Leave(Hook):
        def after_step(self):
            if self.trainer.step == 5:
                self.trainer.interrupt("test")

    train(tmp_path / "halves", f"trainer.schedule={schedule}", hooks=[Leave()])
    train(tmp_path / "halves", f"trainer.schedule={schedule}")
    assert rates_of(tmp_path / "halves") == rates_of(tmp_path / "whole")
    losses = [[line["loss"] for line in lines_of(tmp_path / each)] for each in ("whole", "halves")]
    assert losses[0] == losses[1]


def test_a_schedule_may_be_stepped_once_per_epoch(tmp_path):
    schedule = "{type: 'torch.optim.lr_scheduler:StepLR', step_size: 2, gamma: 0.5, step_on: epoch}"
    train(tmp_path, f"trainer.schedule={schedule}")  # an epoch has two steps
    expected, _ = rates_of_torch(lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5), every=2)
    assert rates_of(tmp_path) == pytest.approx(expected)


def test_the_length_of_a_schedule_by_epochs_is_the_number_of_epochs(tmp_path):
    schedule = "trainer.schedule={type: 'torch.optim.lr_scheduler:CosineAnnealingLR', step_on: epoch}"
    train(tmp_path, schedule, "trainer.max_steps=null", "trainer.max_epochs=6")  # an epoch has two steps
    expected, _ = rates_of_torch(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6), every=2)
    assert rates_of(tmp_path) == pytest.approx(expected)
    with raises(ConfigError, "trainer.schedule", "T_max"):  # by max_steps alone it is not known
        train(tmp_path / "steps", schedule)


def test_the_length_of_a_schedule_is_that_of_the_run(tmp_path):
    train(tmp_path, "trainer.schedule={type: 'torch.optim.lr_scheduler:OneCycleLR', max_lr: 1.0}")
    expected, _ = rates_of_torch(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=12))
    assert rates_of(tmp_path) == pytest.approx(expected)


def test_nested_schedulers_and_functions_are_built(tmp_path):
    nested = {
        "type": "torch.optim.lr_scheduler:SequentialLR",
        "schedulers": [
            {"type": "torch.optim.lr_scheduler:LinearLR", "total_iters": 4},
            {"type": "torch.optim.lr_scheduler:LambdaLR", "lr_lambda": "parts.py:halve_rate"},
        ],
        "milestones": [4],
    }

    def make(optimizer):
        both = [lr_scheduler.LinearLR(optimizer, total_iters=4), lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)]
        return lr_scheduler.SequentialLR(optimizer, both, milestones=[4])

    train(tmp_path, f"trainer.schedule={json.dumps(nested)}")
    assert rates_of(tmp_path) == pytest.approx(rates_of_torch(make)[0])


PLATEAU = "{type: reduce_on_plateau, metric: valid/loss, factor: 0.5, patience: 1, threshold: 0.5, min_lr: 1e-3}"
EVALUATED = ("data.eval={valid: {type: 'parts.py:Points', size: 8, seed: 1}}", "evaluation.every_steps=1")


def test_reduce_on_plateau_has_the_rates_of_torch_also_after_a_resume(tmp_path):
    trainer = train(tmp_path / "whole", f"trainer.schedule={PLATEAU}", *EVALUATED)
    lines = lines_of(tmp_path / "whole")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.5, min_lr=1e-3)
    expected = []
    for line in lines:
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step(line["valid/loss"])
    assert [line["lr"] for line in lines] == expected
    assert expected[-1] < 0.1
    assert trainer.optimizers["main"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    train(tmp_path / "halves", f"trainer.schedule={PLATEAU}", *EVALUATED, "trainer.max_steps=5")
    train(tmp_path / "halves", f"trainer.schedule={PLATEAU}", *EVALUATED)
    assert rates_of(tmp_path / "halves") == expected


def test_the_rate_that_a_plateau_reduces_is_not_taken_for_one_that_a_hook_has_written(tmp_path, caplog):
    class Passive(Hook):
        def before_step(self): ...

        def after_eval(self, logs): ...

    train(tmp_path, f"trainer.schedule={PLATEAU}", *EVALUATED, hooks=[Passive()])
    assert rates_of(tmp_path)[-1] < 0.1
    assert "has written a learning rate" not in caplog.text


def test_torchs_class_follows_a_metric_too(tmp_path):
    schedule = PLATEAU.replace("reduce_on_plateau", "'torch.optim.lr_scheduler:ReduceLROnPlateau'")
    train(tmp_path / "a", f"trainer.schedule={PLATEAU}", *EVALUATED)
    train(tmp_path / "b", f"trainer.schedule={schedule}", *EVALUATED)
    assert rates_of(tmp_path / "a") == rates_of(tmp_path / "b")


@pytest.mark.parametrize(
    ("schedule", "overrides"),
    [
        ("{type: 'torch.optim.lr_scheduler:ReduceLROnPlateau'}", EVALUATED),
        (PLATEAU, ()),
        ("{type: 'torch.optim.lr_scheduler:StepLR', step_size: 2, metric: valid/loss}", EVALUATED),
        ("{type: 'torch.optim.lr_scheduler:StepLR', step_size: 2, step_on: batch}", ()),
        ("{type: 'torch.optim.lr_scheduler:StepLR'}", ()),
        ("{type: 'torch.optim.lr_scheduler:OneCycleLR', max_lr: 1.0, total_steps: 5}", ()),
        ("{type: reduce_on_plateau, metric: valid/loss, step_on: epoch}", EVALUATED),
        ("{type: reduce_on_plateau, metric: valid/loss, lr_lambda: 'missing.py:f'}", EVALUATED),
        ("{type: 'torch.optim.lr_scheduler:StepLR', step_size: 2, schedulers: [{type: linear}]}", ()),
    ],
)
def test_settings_without_effect_are_rejected(schedule, overrides, tmp_path):
    with raises(ConfigError, "trainer.schedule"):
        build(tmp_path, f"trainer.schedule={schedule}", *overrides)


def test_a_metric_that_no_evaluation_gives_is_rejected(tmp_path):
    trainer = build(tmp_path, f"trainer.schedule={PLATEAU.replace('valid/loss', 'valid/los')}", *EVALUATED)
    with raises(ConfigError, "trainer.schedule.metric"):
        trainer.train()


def test_a_one_cycle_schedule_cannot_be_extended_without_accepting_it(tmp_path):
    schedule = "trainer.schedule={type: 'torch.optim.lr_scheduler:OneCycleLR', max_lr: 1.0}"
    train(tmp_path, schedule, "trainer.max_steps=6")
    with raises(ConfigError, "total_steps"):
        build(tmp_path, schedule)
    train(tmp_path, schedule, accept_changes=True)
    expected, _ = rates_of_torch(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=12))
    assert rates_of(tmp_path)[6:] == pytest.approx(expected[6:])


class Write(Hook):
    """Multiplies the rates by 0.5 after the third step."""

    def after_step(self):
        if self.trainer.step == 3:
            for optimizer in self.trainer.optimizers.values():
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5


@pytest.mark.parametrize("overrides", [(), ("runtime.mode=graph",)])
def test_without_a_schedule_a_rate_that_a_hook_writes_stays_and_is_saved(overrides, tmp_path):
    train(tmp_path, "trainer.max_steps=5", *overrides, hooks=[Write()])
    assert rates_of(tmp_path) == pytest.approx([0.1] * 3 + [0.05] * 2)
    trainer = train(tmp_path, *overrides)
    assert rates_of(tmp_path) == pytest.approx([0.1] * 3 + [0.05] * 9)
    assert float(trainer.optimizers["main"].param_groups[0]["lr"]) == pytest.approx(0.05)


def test_rates_of_several_optimizers_and_groups_stay(tmp_path):
    sections = {
        "first": {
            "optimizer": {"type": "sgd", "lr": 0.1, "groups": [{"match": "*.bias", "lr": 0.01}]},
            "match": "layers.0.*",
        },
        "second": {"optimizer": {"type": "adamw", "lr": 0.001}, "match": "layers.3.*"},
    }
    several = ("trainer.optimizer=null", f"trainer.optimizers={json.dumps(sections)}")
    train(tmp_path, "trainer.max_steps=4", *several, hooks=[Write()])
    trainer = train(tmp_path, *several)
    rates = {name: [group["lr"] for group in each.param_groups] for name, each in trainer.optimizers.items()}
    assert rates == {"first": [0.05, 0.005], "second": [0.0005]}
    assert rates_of(tmp_path, "lr/second")[-1] == 0.0005


def test_a_rate_that_is_a_tensor_stays(tmp_path):
    class TensorRate(with_hooks(Write())):
        @classmethod
        def build_optimizers(cls, build, model):
            return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1, dtype=torch.float64), foreach=False)

    settings = {**SETTINGS, "trainer": {"max_steps": 6, "global_batch_size": 8}}
    for limit in (4, 6):
        overrides = [f"output_dir={tmp_path}", f"trainer.max_steps={limit}"]
        build_trainer(RunConfig.from_dict(settings, project_dir=PROJECT, overrides=overrides), TensorRate).train()
    assert rates_of(tmp_path) == pytest.approx([0.1] * 3 + [0.05] * 3)


@pytest.mark.parametrize("schedule", ["{type: cosine}", "{type: 'torch.optim.lr_scheduler:StepLR', step_size: 5}"])
def test_with_a_schedule_one_warning_names_the_hook_whose_rate_is_overwritten(schedule, tmp_path, caplog):
    class Repeated(Hook):
        def after_step(self):
            self.trainer.optimizers["main"].param_groups[0]["lr"] = 7.0

    with caplog.at_level(logging.WARNING):
        train(tmp_path, f"trainer.schedule={schedule}", hooks=[Repeated()])
    found = [each.getMessage() for each in caplog.records if "learning rate" in each.getMessage()]
    assert len(found) == 1
    assert "Repeated.after_step" in found[0]
    assert f"{Path(__file__).name}:" in found[0]
    if "cosine" in schedule:
        assert max(rates_of(tmp_path)) == 0.1


def test_a_rate_that_a_hook_writes_next_to_a_plateau_stays_without_a_warning(tmp_path, caplog):
    schedule = PLATEAU.replace("patience: 1", "patience: 50")
    train(tmp_path, f"trainer.schedule={schedule}", *EVALUATED, "trainer.max_steps=5", hooks=[Write()])
    assert rates_of(tmp_path) == pytest.approx([0.1] * 3 + [0.05] * 2)
    assert "has written a learning rate" not in caplog.text


def test_a_schedule_and_hooks_that_write_nothing_do_not_warn(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(tmp_path, "trainer.schedule={type: cosine}", "runtime.mode=graph", "trainer.max_steps=4", hooks=[Hook()])
        train(tmp_path, "trainer.schedule={type: cosine}", "runtime.mode=graph", hooks=[ReadMomentum()])
    assert not [each for each in caplog.records if "learning rate" in each.getMessage()]
