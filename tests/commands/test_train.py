"""`trainwright train --profile`, and a slip with --mode; what else the command does is in tests/test_cli.py."""

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright import RunConfig
from trainwright.cli import app
from trainwright.errors import ConfigError

RUN = Path(__file__).parents[1] / "project" / "run.yaml"
SHORT = ("trainer.max_steps=4", "data.eval={}", "evaluation={}")


@pytest.fixture(autouse=True)
def _quick_and_quiet(monkeypatch):
    monkeypatch.setattr("trainwright.hooks.flops._MEASURED_SECONDS", 0.01)
    monkeypatch.setattr("trainwright.hooks.flops._LARGEST", 256)
    package = logging.getLogger("trainwright")
    handlers, level = list(package.handlers), package.level
    yield
    package.handlers[:] = handlers
    package.setLevel(level)


def invoke(*arguments):
    return CliRunner().invoke(app, ["train", str(RUN), *map(str, arguments)])


def test_a_profile_is_shown_and_kept(in_tmp):
    done = invoke("--profile", *SHORT)
    assert done.exit_code == 0, done.output
    summary = (in_tmp / "runs" / "small" / "profile" / "summary.txt").read_text("utf-8")
    assert summary.strip() in done.output
    assert list((in_tmp / "runs" / "small" / "profile").glob("*.json.gz"))
    assert [hook.type for hook in RunConfig.load(in_tmp / "runs" / "small" / "config.yaml").hooks] == ["profiler"]


def test_a_hook_of_the_file_is_not_doubled(in_tmp):
    done = invoke("--profile", *SHORT, "hooks=[{type: profiler, first: 1, steps: 2}]")
    assert done.exit_code == 0, done.output
    assert [path.name for path in (in_tmp / "runs" / "small" / "profile").glob("*.gz")] == ["steps-2-3-rank-0.json.gz"]


def test_resuming_without_a_profile_is_not_a_change(in_tmp):
    assert invoke("--profile", *SHORT).exit_code == 0
    done = invoke(*SHORT, "trainer.max_steps=6")
    assert done.exit_code == 0, done.output
    assert "state of hooks" not in done.output


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_a_runtime_mode_as_mode_is_rejected_with_its_setting(in_tmp, mode):
    done = invoke("--mode", mode)
    assert isinstance(done.exception, ConfigError)
    assert f"write runtime.mode={mode}" in str(done.exception)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--fast-dev-run"], "keeps nothing"), (["--eval-only"], "trains nothing")],
)
def test_a_profile_without_a_run_folder_or_training_is_rejected(in_tmp, flags, message):
    done = invoke("--profile", *flags)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert list(in_tmp.iterdir()) == []
