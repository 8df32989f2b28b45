"""Values that an optimizer's settings cannot have are rejected by name, value and place: its own and its groups'."""

from pathlib import Path

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright import RunConfig, build_trainer
from trainwright.analysis.check import check_run
from trainwright.errors import ConfigError
from trainwright.optim.adamw import AdamW
from trainwright.optim.muon import Muon
from trainwright.optim.param_groups import check_settings, reject_impossible

PROJECT = Path(__file__).parents[1] / "project" / "run.yaml"


def rejection(optimizer, *overrides):
    with pytest.raises(ConfigError) as caught:
        build_trainer(RunConfig.load(PROJECT, [f"trainer.optimizer={optimizer}", *overrides]))
    assert "override trainer.optimizer=" in str(caught.value)
    return caught.value.problem


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("type: adamw, lr: 0", "lr: must be a number above 0, got 0. To keep parameters"),
        ("type: adamw, lr: -1", "lr: must be a number above 0, got -1."),
        ("type: adamw, lr: .nan", "lr: must be a number above 0, got nan."),
        ("type: adamw, lr: true", "lr: must be a number, got True."),
        ("type: adamw, lr: null", "lr: must be a number, got None."),
        ("type: adamw, betas: [1, 2]", "betas: must be a list of numbers from 0 to below 1, got [1, 2]."),
        ("type: adamw, betas: 0.9", "betas: must be a list of 2, got 0.9."),
        ("type: adamw, betas: [a, 0.9]", "betas: must be a list of 2 numbers, got ['a', 0.9]."),
        ("type: adamw, eps: 0", "eps: must be a number above 0, got 0."),
        ("type: adamw, weight_decay: -0.1", "weight_decay: must be a number of at least 0, got -0.1."),
        ("type: adamw, amsgrad: 'yes'", "amsgrad: must be true or false, got the text 'yes'."),
        ("type: adamw, params: [1]", "params: is derived from the model and cannot be set in a run file."),
        ("type: sgd, lr: 1, momentum: 1.5", "momentum: must be a number from 0 to below 1, got 1.5."),
        ("type: lion, betas: [0.9, 1.0]", "betas: must be a list of numbers from 0 to below 1, got [0.9, 1.0]."),
        ("type: muon, adamw_eps: -1", "adamw_eps: must be a number above 0, got -1."),
        ("type: muon, ns_steps: 2.5", "ns_steps: must be a number that is whole and at least 1, got 2.5."),
        ("type: muon, ns_steps: .inf", "ns_steps: must be a number that is whole and at least 1, got inf."),
        ("type: muon, ns_steps: .nan", "ns_steps: must be a number that is whole and at least 1, got nan."),
        ("type: muon, kinds: {a: matrix}", "kinds: is derived from the model and cannot be set in a run file."),
        ("type: muon, adjust_lr_fn: [a]", "adjust_lr_fn: must be text, got ['a']."),
        ("type: 'torch.optim:Adam', betas: [1, 2]", "betas: must be a list of numbers from 0 to below 1, got [1, 2]."),
    ],
)
def test_the_optimizer_s_own_settings(settings, problem):
    assert rejection(f"{{{settings}}}").startswith(f"trainer.optimizer.{problem}")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("betas: [1, 2]", "betas: must be a list of numbers from 0 to below 1, got [1, 2]."),
        ("betas: [a, b]", "betas: must be a list of 2 numbers, got ['a', 'b']."),
        ("eps: -1", "eps: must be a number above 0, got -1."),
        ("lr: 0", "lr: must be a number above 0, got 0. To keep parameters"),
        ("weight_decay: .inf", "weight_decay: must be a number of at least 0, got inf."),
    ],
)
def test_the_settings_of_a_group(settings, problem):
    found = rejection(f"{{type: adamw, lr: 0.1, groups: [{{match: '*.bias', {settings}}}]}}")
    assert found.startswith(f"trainer.optimizer.groups.0.{problem}")


def test_what_only_the_constructor_rejects_has_its_place_too():
    assert rejection("{type: adamw, state_dtype: [fp32]}").startswith("trainer.optimizer: state_dtype is ['fp32']")


def test_each_setting_of_a_file_is_rejected_in_its_own_line_and_by_check_as_well(tmp_path):
    text = PROJECT.read_text().replace(
        "optimizer: {type: adamw, lr: 1e-2}",
        "optimizer:\n    type: adamw\n    groups:\n      - match: '*.bias'\n        betas: [1, 2]",
    )
    (tmp_path / "parts.py").write_text((PROJECT.parent / "parts.py").read_text())
    file = tmp_path / "run.yaml"
    file.write_text(f"{text}output_dir: {tmp_path}\n")
    line = text[: text.index("betas")].count("\n") + 1
    with pytest.raises(ConfigError) as caught:
        build_trainer(RunConfig.load(file))
    assert str(caught.value).partition(": trainer.")[0].endswith(f"run.yaml:{line}")
    [finding] = check_run(file).findings
    assert finding.problem.startswith("trainer.optimizer.groups.0.betas: must be a list of numbers from 0 to below 1")
    assert finding.location.line == line


class Theirs(torch.optim.SGD):
    """A user's optimizer: its rate may be left to it, and its values have the form that they like."""

    def __init__(self, params, lr=None, warmup=0, betas=(0.9, 0.99, 0.999)):
        super().__init__(params, lr=lr or 0.1)


Theirs.__module__ = "mine"


def check(target, **settings):
    check_settings(target, settings, label="trainer.optimizer")


def test_a_user_s_optimizer_is_asked_only_what_all_optimizers_share():
    check(Theirs, lr=None, warmup="auto", betas=[0.5])
    with raises(ConfigError, "trainer.optimizer.betas", "1.5"):
        check(Theirs, betas=[1.5])
    with raises(ConfigError, "fast", "0"):
        check(Theirs, lr="fast")


def test_what_torch_takes_passes():
    check(AdamW, lr=1, betas=[0, 0.5], eps=1e-12, weight_decay=0, fused=None)
    check(Muon, exclude="*.gate", adamw_lr=None, ns_coefficients=[1, 2.5, 3])
    check(torch.optim.Adafactor, eps=[None, 1e-3])
    check(torch.optim.SGD, lr=0.1, momentum=0)


def test_python_takes_a_rate_of_zero_and_tensors_as_torch_does():
    reject_impossible(lr=0.0, betas=(0.0, 0.9), adamw_lr=None, anything="else")
    reject_impossible(lr=torch.tensor(0.1))
    with raises(ConfigError, "0", "1"):
        Muon([nn.Parameter(torch.ones(2, 2))], lr=-1)
