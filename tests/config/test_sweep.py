"""The settings of a sweep, and what is wrong with them: with the line of the sweep's file."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.messages import raises

from trainwright.config.sweep import SweepConfig
from trainwright.errors import ConfigError

RUN = Path(__file__).parents[1] / "project" / "run.yaml"
SWEEP = f"""run: {RUN}
overrides: [trainer.max_steps=10]
metric: valid/loss
trials: 4
parameters:
  trainer.optimizer.lr: {{min: 1e-5, max: 1e-1, scale: log}}
  model.width: [4, 8]
"""


@pytest.fixture
def load(in_tmp):
    def load(text=SWEEP, *overrides):
        Path("lr.yaml").write_text(text, "utf-8")
        return SweepConfig.load("lr.yaml", overrides)

    return load


def test_a_sweep_has_its_run_a_name_and_defaults(load):
    sweep = load()
    assert (sweep.name, sweep.folder, sweep.num_trials) == ("lr", Path("runs/lr"), 4)
    assert (sweep.sampler.type, sweep.pruner, sweep.parallel, sweep.mode) == ("tpe", None, "auto", "min")
    assert sweep.base.trainer.max_steps == 10
    assert sweep.trial_overrides({"model.width": 8, "trainer.optimizer.lr": 1e-4}, "lr/trial-0000") == [
        "trainer.max_steps=10",
        "model.width=8",
        "trainer.optimizer.lr=0.0001",
        "checkpoint.keep_best={metric: valid/loss, mode: min}",
        "name=lr/trial-0000",
    ]
    with pytest.raises(ValueError, match="frozen"):
        sweep.trials = 5


def test_overrides_replace_settings_of_the_sweep(load):
    sweep = load(SWEEP, "trials=7", "sampler=random", "pruner={type: percentile, percentile: 50}")
    assert (sweep.num_trials, sweep.sampler.type, sweep.pruner.percentile) == (7, "random", 50)


def test_a_grid_has_every_combination_and_the_last_parameter_changes_fastest(load):
    grid = "parameters={model.width: [4, 8], trainer.max_steps: {min: 1, max: 5, step: 2}, seed: {min: 0, max: 1}}"
    sweep = load(SWEEP.replace("trials: 4\n", ""), "sampler=grid", grid)
    assert sweep.num_trials == 12
    points = [tuple(sweep.grid_point(number).values()) for number in range(12)]
    assert points[:3] == [(4, 1, 0), (4, 1, 1), (4, 3, 0)]
    assert len(set(points)) == 12
    assert load(SWEEP, "sampler=grid", grid).num_trials == 4


def test_a_choice_may_be_a_component(load):
    sweep = load(SWEEP, "parameters={trainer.optimizer: [{type: lion, lr: 1e-4}, {type: adamw, lr: 1e-3}]}")
    values = {"trainer.optimizer": sweep.parameters["trainer.optimizer"][0]}
    assert sweep.trial_overrides(values, "x")[1] == "trainer.optimizer={type: lion, lr: 0.0001}"


@pytest.mark.parametrize(
    ("changes", "line", "mentions"),
    [
        ({"trials: 4": "trails: 4"}, 4, ("trails", "trials")),
        ({"trials: 4": "trials: 0"}, 4, ("trials",)),
        ({"trials: 4": "trials:"}, 4, ("trials", "tpe")),
        ({"valid/loss": "vald/loss"}, 3, ("vald", "valid")),
        ({"valid/loss": "loss"}, 3, ("valid/loss",)),
        ({"trials: 4": "sampler: annealing"}, 4, ("annealing",)),
        ({"trials: 4": "sampler: {type: grid, seed: 1}"}, 4, ("seed",)),
        ({"trials: 4": "sampler: grid"}, 6, ("trainer.optimizer.lr", "step")),
        ({"trials: 4": "trials: 4\npruner: {type: median, percentile: 3}"}, 5, ("percentile", "median")),
        ({"trials: 4": "parallel: 0"}, 4, ("parallel",)),
        ({"min: 1e-5": "min: 1"}, 6, ("empty",)),
        ({"min: 1e-5": "min: 0"}, 6, ("log",)),
        ({"scale: log": "scale: log, step: 0.1"}, 6, ("step",)),
        ({"scale: log": "scael: log"}, 6, ("scael", "scale")),
        ({"trainer.optimizer.lr": "trainer.optimzer.lr"}, 6, ("optimzer", "optimizer")),
        ({"model.width: [4, 8]": "trainer.max_steps: [4, many]"}, 7, ("many",)),
        ({"model.width: [4, 8]": "model.width: []"}, 7, ("no values",)),
        ({"model.width: [4, 8]": "model.width: [4, 4]"}, 7, ("twice",)),
        ({"model.width: [4, 8]": "model.width: 4"}, 7, ("model.width",)),
        ({"model.width: [4, 8]": "model: {width: [4, 8]}"}, 7, ("model.width",)),
        ({"model.width: [4, 8]": "trainer.optimizer: [adamw]"}, 6, ("trainer.optimizer",)),
        ({"model.width: [4, 8]": "name: [a, b]"}, 7, ("name",)),
        ({str(RUN): "no.yaml"}, 1, ("no.yaml",)),
        ({"trials: 4": "name: ../up"}, 4, ("../up",)),
    ],
)
def test_a_wrong_setting_is_named_with_its_line(load, changes, line, mentions):
    text = SWEEP
    for before, after in changes.items():
        text = text.replace(before, after)
    with raises(ConfigError, *mentions, at=f"lr.yaml:{line}"):
        load(text)


def test_an_error_of_the_run_names_the_file_of_the_run(load):
    Path("bad.yaml").write_text("trainer:\n  max_step: 3\n", "utf-8")
    with raises(ConfigError, "max_steps", at="bad.yaml:2"):
        load(SWEEP.replace(str(RUN), "bad.yaml"))


def test_files_without_settings_are_rejected(load):
    with raises(ConfigError, "run", at="lr.yaml:1"):
        load("")
    with raises(ConfigError, "parameters", "metric", "run"):
        load("name: x\n")
    with raises(ConfigError, at="lr.yaml:1"):
        SweepConfig.load(RUN.with_name("lr.yaml"))


def test_reading_a_sweep_imports_neither_torch_nor_optuna(load):
    load()
    program = (
        "import sys; import trainwright.commands.sweep; from trainwright.config.sweep import SweepConfig; "
        "SweepConfig.load('lr.yaml'); assert not {'torch', 'numpy', 'optuna'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
