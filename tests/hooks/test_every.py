"""A function every n steps."""

from pathlib import Path

import pytest
from tests.messages import raises

from trainwright import Every, RunConfig, Trainer, build_trainer
from trainwright.errors import ComponentError, ConfigError

PROJECT = Path(__file__).parents[1] / "project"


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=7", *overrides])


def test_it_is_called_after_each_step_that_n_divides(tmp_path):
    steps = []

    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Every(3)(lambda trainer: steps.append(trainer.step))]

    build_trainer(load(tmp_path), Mine).train()
    assert steps == [3, 6]


def test_it_decorates_a_function():
    @Every(2)
    def act(trainer):
        pass

    assert act.steps == 2


def test_a_file_names_the_function(tmp_path):
    (tmp_path / "parts.py").write_text((PROJECT / "parts.py").read_text())
    (tmp_path / "run.yaml").write_text((PROJECT / "run.yaml").read_text())
    (tmp_path / "acts.py").write_text(
        "def note(trainer):\n"
        "    with open(trainer.folder / 'noted', 'a') as file:\n"
        "        print(trainer.step, file=file)\n"
    )
    hook = "hooks=[{type: every, steps: 2, call: acts.py:note}]"
    config = RunConfig.load(tmp_path / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=7", hook])
    build_trainer(config).train()
    assert (tmp_path / "small" / "noted").read_text().split() == ["2", "4", "6"]


def test_a_function_that_is_not_there_is_named(tmp_path):
    config = load(tmp_path, "hooks=[{type: every, steps: 2, call: parts.py:missing}]")
    with raises(ComponentError):
        build_trainer(config)


@pytest.mark.parametrize("steps", [0, -1, 2.5, "2"])
def test_only_a_whole_positive_number_of_steps_is_taken(steps):
    with raises(ConfigError):
        Every(steps)
