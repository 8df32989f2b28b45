"""Python configs, overrides and flags of the command line: what is wrong is blamed where it was written."""

import json

import pytest
from tests.api.mistakes import rejection
from tests.messages import mentions
from typer.testing import CliRunner

from trainwright import RunConfig
from trainwright.cli import app
from trainwright.errors import TrainwrightError

PARTS = """
import torch


class Net(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = torch.nn.Linear(1, width)

    def forward(self, x, labels=None):
        return {"loss": self.layers(x).square().mean()}


class Points:
    def __init__(self, size=20):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": torch.ones(1) * index}


class Twice(Points):
    def __init__(self, source):
        self.source = source
"""
RUN = """
from parts import Net, Points
from trainwright import Component

config = {
    "model": Component(Net, width=4),
    "data": {
        "train": Component(Points, size=20),
        "eval": {"valid": Component(Points, size=4)},
    },
    "trainer": {
        "max_steps": 2,
        "global_batch_size": 4,
        "optimizer": Component("adamw", lr=0.1),
    },
    "writers": ["json"],
    "runtime": {"device": "cpu"},
}
"""


@pytest.fixture(autouse=True)
def project(in_tmp):
    """The current folder, with run.py and its parts."""
    (in_tmp / "parts.py").write_text(PARTS, "utf-8")
    (in_tmp / "run.py").write_text(RUN, "utf-8")
    return in_tmp


def answer(*words):
    """What the command says of a mistake; None where it made none."""
    done = CliRunner().invoke(app, ["train", *words])
    assert done.exception is None or isinstance(done.exception, TrainwrightError), done.output
    return None if done.exception is None else str(done.exception)


def line_of(text):
    return next(number for number, line in enumerate(RUN.splitlines(), 1) if text in line)


# overrides


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.widht=5", 'model: Net has no argument "widht".'),
        ("model.width=abc", "model: parts.py:Net could not be built: TypeError"),
        ("data.train.sizee=5", 'data.train: Points has no argument "sizee".'),
        ("data.eval.valid.sizee=5", 'data.eval.valid: Points has no argument "sizee".'),
        ("trainer.optimizer.lrr=1", 'trainer.optimizer: AdamW has no argument "lrr".'),
        ("trainer.micro_batch_size=3", "trainer.global_batch_size: 4 is not micro_batch_size 3"),
        ("trainer.global_batch_size=100", "trainer.global_batch_size: 100 is more than the 20 samples"),
    ],
)
def test_a_wrong_override_is_blamed_and_not_the_file(override, problem):
    assert answer("run.py", override).startswith(f"override {override}: {problem}")


def test_a_wrong_override_inside_of_a_nested_component_is_blamed(project):
    text = RUN.replace("Component(Points, size=20)", "Component(Twice, source=Component(Points, size=20))")
    (project / "run.py").write_text(text.replace("Net, Points", "Net, Points, Twice"), "utf-8")
    text = answer("run.py", "data.train.source.sizee=5")
    assert text.startswith('override data.train.source.sizee=5: data.train.source: Points has no argument "sizee".')


def test_what_the_file_has_wrong_is_blamed_on_its_line(project):
    wrong = RUN.replace("Component(Points, size=20)", "Component(Points, sizee=20)")
    (project / "run.py").write_text(wrong, "utf-8")
    text = answer("run.py", "model.width=3")
    assert text.startswith(f"run.py:{line_of('size=20')}: data.train: Points has no argument")


def test_an_argument_of_its_own_line_in_yaml_is_blamed_there(project):
    text = "model: parts.py:Net\ndata:\n  train:\n    type: parts.py:Points\n    sizee: 5\ntrainer: {max_steps: 1}\n"
    (project / "run.yaml").write_text(text, "utf-8")
    assert answer("run.yaml").startswith('run.yaml:5: data.train: Points has no argument "sizee".')


# Python configs


@pytest.mark.parametrize("others", ["", "name = 'mine'\nseed = 3\n"])
def test_settings_under_another_name_than_config_are_pointed_out(project, others):
    (project / "run.py").write_text(others + RUN.replace("config =", "cfg ="), "utf-8")
    line = others.count("\n") + line_of("config =")
    text = answer("run.py")
    assert text == f"run.py:{line}: cfg: has settings, but only the variable config is read. Rename it to config."


def test_a_file_of_sections_may_have_other_variables(project):
    (project / "run.py").write_text(RUN.replace("config =", "base =") + "\nmodel = base['model']\n", "utf-8")
    assert RunConfig.load("run.py").model.width == 4


def test_a_script_without_a_config_is_named_with_what_to_define(project):
    (project / "run.py").write_text("name = 'mine'\n", "utf-8")
    text = answer("run.py")
    assert text.startswith("run.py:1: model is required")
    assert mentions(text, "config", "model")


def test_a_run_without_data_names_its_file(project):
    (project / "run.yaml").write_text("\nmodel: {type: parts.py:Net}\ntrainer: {max_steps: 1}\n", "utf-8")
    assert answer("run.yaml").startswith("run.yaml:1: data.train is required")


def test_a_value_that_cannot_be_saved_names_its_own_line(project):
    (project / "run.py").write_text(RUN.replace('"max_steps": 2', '"max_steps": object'), "utf-8")
    assert answer("run.py").startswith(f"run.py:{line_of('max_steps')}: trainer.max_steps: a type cannot be saved")


def test_numbers_of_numpy_are_numbers_in_a_python_config(project):
    text = RUN.replace("width=4", "width=np.int64(4)").replace('"max_steps": 2', '"max_steps": np.int32(2)')
    text = text.replace("lr=0.1", "lr=np.float32(0.5), fused=np.bool_(False)")
    (project / "run.py").write_text("import numpy as np\n" + text, "utf-8")
    config = RunConfig.load("run.py")
    values = (config.model.width, config.trainer.max_steps, config.trainer.optimizer.lr, config.trainer.optimizer.fused)
    assert values == (4, 2, 0.5, False)
    assert [type(each) for each in values] == [int, int, float, bool]
    config.save("saved.yaml")
    assert RunConfig.load("saved.yaml") == config


def test_numbers_of_numpy_are_numbers_in_a_dict():
    np = pytest.importorskip("numpy")
    assert RunConfig.from_dict({"seed": np.int64(3)}).seed == 3
    assert RunConfig.from_dict({}).derive({"trainer.max_steps": np.uint8(3)}).trainer.max_steps == 3
    fraction = pytest.importorskip("fractions").Fraction(1, 3)
    assert "a Fraction cannot be saved" in rejection(RunConfig.from_dict, {"trainer": {"max_grad_norm": fraction}})


# flags without effect


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--eval-only", "--fresh"], "--fresh: has no effect, because --mode eval trains nothing."),
        (
            ["--mode", "eval", "--accept-changes"],
            "--accept-changes: has no effect, because --mode eval",
        ),
        (
            ["--mode", "continuous_eval", "--fresh"],
            "--fresh: has no effect, because --mode continuous_eval trains nothing.",
        ),
        (["--timeout", "3"], "--timeout: has no effect, because only --mode continuous_eval waits for checkpoints"),
        (["--eval-only", "--timeout", "3"], "--timeout: has no effect"),
        (
            ["--fast-dev-run", "--model-dir", "x"],
            "--model-dir: has no effect, because --fast-dev-run",
        ),
        (["--fast-dev-run", "--fresh"], "--fresh: has no effect, because --fast-dev-run"),
        (["--fast-dev-run", "--resume"], "--resume: has no effect, because --fast-dev-run"),
        (["--fast-dev-run", "--accept-changes"], "--accept-changes: has no effect, because --fast-dev-run"),
        (["--quiet", "--verbose"], "--quiet shows less and --verbose shows more. Use one of the two."),
    ],
)
def test_a_flag_without_effect_is_rejected(project, words, problem):
    assert answer("run.py", *words).startswith(problem)
    assert not (project / "runs").exists()


def test_eval_only_with_resume_evaluates_the_newest_checkpoint_as_libai_does(project):
    assert answer("run.py") is None
    done = CliRunner().invoke(app, ["train", "run.py", "--eval-only", "--resume"])
    assert json.loads(done.stdout).keys() == {"valid/loss"}


# evaluate


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["run.py", "--step", "newest"], "--step: 'newest' is not a checkpoint. Use latest, best or a number."),
        (["."], ". is not a run folder: it has no config.yaml. Pass a YAML file or runs/NAME."),
    ],
)
def test_evaluate_rejects_wrong_arguments(words, problem):
    assert str(CliRunner().invoke(app, ["evaluate", *words]).exception) == problem
