"""`trainwright sweep`: the plan, and what the end shows. The trials themselves are tested in tests/launch."""

import sys
from pathlib import Path

import pytest
from tests.messages import mentions, raises
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.commands import sweep as command
from trainwright.errors import TrainwrightError
from trainwright.launch.sweep import SweepResult, TrialResult

RUN = Path(__file__).parents[1] / "project" / "run.yaml"


@pytest.fixture
def file(in_tmp):
    path = in_tmp / "widths.yaml"
    path.write_text(
        f"run: {RUN}\nmetric: valid/loss\nsampler: grid\n"
        "parameters: {model.width: [4, 8], trainer.optimizer.type: [adamw, lion]}\n",
        "utf-8",
    )
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def test_a_dry_run_lists_the_trials_and_creates_nothing(file):
    shown = invoke(file, "--dry-run").output
    rows = [line.split() for line in shown.splitlines() if line.startswith("trial-")]
    assert rows == [
        ["trial-0000", "4", "adamw"],
        ["trial-0001", "4", "lion"],
        ["trial-0002", "8", "adamw"],
        ["trial-0003", "8", "lion"],
    ]
    assert "further" in invoke(file, "--dry-run", "sampler=tpe", "trials=15").output
    assert [path.name for path in file.parent.iterdir()] == ["widths.yaml"]


def trial(number, state, value=None, reason=None):
    values = {"model.width": 4, "trainer.optimizer.type": "adamw"}
    return TrialResult(number, f"trial-{number:04d}", state, values, value=value, step=10, reason=reason)


def end_with(monkeypatch, **changes):
    trials = (trial(0, "complete", 0.5), trial(1, "complete", 0.25), trial(2, "failed", reason="no memory"))
    changes = {"importances": {"model.width": 0.75}, **changes}
    result = SweepResult(trials, trials[1], "trainwright train run.yaml", **changes)

    def run_sweep(settings, *, fresh, report):
        for each in trials:
            report(each)
        return result

    monkeypatch.setattr(command, "run_sweep", run_sweep)


def test_the_end_shows_the_best_trial_its_command_and_the_importances(file, monkeypatch):
    end_with(monkeypatch)
    done = invoke(file)
    assert done.exit_code == 0
    assert "trial-0002 failed: no memory" in done.output
    assert done.output.index("trial-0001  0.25") < done.output.index("trial-0000  0.5")
    assert "2 complete, 1 failed of 4 trials" in done.output
    assert "Best: trial-0001, valid/loss 0.25: runs/widths/trial-0001" in done.output
    assert "model.width 75%" in done.output


def test_the_end_says_why_there_are_no_importances(file, monkeypatch):
    end_with(monkeypatch, importances={})
    done = invoke(file)
    assert done.exit_code == 0
    assert mentions(done.output, "Importance", "four complete trials", "valid/loss")


def test_a_signal_and_failures_have_their_exit_codes(file, monkeypatch):
    end_with(monkeypatch, signal=2)
    assert invoke(file).exit_code == 130
    end_with(monkeypatch, num_failures=3)
    done = invoke(file)
    with raises(TrainwrightError, "3", "runs/widths/logs"):
        raise done.exception


def test_without_optuna_the_command_says_how_to_get_it(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    done = invoke(file, "--dry-run")
    with raises(TrainwrightError, "trainwright[sweep]"):
        raise done.exception
