"""`trainwright data`: what it prints, how it exits, and that it leaves the run alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.analysis.projects import write_project
from tests.forked_program import run_command
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.commands.new import Kind, template_folder

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.yaml"
SMALL = ("data.train.max_megabytes=0.3", "data.eval.valid.max_megabytes=0.3")


def invoke(*arguments):
    return CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "80"})


@pytest.fixture
def small_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_quickstart_is_shown(in_tmp, small_cache):
    done = invoke(QUICKSTART, "--show", "1", *SMALL)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("train  data.train\n  what      stdlib_code (StdlibCode)\n")
    for words in ("128 tokens", "as input_ids, none is -100", "16 × 128  int64", "All are 128.", "valid"):
        assert words in done.stdout
    assert sorted(path.name for path in in_tmp.iterdir()) == ["cache"]


@pytest.mark.parametrize("kind", list(Kind))
def test_every_template_can_be_looked_at(in_tmp, small_cache, kind):
    shutil.copytree(template_folder(kind), in_tmp / "project")
    small = ("data.train.max_megabytes=0.2", "data.eval.valid.max_megabytes=0.2") if kind.value == "lm" else ()
    done = invoke("project/run.yaml", *small)
    assert done.exit_code == 0, done.output
    assert "first batch" in done.stdout
    assert not list(in_tmp.rglob("runs"))


def test_digits_are_drawn(in_tmp):
    done = invoke(write_project(in_tmp, "  train: {type: digits}\n"), "--show", "2")
    assert "position 0         position 1" in done.stdout
    assert "█" in done.stdout


def test_json_is_one_object(in_tmp):
    done = invoke(write_project(in_tmp, "  train: {type: mine.Pairs}\n"), "--json", "--show", "2")
    told = json.loads(done.stdout)
    assert (told["sets"][0]["num_samples"], len(told["sets"][0]["samples"])) == (30, 2)


def test_a_failing_collator_exits_with_2_after_all_else_was_shown(in_tmp):
    run = write_project(in_tmp, "  train: {type: mine.Tokens}\n")
    done = run_command("data", run, env={"COLUMNS": "80"})
    assert done.returncode == 2
    assert "position 0, row" in done.stdout
    assert "\033[" not in done.stdout
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_the_command_imports_no_torch_before_it_runs():
    program = "import sys, trainwright.commands.data\nassert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
