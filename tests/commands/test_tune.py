"""`trainwright tune`: what is printed, and that the run's folder is not touched."""

import json
import logging
import re
from pathlib import Path

import pytest
from tests.messages import raises
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.commands.tune import draw_curve
from trainwright.errors import ConfigError, TrainwrightError

RUN = Path(__file__).parents[1] / "project" / "run.yaml"
EASY = ("data.train.size=400", "model.dropout=0", "trainer.global_batch_size=32")


@pytest.fixture(autouse=True)
def _log_as_before():
    package = logging.getLogger("trainwright")
    handlers, level = list(package.handlers), package.level
    yield
    package.handlers[:] = handlers
    package.setLevel(level)


def invoke(*arguments):
    done = CliRunner().invoke(app, ["tune", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_curve_the_suggestion_and_the_override_are_shown(in_tmp):
    shown = invoke("lr", RUN, *EASY, "--steps", 60, "--min", 1e-5)
    rate = re.search(r"Suggested learning rate: (\S+), because", shown)[1]
    assert f"Use it with: trainer.optimizer.lr={rate}" in shown
    assert "Image: small-lr.png" in shown
    assert shown.isascii()
    assert max(map(len, shown.split("Suggested")[0].splitlines())) <= 84
    assert [path.name for path in in_tmp.iterdir()] == ["small-lr.png"]
    assert (in_tmp / "small-lr.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_the_whole_curve_and_without_a_descent_a_reason(in_tmp):
    found = json.loads(invoke("lr", RUN, "--steps", 40, "--max", 1e-6, "--json", "--output", in_tmp / "curve.svg"))
    assert found["suggestion"] is None
    assert "flat" in found["reason"]
    assert found["setting"] == "trainer.optimizer.lr"
    assert len(found["rates"]) == len(found["losses"]) == 40
    assert (in_tmp / "curve.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (("--min", 1, "--max", 0.1), ("--min", "--max")),
        (("--min", 0), ("--min",)),
        (("--output", "no/curve.png"), ("--output", "no")),
        (("--optimizer", "main"), ("--optimizer",)),
    ],
)
def test_a_wrong_option_is_rejected_before_anything_runs(in_tmp, arguments, mentions):
    with raises(ConfigError, *mentions):
        invoke("lr", RUN, *arguments)
    assert list(in_tmp.iterdir()) == []


def test_an_image_that_cannot_be_written_is_an_error(in_tmp):
    with raises(TrainwrightError, "curve.abc"):
        invoke("lr", RUN, *EASY, "--steps", 20, "--output", "curve.abc")


def test_without_matplotlib_the_command_says_how_to_get_it(in_tmp, monkeypatch):
    monkeypatch.setattr("trainwright.commands.tune.find_spec", lambda name: None)
    assert "pip install 'trainwright[plot]'" in invoke("lr", RUN, *EASY, "--steps", 20)
    assert list(in_tmp.iterdir()) == []


def test_an_existing_run_is_not_changed(in_tmp):
    from trainwright import RunConfig, build_trainer

    build_trainer(RunConfig.load(RUN)).train()
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
    assert "trainer.optimizer.lr=" in invoke("lr", Path("runs/small"), "--trust", *EASY, "--steps", 40, "--min", 1e-5)
    assert "trainer.micro_batch_size=" in invoke("batch", RUN, "--largest", 4)
    assert "data.num_workers=0" in invoke("workers", RUN, "--counts", "0", "--steps", 5)
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == before


def test_sizes_and_workers_are_also_json(in_tmp):
    found = json.loads(invoke("batch", RUN, "--json"))
    assert [each["size"] for each in found["sizes"]] == [1, 2, 4, 8]
    assert found["suggestion"] in (1, 2, 4, 8)
    found = json.loads(invoke("workers", RUN, "--counts", "0", "--steps", 5, "--json"))
    assert [each["num_workers"] for each in found["times"]] == [0]
    with raises(ConfigError, "--counts"):
        invoke("workers", RUN, "--counts", "0,two")


def test_a_curve_is_drawn_with_its_marked_rate():
    rates = [10.0**power for power in range(-5, 1)]
    lines = draw_curve(rates, [3, 3, 2, 1, 1, 2], [3, 3, 2, 1, 1, 2], marked=1e-2)
    assert len({line.index("|", 12) for line in lines[1:-3] if "|" in line[12:]}) == 1
    assert "1e-5" in lines[-2]
    assert "1e0" in lines[-2]
    assert sum(line.count("*") for line in lines) == 6
