"""`trainwright compare`: what differs between real runs."""

import json
import re
from pathlib import Path

import pytest
from tests.terminals import command
from typer.testing import CliRunner

from trainwright import RunConfig, build_trainer
from trainwright.checkpoint import run_folder as run_folders
from trainwright.cli import app
from trainwright.commands.compare import ENVIRONMENT_FILE
from trainwright.errors import ConfigError

RUN = str(Path(__file__).parents[1] / "project" / "run.yaml")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with runs/one and runs/two, of different rates and lengths."""
    root = tmp_path_factory.mktemp("compare")
    for name, rate, steps in (("one", 0.01, 12), ("two", 0.02, 9)):
        overrides = [f"name={name}", f"output_dir={root / 'runs'}", f"trainer.optimizer.lr={rate}"]
        build_trainer(RunConfig.load(RUN, [*overrides, f"trainer.max_steps={steps}"])).train()
    environment = root / "runs" / "two" / "environment.json"
    environment.write_text(environment.read_text().replace('"torch": "', '"torch": "0.'))
    return root


@pytest.fixture
def run(project, monkeypatch):
    monkeypatch.chdir(project)
    return lambda *arguments: CliRunner().invoke(app, ["compare", *arguments])


def test_settings_metrics_and_environments_are_next_to_each_other(run):
    shown = run("one", "runs/two").stdout
    rows = [line.split() for line in shown.splitlines()]
    assert ["trainer.optimizer.lr", "0.01", "0.02"] in rows
    assert ["trainer.max_steps", "12", "9"] in rows
    assert not any(row[:1] == ["name"] for row in rows)
    losses = next(row for row in rows if row[:1] == ["valid/loss"])
    assert losses[2:4] != losses[1:2]
    assert any(row[:1] == ["torch"] and row[2].startswith("0.") for row in rows)


def test_json_has_the_best_value_with_its_step(run, project):
    found = json.loads(run("one", "two", "--json").stdout)
    lines = [json.loads(line) for line in (project / "runs/one/metrics.json").read_text().splitlines()]
    values = {line["step"]: line["valid/loss"] for line in lines if "valid/loss" in line}
    one = found["metrics"]["valid/loss"]["one"]
    assert one["best"] == min(values.values()) == values[one["best_step"]]
    assert one["last"] == values[12]
    assert found["settings"]["trainer.optimizer.lr"] == [0.01, 0.02]


def test_a_requested_chart_is_also_printed_to_a_file_and_without_colors(run):
    shown = run("one", "two", "--metric", "valid/loss").stdout
    assert "valid/loss   ━━ one   ━━ two" in shown
    assert re.search("[⠁-⣿]", shown)
    assert "\x1b" not in shown
    assert "━━" not in run("one", "two").stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["one"], "two or more"),
        (["one", "three"], "three is not a run folder"),
        (["one", "two", "--metric", "los"], 'Did you mean "loss"?'),
        (["one", "two", "--metric", "loss", "--json"], "--metric has no effect with --json"),
    ],
)
def test_mistakes_are_explained(arguments, part, run):
    error = run(*arguments).exception
    assert isinstance(error, ConfigError)
    assert part in str(error)


def test_a_terminal_shows_the_curves_in_one_chart(project):
    terminal = command("compare", "one", "two", "--metric", "valid/loss", cwd=project, columns=100, rows=60)
    assert terminal.wait() == 0
    assert "valid/loss   ━━ one   ━━ two" in terminal.shown()
    colors = {cell.fg for row in terminal.screen.buffer.values() for cell in row.values() if "⠀" < cell.data <= "⣿"}
    assert colors == {"cyan", "brown"}  # pyte's word for yellow


def test_the_name_of_the_file_is_that_which_a_run_writes():
    assert ENVIRONMENT_FILE == run_folders.ENVIRONMENT_FILE
