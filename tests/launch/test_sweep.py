"""Sweeps with real trials: each is a process, and processes are killed."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.forked_program import run_command
from tests.messages import check_message, raises

from trainwright.checkpoint.run_folder import CONFIG_FILE
from trainwright.commands import terminal
from trainwright.config.sweep import SweepConfig
from trainwright.errors import CheckpointError, ConfigError
from trainwright.launch import sweep as sweeps
from trainwright.launch.sweep import COMPLETE, FAILED, PRUNED, choose, preview, run_sweep, slot_environment
from trainwright.writers import json_lines

PROJECT = Path(__file__).parents[1] / "project"
PATIENCE_SECONDS = 120


@pytest.fixture
def load(in_tmp):
    def load(*overrides, text=""):
        if not Path("run.yaml").exists():
            Path("run.yaml").write_text(f"extends: [{PROJECT / 'run.yaml'}]\nname: points\n", "utf-8")
        Path("lr.yaml").write_text(
            f"run: run.yaml\nmetric: valid/loss\nsampler: grid\nparallel: 2\n{text}"
            "parameters: {trainer.optimizer.lr: [0.05, 1e-9], model.dropout: [0, 2]}\n",
            "utf-8",
        )
        return SweepConfig.load("lr.yaml", overrides)

    return load


def metrics_of(folder):
    lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    timed = ("seconds", "second", "time", "mfu", "share")
    return [{name: value for name, value in line.items() if not any(each in name for each in timed)} for line in lines]


def test_trials_complete_are_pruned_and_fail_and_a_second_start_keeps_them(load):
    rates = "parameters={trainer.optimizer.lr: [0.05, 1e-9, -1, 0.1]}"
    long = "overrides=[trainer.max_steps=600, evaluation.every_steps=50, checkpoint.every_steps=null]"
    changes = (rates, long, "pruner={type: median, startup_trials: 1}", "max_failures=1", "parallel=1")
    reported = []
    result = run_sweep(load(*changes), report=reported.append)
    assert [each.state for each in result.trials] == [COMPLETE, PRUNED, FAILED]
    assert result.num_failures == 1
    assert [each.state for each in reported] == ["running", COMPLETE, "running", PRUNED, "running", FAILED]
    assert 50 <= result.trials[1].step < 600
    check_message(result.trials[2].reason, "lr", "-1")
    assert result.best.values == {"trainer.optimizer.lr": 0.05}
    assert result.best.value == metrics_of(Path("runs/lr/trial-0000"))[-1]["valid/loss"]
    check_message(result.command, "run.yaml", "trainer.optimizer.lr=0.05")
    with Path("runs/lr/results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == [COMPLETE, PRUNED, FAILED]
    assert rows[0]["trainer.optimizer.lr"] == "0.05"
    assert json.loads(Path("runs/lr/results.json").read_text())["best"] == "trial-0000"

    assert run_sweep(load(*changes, "trials=3")).trials == result.trials
    with raises(ConfigError, "pruner", "parameters", "--fresh"):
        run_sweep(load("parameters={model.width: [4]}"))
    Path("run.yaml").write_text(Path("run.yaml").read_text() + "seed: 9\n")
    with raises(ConfigError, "run.seed"):
        run_sweep(load(*changes))
    result = run_sweep(load("parameters={trainer.optimizer.lr: [-1, -2]}", "max_failures=1", "parallel=1"), fresh=True)
    assert [each.state for each in result.trials] == [FAILED]
    assert Path("runs/lr.old/study.db").exists()


SLOW = """hooks: [{type: every, steps: 1, call: pause.py:pause}]
trainer: {max_steps: 40}
checkpoint: {every_steps: 2}
evaluation: {every_steps: 20}
log: {every_steps: 2}
"""


class Started:
    """A sweep as a process."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainwright", "sweep", "lr.yaml", "sampler=grid"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self):
        output, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, output


def saved(number):
    steps = Path(f"runs/lr/trial-{number:04d}/checkpoints").glob("step-*/MANIFEST.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in steps), default=0)


def wait_until(is_reached):
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def process_of(number):
    return int(re.search(r"process (\d+)", Path(f"runs/lr/trial-{number:04d}/.lock").read_text())[1])


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def slow(load):
    Path("pause.py").write_text("import time\n\n\ndef pause(trainer):\n    time.sleep(0.1)\n")
    Path("run.yaml").write_text(f"extends: [{PROJECT / 'run.yaml'}]\nname: points\n{SLOW}")
    load(text="")
    text = Path("lr.yaml").read_text().replace("model.dropout: [0, 2]", "model.dropout: [0.1]")
    Path("lr.yaml").write_text(text)
    return SweepConfig.load("lr.yaml")


def test_killed_trials_and_a_killed_sweep_continue_exactly(slow):
    first = Started()
    wait_until(lambda: min(saved(0), saved(1)) >= 4)
    killed, before = process_of(0), saved(0)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: saved(0) > before + 2)
    assert process_of(0) != killed
    others = [process_of(0), process_of(1)]
    first.process.kill()
    first.process.communicate()
    wait_until(lambda: not any(map(is_alive, others)))  # they have saved their steps
    assert before < saved(0) < 40
    result = run_sweep(slow)
    assert [each.state for each in result.trials] == [COMPLETE, COMPLETE]
    assert Path("runs/lr/logs/trial-0000.txt").read_text().count("Resumed from") == 2

    for number, rate in enumerate((0.05, 1e-9)):
        keep = "checkpoint.keep_best={metric: valid/loss, mode: min}"
        overrides = (f"trainer.optimizer.lr={rate}", "model.dropout=0.1", "hooks=[]", f"name=alone-{number}", keep)
        alone = run_command("train", "run.yaml", *overrides)
        assert alone.returncode == 0, alone.stderr
        assert metrics_of(Path(f"runs/lr/trial-{number:04d}")) == metrics_of(Path(f"runs/alone-{number}"))


@pytest.mark.slow
def test_an_interrupted_sweep_saves_every_trial_and_continues(slow):
    first = Started()
    wait_until(lambda: min(saved(0), saved(1)) >= 4)
    with raises(CheckpointError, "in use", golden=False):
        run_sweep(slow)
    first.process.send_signal(signal.SIGINT)
    code, output = first.end()
    assert code == 130, output
    assert "Interrupted" in output
    assert 4 <= saved(0) < 40
    assert json.loads(Path("runs/lr/results.json").read_text())["trials"][0]["state"] == "running"
    code, output = Started().end()
    assert code == 0, output
    assert "2 complete of 2 trials" in output


def test_trials_are_a_function_of_the_seed_and_their_number(load):
    text = "parameters={trainer.optimizer.lr: {min: 1e-5, max: 1, scale: log}, model.width: [4, 8, 16]}"
    settings = load("sampler={type: tpe, seed: 3}", "trials=10", text)
    found = preview(settings, 6)
    assert found == preview(settings, 6)
    assert found[:3] == preview(load("sampler={type: random, seed: 3}", "trials=10", text), 3)
    assert found != preview(load("sampler={type: tpe, seed: 4}", "trials=10", text), 6)
    assert len({each["trainer.optimizer.lr"] for each in found}) == 6


def test_a_trial_that_was_created_in_part_gets_the_values_that_it_lacks(load):
    optuna = sweeps.import_optuna()
    text = "parameters={trainer.optimizer.lr: {min: 1e-5, max: 1, scale: log}, model.width: {min: 4, max: 16, step: 4}}"
    distributions = sweeps._distributions(optuna, load("sampler=tpe", "trials=2", text))
    study = optuna.create_study()
    study.enqueue_trial({"trainer.optimizer.lr": 0.5, "model.width": 12})
    trial = study.ask({name: distributions[name] for name in ["trainer.optimizer.lr"]})
    sweeps.suggest_missing(trial, distributions)
    assert trial.params == {"trainer.optimizer.lr": 0.5, "model.width": 12}


def test_the_value_of_a_trial_is_its_last_or_its_best_evaluation(load):
    evaluations = {5: 0.4, 10: 0.2, 15: 0.3, 20: float("nan")}
    assert choose(evaluations, load("value=best")) == (10, 0.2)
    assert choose(evaluations, load("value=best", "mode=max")) == (5, 0.4)
    assert choose(evaluations, load())[0] == 20
    assert choose({}, load()) is None


def test_each_slot_has_a_device_and_a_share_of_the_cores(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr("trainwright.cpu._QUOTA", quota := tmp_path / "cpu.max")
    quota.write_text("max 100000\n")
    assert slot_environment(3, 4, ["4", "7"]) == {"CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "2"}
    quota.write_text("400000 100000\n")  # of a container
    assert slot_environment(0, 4, []) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert slot_environment(0, 16, []) == {}


def test_visible_devices_are_those_of_the_environment(load, monkeypatch):
    base = load("overrides=[runtime.device=auto]").base
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert sweeps.visible_devices(base) == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert sweeps.visible_devices(base) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert sweeps.visible_devices(load().base) == []  # runtime.device is cpu


@pytest.mark.parametrize(
    ("parameters", "mentions"),
    [
        ("trainer.optimizer.lrr: [1]", ("lrr", "lr")),
        ("trainer.schedule.warmup_step: [1]", ("warmup_step", "warmup_steps")),
        ("trainer.optimizer.type: [adamw, lyon]", ("lyon", "lion")),
        ("trainer.optimizer.type: [adamw, lion], trainer.optimizer.eps: [1e-8]", ("lion", "eps")),
    ],
)
def test_an_argument_that_a_component_does_not_have_is_named_before_any_trial(load, parameters, mentions):
    Path("components.yaml").write_text(f"run: run.yaml\nmetric: valid/loss\nparameters: {{{parameters}}}\n")
    load()
    with raises(ConfigError, *mentions, at="components.yaml:3"):
        preview(SweepConfig.load("components.yaml", ["sampler=grid"]), 1)
    assert not Path("runs").exists()


def test_the_folder_of_a_run_is_not_used(load):
    Path("runs/lr/checkpoints").mkdir(parents=True)
    with raises(ConfigError, "runs/lr"):
        run_sweep(load())


def test_names_of_files_are_those_of_runs():
    assert sweeps._METRICS_FILE == json_lines.FILE_NAME
    assert terminal.CONFIG_FILE == CONFIG_FILE
