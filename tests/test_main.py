"""run_experiment: the modes, where it runs, and what it returns."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.faults.runs import log_of, store_of, train

from trainwright import Hook, RunConfig, Trainer, run_experiment
from trainwright.errors import ConfigError
from trainwright.main import Interrupted

PROJECT = Path(__file__).parent / "project"


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", "trainer.max_steps=6", *overrides])


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def last_evaluation(folder):
    line = [line for line in lines_of(folder) if "valid/loss" in line][-1]
    return {key: value for key, value in line.items() if "/" in key}


def test_an_experiment_returns_the_model_and_its_last_evaluation(tmp_path):
    model, logs = run_experiment(load(tmp_path))
    assert isinstance(model, torch.nn.Module)
    assert logs == last_evaluation(tmp_path / "small")


def test_a_finished_experiment_returns_the_same_again(tmp_path):
    _, first = run_experiment(load(tmp_path))
    _, second = run_experiment(load(tmp_path))
    assert first == second != {}


def test_evaluating_gives_what_training_logged(tmp_path):
    run_experiment(load(tmp_path))
    _, logs = run_experiment(load(tmp_path), mode="eval")
    assert logs == last_evaluation(tmp_path / "small")


def test_evaluating_changes_nothing(tmp_path):
    run_experiment(load(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run_experiment(load(tmp_path), mode="eval")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_evaluating_averaged_weights_gives_what_training_logged(tmp_path):
    hooks = "hooks=[{type: average_weights, decay: 0.9}]"
    run_experiment(load(tmp_path, hooks))
    _, logs = run_experiment(load(tmp_path, hooks), mode="eval")
    assert logs == last_evaluation(tmp_path / "small")


def test_evaluating_includes_the_test_set(tmp_path):
    overrides = ["data.eval={}", "data.test={type: parts.py:Points, size: 9, seed: 2}"]
    _, trained = run_experiment(load(tmp_path, *overrides))
    _, logs = run_experiment(load(tmp_path, *overrides), mode="eval")
    assert logs == trained
    assert "test/loss" in logs


@pytest.mark.parametrize(("step", "expected"), [("latest", 6), (4, 4), ("best", None)])
def test_the_checkpoint_to_evaluate_is_chosen(tmp_path, step, expected):
    overrides = ["checkpoint.keep_best={metric: valid/loss, mode: max}", "trainer.schedule=null", "log.every_steps=1"]
    run_experiment(load(tmp_path, *overrides, "evaluation.every_steps=1", "checkpoint.keep_last=null"))
    by_step = {line["step"]: line["valid/loss"] for line in lines_of(tmp_path / "small")}
    if step == "best":
        expected = max(by_step, key=by_step.get)
    _, logs = run_experiment(load(tmp_path, *overrides), mode="eval", step=step)
    assert logs["valid/loss"] == by_step[expected]


def test_evaluating_without_a_set_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.eval: there is no evaluation set"):
        run_experiment(load(tmp_path, "data.eval={}"), mode="eval")


def test_evaluating_on_other_data_needs_no_training(tmp_path):
    run_experiment(load(tmp_path))
    config = load(tmp_path, "data.eval={other: {type: parts.py:Points, size: 7, seed: 5}}", "data.train=null")
    assert run_experiment(config, mode="eval")[1].keys() == {"other/loss", "other/accuracy"}


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match=r"mode: 'evaluate' is unknown\. Use one of train, eval, train_and_eval"):
        run_experiment(RunConfig(), mode="evaluate")


@pytest.mark.parametrize("sets", [[], ["data.eval={}", "data.split=[8, 1, 1]"]], ids=["eval", "split"])
def test_training_alone_leaves_the_evaluation_sets_alone(tmp_path, sets):
    _, logs = run_experiment(load(tmp_path, *sets), mode="train")
    assert logs == {}
    assert not any("/" in key for line in lines_of(tmp_path / "small") for key in line)


def test_training_alone_and_with_evaluation_give_the_same_losses(tmp_path):
    run_experiment(load(tmp_path), mode="train")
    run_experiment(load(tmp_path, "name=both"))
    losses = [[line["loss"] for line in lines_of(tmp_path / name) if "loss" in line] for name in ("small", "both")]
    assert losses[0] == losses[1]


def test_model_dir_replaces_the_run_folder(tmp_path, in_tmp):
    run_experiment(load(tmp_path / "elsewhere"), model_dir=str(tmp_path / "here"))
    assert (tmp_path / "here" / "metrics.json").exists()
    assert not (tmp_path / "elsewhere").exists()


def test_model_dir_may_be_the_current_folder(tmp_path, monkeypatch):
    run_experiment(load(tmp_path))
    monkeypatch.chdir(tmp_path / "small")
    _, logs = run_experiment(load(tmp_path), mode="eval", model_dir=".")
    assert logs == last_evaluation(tmp_path / "small")


def test_the_log_is_copied_into_the_run_folder_and_only_there(tmp_path):
    package = logging.getLogger("trainwright")
    before = (list(package.handlers), package.level)
    run_experiment(load(tmp_path))
    assert "Finished at step 6." in (tmp_path / "small" / "log.txt").read_text()
    assert (list(package.handlers), package.level) == before


def test_an_interrupted_experiment_says_so_and_goes_on_later(tmp_path):
    class Leaves(Trainer):
        def train_step(self, batch):
            if self.step == 2:
                self.interrupt("SIGTERM")
            return super().train_step(batch)

    with pytest.raises(Interrupted, match="SIGTERM"):
        run_experiment(load(tmp_path), trainer=Leaves)
    assert "step 3 is finished and saved" in (tmp_path / "small" / "log.txt").read_text()
    _, logs = run_experiment(load(tmp_path))
    _, undisturbed = run_experiment(load(tmp_path, "name=undisturbed"))
    assert logs == undisturbed


def test_a_stopped_experiment_says_why(tmp_path):
    class Stops(Trainer):
        def train_step(self, batch):
            if self.step == 2:
                self.stop("enough")
            return super().train_step(batch)

    run_experiment(load(tmp_path), trainer=Stops)
    assert "Stopped at step 3: enough." in (tmp_path / "small" / "log.txt").read_text()
    assert "valid/loss" in lines_of(tmp_path / "small")[-1]


# signals when training is over


class Closing(Hook):
    """Is told to leave at a step, or never, and told once more while it closes; says when it has closed."""

    def __init__(self, path, *, step=None, number=signal.SIGTERM):
        self.path, self.step, self.number = path, step, number

    def after_step(self):
        if self.trainer.step == self.step:
            os.kill(os.getpid(), self.number)

    def close(self):
        os.kill(os.getpid(), self.number)
        time.sleep(0.01)
        self.path.touch()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_again_while_the_run_closes_does_not_keep_it_from_being_queued_again(number, tmp_path):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n', "utf-8")
    scontrol.chmod(0o755)

    def prepare():
        os.environ.update(PATH=f"{scontrol.parent}:{os.environ['PATH']}", SLURM_JOB_ID="17")

    hooks = [Closing(tmp_path / "first", step=3, number=number), Closing(tmp_path / "second", number=number)]
    ended = train(tmp_path / "run", "preemption.requeue=true", hooks=hooks, prepare=prepare)
    assert ended == 128 + number
    assert (tmp_path / "calls").read_text("utf-8") == "requeue 17\n"
    assert (tmp_path / "first").exists()
    assert (tmp_path / "second").exists()
    assert store_of(tmp_path / "run").steps() == [2, 3]
    assert "step 3 is finished and saved" in log_of(tmp_path / "run")


def test_a_signal_while_a_finished_run_closes_undoes_nothing(tmp_path):
    assert train(tmp_path / "run", hooks=[Closing(tmp_path / "closed")]) == 0
    assert (tmp_path / "closed").exists()
    assert "Finished at step 6." in log_of(tmp_path / "run")


def test_a_signal_before_the_first_step_leaves_at_once_and_nothing_is_lost(tmp_path):
    class Told(Trainer):
        @classmethod
        def build_model(cls, build):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            (tmp_path / "slept").touch()
            return build.model()

    assert train(tmp_path / "run", trainer=Told) == 128 + signal.SIGTERM
    assert not (tmp_path / "slept").exists()
    assert train(tmp_path / "run") == 0
