"""Runs whose config is a Python file, as LiBai's lazy configs: real classes, nothing built before the run is."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright import RunConfig, Trainer, build_trainer, load_checkpoint, run_experiment
from trainwright.cli import app

PROJECT = Path(__file__).parents[1] / "project"

RUN = """
from torch.optim import SGD

from common import optimizer
from parts import Net, Points
from trainwright import Component, Trainer


class Counting(Net):
    built = 0

    def __init__(self, width):
        type(self).built += 1
        super().__init__(width)


class Halving(Trainer):
    def forward(self, **batch):
        outputs = self.model(**batch)
        return outputs["loss"] / 2, {"halved": 1.0}


config = {
    "seed": 7,
    "model": Component(Counting, width=8),
    "data": {"train": Component(Points, size=50), "eval": {"valid": Component(Points, size=9, seed=1)}},
    "trainer": {"type": Halving, "max_steps": 4, "global_batch_size": 8, "optimizer": optimizer},
    "writers": ["json"],
    "runtime": {"device": "cpu"},
}
"""
COMMON = "from torch.optim import SGD\nfrom trainwright import Component\noptimizer = Component(SGD, lr=0.1)\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with run.py, the config file that it imports, and a file of parts; it is the current one."""
    shutil.copy(PROJECT / "parts.py", tmp_path)
    (tmp_path / "run.py").write_text(RUN, "utf-8")
    (tmp_path / "common.py").write_text(COMMON, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_a_python_config_trains_from_the_command_line_with_overrides(project):
    done = invoke("train", "run.py", "trainer.max_steps=2", "trainer.optimizer.lr=0.05", "model.width=16")
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (project / "runs/run/metrics.json").read_text().splitlines()]
    assert (lines[-1]["step"], lines[-1]["halved"], lines[-1]["lr"]) == (2, 1.0, 0.05)
    assert load_checkpoint(project / "runs/run").layers[0].out_features == 16


def test_nothing_is_built_until_the_run_is(project):
    config = RunConfig.load("run.py")
    files = {getattr(each, "__file__", None): each for each in list(sys.modules.values())}
    module = files[str(project / "run.py")]
    assert module.Counting.built == 0
    trainer = build_trainer(config)
    assert module.Counting.built == 1
    assert type(trainer.model) is module.Counting  # the file is not run once more for its classes
    assert type(trainer) is module.Halving


def test_the_saved_config_loads_back_equal_and_names_the_classes(project, monkeypatch):
    config = RunConfig.load("run.py", ["trainer.max_steps=1"])
    config.save("saved.yaml")
    monkeypatch.chdir("/")
    saved = RunConfig.load(project / "saved.yaml")
    assert saved == config
    types = [saved.model.type, saved.data.train.type, saved.trainer.type, saved.trainer.optimizer.type]
    assert types == ["run.py:Counting", "parts.py:Points", "run.py:Halving", "torch.optim.sgd:SGD"]


def test_a_run_s_own_config_is_that_of_the_file_with_its_derived_values(project):
    run_experiment(RunConfig.load("run.py", ["trainer.max_steps=1"]))
    derived = ["trainer.max_steps=1", "trainer.micro_batch_size=8", "runtime.precision=fp32"]
    config = RunConfig.load("run.py", derived)
    assert RunConfig.load(project / "runs/run/config.yaml") == config


def test_the_same_command_again_resumes(project):
    assert invoke("train", "run.py", "trainer.max_steps=2").exit_code == 0
    assert invoke("train", "run.py", "trainer.max_steps=4").exit_code == 0
    whole = RunConfig.load("run.py", ["name=whole"])
    _, logs = run_experiment(whole)
    assert run_experiment(RunConfig.load("run.py"), mode="eval")[1] == logs


def test_a_python_config_of_parts_alone_is_evaluated_from_its_run_folder(project, monkeypatch):
    text = RUN.replace("Component(Counting, width=8)", "Component(Net)").replace('"type": Halving, ', "")
    (project / "run.py").write_text(text, "utf-8")
    _, logs = run_experiment(RunConfig.load("run.py"))
    monkeypatch.chdir("/")
    done = invoke("evaluate", project / "runs/run")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == logs


def test_a_config_is_a_plain_dict_that_another_file_changes(project):
    text = (
        "from run import config as base\nconfig = {**base, 'seed': 8, 'trainer': {**base['trainer'], 'max_steps': 1}}"
    )
    (project / "other.py").write_text(text, "utf-8")
    config = RunConfig.load("other.py")
    assert (config.name, config.seed, config.trainer.max_steps) == ("other", 8, 1)
    trainer = build_trainer(config)
    assert isinstance(trainer, Trainer)
    assert type(trainer).__name__ == "Halving"


def test_a_wrong_setting_names_the_line_of_the_python_file(project):
    (project / "run.py").write_text(RUN.replace('"writers"', '"writer"'), "utf-8")
    line = next(number for number, text in enumerate(RUN.splitlines(), 1) if '"writers"' in text)
    done = invoke("train", "run.py")
    assert done.exit_code != 0
    assert str(done.exception).startswith(f'run.py:{line}: writer: there is no such setting. Did you mean "writers"?')


def test_a_wrong_argument_of_a_class_names_the_line_of_its_component(project):
    (project / "run.py").write_text(RUN.replace("width=8", "widht=8"), "utf-8")
    line = next(number for number, text in enumerate(RUN.splitlines(), 1) if "width=8" in text)
    done = invoke("train", "run.py")
    assert str(done.exception).startswith(f'run.py:{line}: model: Counting has no argument "widht".')
