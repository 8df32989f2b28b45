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
from tests.faults.runs import config_of, log_of, start, store_of, train
from tests.forked_program import run_script
from tests.messages import mentions, raises

import trainwright
from trainwright import Hook, RunConfig, Task, Trainer, build_trainer, run_experiment
from trainwright.api.run import Interrupted
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError, ConfigError, TrainwrightError

PROJECT = Path(__file__).parents[1] / "project"


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


def test_evaluation_equals_what_training_logged(tmp_path):
    run_experiment(load(tmp_path))
    _, logs = run_experiment(load(tmp_path), mode="eval")
    assert logs == last_evaluation(tmp_path / "small")


def test_evaluating_changes_nothing(tmp_path):
    run_experiment(load(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run_experiment(load(tmp_path), mode="eval")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_evaluation_of_averaged_weights_equals_what_training_logged(tmp_path):
    hooks = "hooks=[{type: ema, decay: 0.9}]"
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


def test_evaluating_without_a_set_is_rejected(tmp_path):
    with raises(ConfigError, "data.eval"):
        run_experiment(load(tmp_path, "data.eval={}"), mode="eval")


def test_evaluating_on_other_data_needs_no_training(tmp_path):
    run_experiment(load(tmp_path))
    config = load(tmp_path, "data.eval={other: {type: parts.py:Points, size: 7, seed: 5}}", "data.train=null")
    assert run_experiment(config, mode="eval")[1].keys() == {"other/loss", "other/accuracy"}


def test_an_unknown_mode_is_rejected():
    with raises(ConfigError, "evaluate", "train_and_eval"):
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


def test_an_interrupted_experiment_raises_and_resumes_later(tmp_path):
    class Leaves(Trainer):
        def train_step(self, batch):
            if self.step == 2:
                self.interrupt("SIGTERM")
            return super().train_step(batch)

    with pytest.raises(Interrupted, match="SIGTERM"):
        run_experiment(load(tmp_path), trainer=Leaves)
    assert "step 3 is finished and saved" in (tmp_path / "small" / "log.txt").read_text()
    _, logs = run_experiment(load(tmp_path), trainer=Leaves)
    _, undisturbed = run_experiment(load(tmp_path, "name=undisturbed"))
    assert logs == undisturbed


PROGRAM = """
import os, signal, time
from trainwright import RunConfig, Trainer, run_experiment

class Told(Trainer):
    def train_step(self, batch):
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        return super().train_step(batch)

run_experiment(RunConfig.load({file!r}, ["output_dir={folder}", "trainer.max_steps=6"]), trainer=Told)
print("never reached")
"""


def test_an_interrupted_program_exits_as_the_command_line_does(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(file=str(PROJECT / "run.yaml"), folder=tmp_path))
    done = run_script(program)
    assert done.returncode == 128 + signal.SIGTERM
    assert (done.stdout, "Traceback" in done.stderr) == ("", False)
    assert store_of(tmp_path / "small").steps()[-1] == 3


def test_an_interruption_is_public_and_says_why(tmp_path):
    interruption = trainwright.Interrupted("SIGTERM")
    assert (interruption.reason, interruption.code) == ("SIGTERM", 128 + signal.SIGTERM)
    assert trainwright.Interrupted("the queue is full").code == 75


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


# who trains, and what is learned


class Doubled(Trainer):
    """Trains on twice the loss, and says so."""

    def forward(self, **batch):
        return 2 * self.model(**batch)["loss"], {"doubled": 1.0}


def test_a_trainer_is_given_as_a_class(tmp_path):
    run_experiment(load(tmp_path, "evaluation.metrics={}"), trainer=Doubled)
    assert lines_of(tmp_path / "small")[-1]["doubled"] == 1.0


def test_a_trainer_is_given_as_it_was_built(tmp_path):
    config = load(tmp_path, "evaluation.metrics={}")
    trainer = build_trainer(config, Doubled)
    model, logs = run_experiment(config, trainer=trainer)
    assert model is trainer.model
    assert trainer.step == 6
    assert logs == last_evaluation(tmp_path / "small")
    assert "Finished at step 6." in (tmp_path / "small" / "log.txt").read_text()


@pytest.mark.parametrize("mode", ["train", "train_and_post_eval"])
def test_a_trainer_that_is_built_evaluates_as_the_mode_says(tmp_path, mode):
    config = load(tmp_path)
    _, logs = run_experiment(config, mode=mode, trainer=build_trainer(config))
    evaluated = [line["step"] for line in lines_of(tmp_path / "small") if "valid/loss" in line]
    assert evaluated == ([] if mode == "train" else [6])
    assert bool(logs) == bool(evaluated)


def test_a_trainer_that_is_built_is_evaluated_at_a_checkpoint(tmp_path):
    config = load(tmp_path)
    _, logs = run_experiment(config)
    trainer = build_trainer(config)
    for parameter in trainer.model.parameters():
        parameter.data.zero_()
    assert run_experiment(config, mode="eval", trainer=trainer)[1] == logs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fresh": True}, ()),
        ({"task": Task()}, ()),
        ({"model_dir": "elsewhere"}, ()),
    ],
)
def test_what_was_decided_when_a_trainer_was_built_is_rejected(tmp_path, options, words):
    config = load(tmp_path)
    with raises(ConfigError, *words):
        run_experiment(config, trainer=build_trainer(config), **options)


def test_another_config_than_the_trainer_s_own_is_rejected(tmp_path):
    trainer = build_trainer(load(tmp_path))
    with raises(ConfigError, "trainer.config"):
        run_experiment(load(tmp_path, "trainer.optimizer.lr=0.5"), trainer=trainer)
    assert run_experiment(trainer.config, trainer=trainer)[0] is trainer.model


@pytest.mark.parametrize("wrong", ["Doubled", torch.nn.Linear, object()])
def test_a_value_that_is_not_a_trainer_is_rejected(tmp_path, wrong):
    with raises(ConfigError, "build_trainer"):
        run_experiment(load(tmp_path), trainer=wrong)


class Regression(Task):
    """Learns the sum of a point."""

    def __init__(self, width=3):
        self.width = width

    def build_model(self):
        return torch.nn.Linear(4, 1)

    def forward(self, model, batch):
        return (model(batch["x"])[:, 0] - self.width * batch["x"].sum(1)).square().mean()


class Plain(Trainer):
    """Nothing of its own."""


@pytest.mark.parametrize("trainer", [None, Plain])
def test_a_task_is_given_as_an_instance(tmp_path, trainer):
    config = load(tmp_path, "model=null", "evaluation.metrics={}", "trainer.optimizer.lr=0.3", "trainer.max_steps=40")
    model, logs = run_experiment(config, task=Regression(), trainer=trainer)
    assert isinstance(model, torch.nn.Linear)
    assert logs["valid/loss"] < 1.0  # 36 at first
    assert run_experiment(config, task=Regression(), mode="eval")[1] == logs


def test_a_task_is_not_a_class(tmp_path):
    with raises(ConfigError, "MyTask"):
        run_experiment(load(tmp_path), task=Regression)


def test_a_task_section_that_loses_against_a_given_task_is_rejected(tmp_path):
    with raises(ConfigError):
        run_experiment(load(tmp_path, "task={type: task}"), task=Task())


# the modes


def evaluated_steps(folder):
    return [line["step"] for line in lines_of(folder) if "valid/loss" in line]


def test_evaluation_after_training_is_made_once_and_returned(tmp_path):
    _, logs = run_experiment(load(tmp_path), mode="train_and_post_eval")
    assert evaluated_steps(tmp_path / "small") == [6]
    assert logs == last_evaluation(tmp_path / "small")
    _, usual = run_experiment(load(tmp_path, "name=usual"))
    assert logs == usual


@pytest.mark.parametrize("mode", ["train_and_eval", "train_and_post_eval", "eval"])
def test_a_run_that_was_trained_alone_is_evaluated_when_it_is_asked_for(tmp_path, mode):
    config = load(tmp_path, "data.test={type: parts.py:Points, size: 9, seed: 2}")
    run_experiment(config, mode="train")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    _, logs = run_experiment(config, mode=mode)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert logs.keys() == {"valid/loss", "valid/accuracy", "test/loss", "test/accuracy"}
    assert logs == run_experiment(config.derive({"name": "both"}))[1]


def test_a_finished_run_is_not_evaluated_twice(tmp_path):
    evaluations = []

    class Counts(Trainer):
        def eval_begin(self):
            evaluations.append(self.eval_name)

    run_experiment(load(tmp_path), trainer=Counts)
    assert evaluations == ["valid", "valid"]  # at 5 and at the end
    run_experiment(load(tmp_path), trainer=Counts)
    assert len(evaluations) == 2
    extra = "data.eval={valid: {type: parts.py:Points, size: 33, seed: 1}, more: {type: parts.py:Points, size: 5}}"
    _, logs = run_experiment(load(tmp_path, extra), trainer=Counts)
    assert evaluations[2:] == ["more"]
    assert {"valid/loss", "more/loss"} <= logs.keys()


def test_evaluating_rejects_no_changed_setting(tmp_path):
    _, logs = run_experiment(load(tmp_path))
    changed = load(tmp_path, "trainer.optimizer.lr=0.5", "seed=1", "trainer.global_batch_size=12", "data.train.size=9")
    assert run_experiment(changed, mode="eval")[1]["valid/accuracy"] == logs["valid/accuracy"]


# evaluating what another process trains


def results_of(folder):
    return [json.loads(line) for line in (folder / "evaluations.json").read_text().splitlines()]


def test_continuous_evaluation_evaluates_each_checkpoint_once_and_ends_with_the_training(tmp_path):
    config = load(tmp_path, "checkpoint.every_steps=2", "checkpoint.keep_last=null", "evaluation.every_steps=2")
    run_experiment(config)
    logged = [{key: line[key] for key in ("step", "valid/loss", "valid/accuracy")} for line in lines_of_sets(tmp_path)]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):  # a second one begins its own results
        model, logs = run_experiment(config, mode="continuous_eval")
        assert results_of(tmp_path / "small") == logged
        assert {"step": 6, **logs} == logged[-1]
    (tmp_path / "small" / "evaluations.json").unlink()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert isinstance(model, torch.nn.Module)


def lines_of_sets(tmp_path):
    return [line for line in lines_of(tmp_path / "small") if "valid/loss" in line]


def test_continuous_evaluation_of_averaged_weights_equals_what_training_logged(tmp_path):
    hooks = "hooks=[{type: ema, decay: 0.9}]"
    config = load(tmp_path, hooks, "checkpoint.every_steps=2", "evaluation.every_steps=2", "checkpoint.keep_last=null")
    run_experiment(config)
    run_experiment(config, mode="continuous_eval")
    assert [line["valid/loss"] for line in results_of(tmp_path / "small")] == [
        line["valid/loss"] for line in lines_of_sets(tmp_path)
    ]


class WaitForEvaluation(Hook):
    """Trains on only when the newest checkpoint was evaluated; ends early where it is told to."""

    def __init__(self, *, stop_at=None):
        self.stop_at = stop_at

    def after_step(self):
        results = self.trainer.folder / "evaluations.json"
        newest = max(self.trainer.context.store.steps(), default=0)
        deadline = time.monotonic() + 60
        while newest and f'"step": {newest},' not in (results.read_text() if results.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if self.trainer.step == self.stop_at:
            self.trainer.stop("enough")


@pytest.mark.parametrize(("stop_at", "steps"), [(None, [2, 4, 6]), (5, [2, 4, 5])])
def test_continuous_evaluation_follows_a_training_to_its_end(tmp_path, stop_at, steps):
    folder = tmp_path / "run"
    child = start(folder, "checkpoint.asynchronous=false", hooks=[WaitForEvaluation(stop_at=stop_at)])
    config = config_of(folder)
    _, logs = run_experiment(config, mode="continuous_eval", poll_seconds=0.02, timeout_seconds=60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [line["step"] for line in results_of(folder)] == steps
    assert {"step": steps[-1], **logs} == results_of(folder)[-1]


def test_continuous_evaluation_evaluates_the_checkpoints_of_a_run_that_was_started_over(tmp_path):
    config = load(tmp_path, "checkpoint.every_steps=6", "trainer.max_steps=6")
    other = load(tmp_path, "checkpoint.every_steps=6", "trainer.max_steps=6", "seed=5")
    measured = []

    class StartsOver(Trainer):
        def eval_end(self, aggregated):
            logs = super().eval_end(aggregated)
            measured.append(logs["loss"])
            if len(measured) == 1:
                with torch.enable_grad():
                    run_experiment(other, fresh=True, mode="train")
            return logs

    _, logs = run_experiment(config)
    run_experiment(config, mode="continuous_eval", trainer=StartsOver, poll_seconds=0.01, timeout_seconds=20)
    assert measured[0] == logs["valid/loss"]
    assert measured[1:] == [run_experiment(other, mode="eval")[1]["valid/loss"]]
    assert measured[0] != measured[1]


def test_continuous_evaluation_waits_no_longer_than_its_timeout(tmp_path, caplog):
    with raises(CheckpointError, "0.1"):
        run_experiment(load(tmp_path), mode="continuous_eval", poll_seconds=0.02, timeout_seconds=0.1)

    class Dies(Trainer):
        def train_step(self, batch):
            if self.step == 5:
                raise OSError("died")
            return super().train_step(batch)

    with pytest.raises(OSError, match="died"):
        run_experiment(load(tmp_path), trainer=Dies)
    _, logs = run_experiment(load(tmp_path), mode="continuous_eval", poll_seconds=0.02, timeout_seconds=0.1)
    assert results_of(tmp_path / "small") == [{"step": 4, **logs}]
    assert "the last one evaluated is step 4" in caplog.text


def test_a_checkpoint_that_is_deleted_before_it_is_read_is_skipped_with_a_message(tmp_path, monkeypatch, caplog):
    config = load(tmp_path, "checkpoint.every_steps=2", "checkpoint.keep_last=null")
    run_experiment(config)
    read_split = CheckpointStore.read_split

    def read_too_late(store, step, part):
        if step == 4:
            store.delete(4)  # as the training's retention does, at this very moment
        return read_split(store, step, part)

    monkeypatch.setattr(CheckpointStore, "read_split", read_too_late)
    run_experiment(config, mode="continuous_eval")
    assert [line["step"] for line in results_of(tmp_path / "small")] == [2, 6]
    assert "Step 4 was deleted before it could be evaluated." in caplog.text


def test_a_checkpoint_that_cannot_be_read_ends_continuous_evaluation(tmp_path):
    config = load(tmp_path)
    run_experiment(config)
    with raises(CheckpointError):
        run_experiment(load(tmp_path, "model.width=16"), mode="continuous_eval")


def test_continuous_evaluation_needs_a_set(tmp_path):
    with raises(ConfigError, "data.eval"):
        run_experiment(load(tmp_path, "data.eval={}"), mode="continuous_eval")


# what a trainer's own constructor may leave out


def line_of(method):
    return f"{method.__code__.co_filename}:{method.__code__.co_firstlineno}"


def test_a_trainer_that_does_not_call_the_constructor_of_trainer_is_rejected_with_its_line(tmp_path):
    class Forgets(Trainer):
        def __init__(self, config, task, model, optimizer, train_dataset, **rest):
            self.config, self.model = config, model

    for run in (build_trainer, lambda config, kind: run_experiment(config, trainer=kind)):
        with pytest.raises(TrainwrightError) as rejected:
            run(load(tmp_path), Forgets)
        assert str(rejected.value).startswith(f"{line_of(Forgets.__init__)}: Forgets.__init__ has not called super()")
        assert mentions(str(rejected.value), "__init__", "train_dataset")


def test_a_trainer_that_reads_an_attribute_too_early_is_rejected(tmp_path):
    class Early(Trainer):
        def __init__(self, config, task, model, optimizer, train_dataset, **rest):
            self.first = self.device
            super().__init__(config, task, model, optimizer, train_dataset, **rest)

    with raises(TrainwrightError, "device", "__init__"):
        build_trainer(load(tmp_path), Early)


def test_a_trainer_that_does_not_pass_on_the_rest_is_rejected_with_its_line(tmp_path):
    class Keeps(Trainer):
        def __init__(self, config, task, model, optimizer, train_dataset, **rest):
            super().__init__(config, task, model, optimizer, train_dataset)

    with pytest.raises(TrainwrightError) as rejected:
        build_trainer(load(tmp_path), Keeps)
    assert str(rejected.value).startswith(f"{line_of(Keeps.__init__)}: Keeps was constructed without its context.")


def test_an_attribute_that_a_whole_trainer_lacks_is_python_s_own_error(tmp_path):
    class Broken(Trainer):
        @property
        def inner(self):
            return self.nothing

    trainer = build_trainer(load(tmp_path), Broken)
    for name in ("nothing", "inner"):
        with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
            getattr(trainer, name)
    assert not hasattr(trainer, "absent")


def test_joining_waits_for_the_checkpoint_that_is_being_written(tmp_path):
    found = []

    class Joins(Hook):
        def after_step(self):
            if self.trainer.step == 5:  # one was begun after step 4
                self.trainer.join()
                found.append(self.trainer.context.store.steps())

    class WithHook(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Joins()]

    run_experiment(load(tmp_path), trainer=WithHook)
    assert found == [[4]]
