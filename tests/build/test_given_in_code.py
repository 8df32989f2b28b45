"""A trainer or a task that is given in code: the run's config.yaml names it, or says what to pass again."""

from pathlib import Path

import pytest
import torch
from tests.forked_program import run_script
from tests.messages import mentions, raises

from trainwright import RunConfig, Task, Trainer, build_trainer, load_checkpoint, run_experiment
from trainwright.build.run import build_evaluator, recorded
from trainwright.errors import CheckpointError, ConfigError
from trainwright.trainers.classification import ClassificationTrainer

PROJECT = Path(__file__).parents[1] / "project"


class Marked(Trainer):
    """Evaluates to a value that no other trainer has."""

    def eval_end(self, aggregated):
        return {**super().eval_end(aggregated), "marked": 7.0}


class Bare(Task):
    """A task without a constructor."""

    def aggregate_logs(self, state, outputs):
        return (state or 0) + 1

    def reduce_aggregated_logs(self, state, step):
        return {"batches": float(state)}


class Sized(Bare):
    """A task with a constructor argument that no config has."""

    def __init__(self, size):
        self.size = size

    def build_model(self):
        return torch.nn.Linear(4, 1)

    def forward(self, model, batch):
        return (model(batch["x"])[:, 0] - self.size).square().mean()


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=2", *overrides])


def saved(tmp_path):
    """The config as `trainwright evaluate RUN` reads it."""
    return RunConfig.load(tmp_path / "small" / "config.yaml")


def local_class():
    class Local(Marked):
        """A class that no other process can import."""

    return Local


def test_a_trainer_given_in_code_evaluates_its_run_from_the_folder_alone(tmp_path):
    _, logs = run_experiment(load(tmp_path), trainer=Marked)
    assert logs["valid/marked"] == 7.0
    assert run_experiment(saved(tmp_path), mode="eval")[1] == logs


def test_a_run_does_not_resume_with_another_trainer(tmp_path):
    run_experiment(load(tmp_path), trainer=Marked)
    with raises(CheckpointError, "trainer.type"):
        run_experiment(load(tmp_path, "trainer.max_steps=3"))
    run_experiment(load(tmp_path, "trainer.max_steps=3"), trainer=Marked)
    assert saved(tmp_path).trainer.max_steps == 3


def test_a_trainer_given_to_build_trainer_is_reported_and_may_change(tmp_path, caplog):
    """The config is the caller's own: nothing is written into it, and nothing is rejected."""
    assert build_trainer(load(tmp_path), local_class()).config.trainer.type == "trainer"
    build_trainer(load(tmp_path), local_class()).train()
    assert run_experiment(saved(tmp_path), mode="eval")[1].keys() == {"valid/loss", "valid/accuracy"}
    assert mentions(caplog.text, "tests.build.test_given_in_code.local_class.<locals>.Local")
    caplog.clear()
    run_experiment(saved(tmp_path), mode="eval", trainer=local_class())
    build_trainer(load(tmp_path, "trainer.max_steps=3")).train()  # continues without it, and it is no longer reported
    run_experiment(saved(tmp_path), mode="eval")
    assert "was trained with" not in caplog.text


def test_a_trainer_that_cannot_be_imported_is_rejected_by_name_but_the_model_can_be_loaded(tmp_path):
    _, logs = run_experiment(load(tmp_path), trainer=local_class())
    with raises(ConfigError, "local_class.<locals>.Local"):
        run_experiment(saved(tmp_path), mode="eval")
    with raises(CheckpointError, "trainer.type", "local_class.<locals>.Local"):
        run_experiment(load(tmp_path, "trainer.max_steps=3"))
    assert run_experiment(saved(tmp_path), mode="eval", trainer=local_class())[1] == logs
    assert run_experiment(load(tmp_path), trainer=local_class())[1] == logs  # the same run, which has ended
    assert isinstance(load_checkpoint(tmp_path / "small"), torch.nn.Module)


def test_a_model_that_only_such_a_trainer_builds_cannot_be_loaded(tmp_path):
    class Makes(Trainer):
        @classmethod
        def build_model(cls, build):
            return build.model()

    run_experiment(load(tmp_path), trainer=Makes)
    with raises(ConfigError):
        load_checkpoint(tmp_path / "small")


def test_a_task_without_a_constructor_is_found_again(tmp_path):
    _, logs = run_experiment(load(tmp_path), task=Bare())
    assert logs["valid/batches"] > 1
    assert run_experiment(saved(tmp_path), mode="eval")[1] == logs
    assert run_experiment(load(tmp_path), task=Bare())[1] == logs
    assert run_experiment(saved(tmp_path), task=Bare())[1] == logs


def test_a_task_with_constructor_arguments_is_rejected_by_name(tmp_path):
    config = load(tmp_path, "model=null", "evaluation.metrics={}")
    _, logs = run_experiment(config, task=Sized(3))
    with raises(ConfigError):
        run_experiment(saved(tmp_path), mode="eval")
    with raises(ConfigError):
        load_checkpoint(tmp_path / "small")
    assert run_experiment(saved(tmp_path), mode="eval", task=Sized(3))[1] == logs


def test_evaluating_by_another_trainer_than_the_run_s_says_so(tmp_path, caplog):
    run_experiment(load(tmp_path), trainer=Marked)
    run_experiment(load(tmp_path), mode="eval", trainer=Marked)
    assert "was trained with" not in caplog.text
    run_experiment(load(tmp_path), mode="eval")
    assert "Marked, but is evaluated with trainer" in caplog.text


def test_a_run_of_a_built_trainer_is_evaluated_by_its_class_without_a_warning(tmp_path, caplog):
    config = load(tmp_path)
    run_experiment(config, trainer=build_trainer(config, Marked))
    for build in (build_evaluator, build_trainer):
        run_experiment(config, mode="eval", trainer=build(config, Marked))
    assert "was trained with" not in caplog.text
    run_experiment(config, mode="eval", trainer=build_evaluator(config))
    assert "Marked, but is evaluated with trainer" in caplog.text


def test_a_config_that_names_the_class_does_not_change(tmp_path):
    config = load(tmp_path)
    assert recorded(config, Trainer) is config
    assert recorded(config, None, Task()) is config
    own = load(tmp_path, "trainer.type=classification")
    assert recorded(own, ClassificationTrainer) is own
    assert recorded(config, ClassificationTrainer).trainer.type == "classification"
    once = recorded(config, local_class(), Sized(1))
    assert recorded(once, local_class(), Sized(2)) == once
    assert recorded(once, Marked).trainer.type == "tests.build.test_given_in_code:Marked"


def test_a_built_trainer_belongs_to_its_config(tmp_path):
    config = load(tmp_path)
    trainer = build_trainer(config, Marked)
    assert run_experiment(config, trainer=trainer)[1]["valid/marked"] == 7.0


PROGRAM = """
from trainwright import RunConfig, Trainer, run_experiment

class Mine(Trainer):
    def eval_end(self, aggregated):
        return {{"mine": 1.0}}

{guard}
    run_experiment(RunConfig.load({file!r}, ["output_dir={folder}", "trainer.max_steps=1"]), trainer=Mine)
"""


@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', "if True:"])
def test_a_trainer_of_the_main_program_is_found_again_unless_importing_it_would_run_it(tmp_path, guard):
    program = tmp_path / "driver.py"
    program.write_text(PROGRAM.format(guard=guard, file=str(PROJECT / "run.yaml"), folder=tmp_path), "utf-8")
    done = run_script(program)
    assert done.returncode == 0, done.stderr
    if "__main__" in guard:
        assert run_experiment(saved(tmp_path), mode="eval")[1] == {"valid/mine": 1.0}
    else:
        with raises(ConfigError, "__main__.Mine"):
            run_experiment(saved(tmp_path), mode="eval")
