"""The command line: in this process where that suffices, as a real process where it matters."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from tests.forked_program import run_command
from typer.testing import CliRunner

import trainwright
from trainwright import RunConfig, build_trainer, cli
from trainwright.cli import app

PROJECT = Path(__file__).parent / "project"
RUN = str(PROJECT / "run.yaml")
PACKAGE = str(Path(trainwright.__file__).parent)


@pytest.fixture(autouse=True)
def _package_log_as_before():
    """`main` shows the package's log for the rest of its process; here other tests follow."""
    package = logging.getLogger("trainwright")
    handlers, level = list(package.handlers), package.level
    yield
    package.handlers[:] = handlers
    package.setLevel(level)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def run_process(*arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainwright", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)


def main(monkeypatch, *arguments):
    """Calls the entry point as the installed script does."""
    monkeypatch.setattr(sys, "argv", ["trainwright", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as left:
        return left.code
    return 0


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def all_files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# as a real process


def test_help_answers_without_torch(tmp_path):
    program = (
        "import sys\nfrom trainwright.cli import main\nsys.argv = ['trainwright', 'train', '--help']\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("--fresh", "--accept-changes", "--fast-dev-run", "--print-config", "--nproc"):
        assert word in done.stdout


def test_a_real_process_trains_and_exits_with_0_and_again_with_nothing_to_do(in_tmp):
    done = run_process("train", RUN, "trainer.max_steps=4", "name=real", "writers=[console, json]", cwd=in_tmp)
    assert done.returncode == 0, done.stderr
    folder = in_tmp / "runs" / "real"
    assert lines_of(folder)[-1]["step"] == 4
    assert "Run folder: runs/real" in done.stderr
    before = all_files(in_tmp)
    again = run_command("train", RUN, "trainer.max_steps=4", "name=real", "writers=[console, json]", cwd=in_tmp)
    assert again.returncode == 0, again.stderr
    assert all_files(in_tmp) == before


def test_a_user_s_exception_exits_with_its_traceback(in_tmp):
    (in_tmp / "parts.py").write_text(
        (PROJECT / "parts.py").read_text().replace("logits = self.layers(x)", "raise ZeroDivisionError('mine')")
    )
    (in_tmp / "run.yaml").write_text((PROJECT / "run.yaml").read_text())
    done = run_command("train", "run.yaml", cwd=in_tmp)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError: mine" in done.stderr
    assert "parts.py" in done.stderr


def test_an_explained_error_exits_with_2_and_no_traceback(in_tmp):
    text = (PROJECT / "run.yaml").read_text().replace("max_steps: 12", "max_step: 12")
    (in_tmp / "run.yaml").write_text(text)
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "max_step:" in each)
    done = run_process("train", "run.yaml", cwd=in_tmp)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: run.yaml:{line}: trainer.max_step: ")
    assert "max_steps" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (in_tmp / "runs").exists()


# in this process


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["train", RUN, "trainer.max_stepz=3"], "trainer.max_stepz"),
        (["train", RUN, "nonsense"], "nonsense"),
        (["train", RUN, "model.widht=3"], "override model.widht=3:"),
        (["train", RUN, "runtime.compile_backend=inductor"], "runtime.compile_backend"),
        (["evaluate", RUN], "holds no checkpoint"),
        (["evaluate", "."], "config.yaml"),
    ],
)
def test_errors_are_explained_and_exit_with_2(in_tmp, monkeypatch, capsys, arguments, problem):
    assert main(monkeypatch, *arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert problem in shown
    assert "Traceback" not in shown
    assert list(in_tmp.iterdir()) == []


def test_a_long_error_is_not_wrapped(in_tmp, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    main(monkeypatch, "train", RUN, "model.widht=3")
    assert max(map(len, capsys.readouterr().err.splitlines())) > 60


def test_overrides_reach_the_run(in_tmp):
    result = invoke("train", RUN, "trainer.max_steps=2", "name=mine", "log.every_steps=1")
    assert result.exit_code == 0, result.output
    assert [line["step"] for line in lines_of(in_tmp / "runs" / "mine")] == [1, 2]


def test_the_printed_config_loads_back_equal(in_tmp):
    overrides = ["trainer.max_steps=2", "hooks=[{type: time_steps}]", "trainer.optimizer.lr=1e-5"]
    result = invoke("train", RUN, *overrides, "--print-config")
    assert result.exit_code == 0
    assert list(in_tmp.iterdir()) == []
    (in_tmp / "printed.yaml").write_text(result.stdout)
    printed = RunConfig.load(in_tmp / "printed.yaml")
    assert printed == RunConfig.load(RUN, overrides)
    assert printed.trainer.optimizer.lr == 1e-5


def test_a_fast_dev_run_does_everything_and_leaves_nothing_behind(in_tmp, monkeypatch):
    (in_tmp / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(in_tmp / "temporary"))
    before = all_files(PROJECT)
    seen = []
    monkeypatch.setattr("trainwright.loop.trainer.Trainer.post_init", lambda trainer: seen.append(trainer))
    result = invoke("train", RUN, "--fast-dev-run", "trainer.max_epochs=1000")
    assert result.exit_code == 0, result.output
    assert [path.name for path in in_tmp.rglob("*")] == ["temporary"]
    assert {name for name in all_files(PROJECT) if "__pycache__" not in str(name)} == {
        name for name in before if "__pycache__" not in str(name)
    }
    (trainer,) = seen
    assert trainer.step == 3
    assert not any(text in result.output for text in ("Run folder:", "Next:", "Best "))  # it is deleted
    assert trainer.storage.latest().keys() >= {"loss", "valid/loss"}


def test_a_fast_dev_run_leaves_an_earlier_run_alone(in_tmp):
    invoke("train", RUN, "trainer.max_steps=2")
    before = all_files(in_tmp)
    assert invoke("train", RUN, "--fast-dev-run", "seed=99").exit_code == 0
    assert all_files(in_tmp) == before


def test_changes_are_rejected_accepted_or_begun_afresh(in_tmp, monkeypatch, capsys):
    assert main(monkeypatch, "train", RUN, "trainer.max_steps=2") == 0
    assert main(monkeypatch, "train", RUN, "trainer.max_steps=2", "seed=8") == 2
    assert "override seed=8: seed: 7 → 8" in capsys.readouterr().err
    assert main(monkeypatch, "train", RUN, "trainer.max_steps=3", "seed=8", "--accept-changes") == 0
    assert lines_of(in_tmp / "runs" / "small")[-1]["step"] == 3
    assert main(monkeypatch, "train", RUN, "trainer.max_steps=2", "--fresh") == 0
    assert lines_of(in_tmp / "runs" / "small")[-1]["step"] == 2
    assert (in_tmp / "runs" / "small.old").is_dir()


def test_evaluate_prints_the_last_evaluation_as_json(in_tmp, monkeypatch):
    assert invoke("train", RUN, "trainer.max_steps=4").exit_code == 0
    folder = in_tmp / "runs" / "small"
    expected = {key: value for key, value in lines_of(folder)[-1].items() if "/" in key}
    by_file = invoke("evaluate", RUN, "trainer.max_steps=4")
    assert by_file.exit_code == 0, by_file.output
    assert json.loads(by_file.stdout) == expected
    assert json.loads(invoke("evaluate", folder).stdout) == expected
    monkeypatch.chdir(folder)
    assert json.loads(invoke("evaluate", ".").stdout) == expected
    assert json.loads(invoke("evaluate", ".", "--step", "4").stdout) == expected
    other = json.loads(invoke("evaluate", ".", "data.eval={other: {type: parts.py:Points, seed: 9}}").stdout)
    assert other.keys() == {"other/loss", "other/accuracy"}


@pytest.mark.parametrize("step", ["3", "best", "newest", "1.5"])
def test_a_step_that_cannot_be_evaluated_is_explained(in_tmp, monkeypatch, capsys, step):
    build_trainer(RunConfig.load(RUN, ["trainer.max_steps=2"])).train()
    assert main(monkeypatch, "evaluate", "runs/small", "--step", step) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


# how deep a stack trace is


def own_frames_at_backward(monkeypatch, act):
    """Runs `act` and returns our own functions on the stack at the first `.backward()`."""
    found = []
    original = torch.Tensor.backward

    def backward(self, *arguments, **keywords):
        if not found:
            found.extend(
                f"{Path(frame.filename).name}:{frame.name}"
                for frame in traceback.extract_stack()
                if frame.filename.startswith(PACKAGE)
            )
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    act()
    return found


def test_from_the_command_line_to_backward_there_are_at_most_6_own_frames(in_tmp, monkeypatch):
    frames = own_frames_at_backward(monkeypatch, lambda: main(monkeypatch, "train", RUN, "trainer.max_steps=1"))
    assert frames[0] == "cli.py:main"
    assert frames[-1] == "update.py:backward"
    assert len(frames) <= 6, frames


def test_below_train_there_are_2_own_frames(in_tmp, monkeypatch):
    trainer = build_trainer(RunConfig.load(RUN, ["trainer.max_steps=1"]))
    frames = own_frames_at_backward(monkeypatch, trainer.train)
    assert frames == ["trainer.py:train", "trainer.py:train_step", "update.py:backward"]
