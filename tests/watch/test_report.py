"""report.html and the Markdown of a run."""

import json
import re

import numpy as np
import pytest
from tests.watch.folders import HOSTILE, write_hostile_run, write_lines
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.errors import TrainwrightError
from trainwright.watch import report
from trainwright.watch.report import markdown, write_report


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_a_run_writes_its_report_at_its_end_and_an_interrupted_one_does_not(runs):
    html = (runs / "plain" / "report.html").read_text()
    assert "finished, step 12 of 12" in html
    assert data_of(html)["curves"]["loss"]["x"] == list(range(1, 13))
    for part in ("Settings that differ from the defaults", "Environment", "Model", "Checkpoints", "Samples"):
        assert part in html
    assert "★ best" in html
    assert html.count("data:image/png;base64,") == 1
    log = (runs / "group" / "broken" / "log.txt").read_text()
    assert "report" not in log


def test_an_interrupted_run_has_no_report_yet(tmp_path):
    from tests.watch.folders import train

    folder = train(tmp_path, "stopped", stop_at=3)
    assert (folder / "metrics.json").exists()
    assert not (folder / "report.html").exists()


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    write_lines(tmp_path / "metrics.json", {"step": 1, "loss": 1.0})
    (tmp_path / ".report.html.writing").mkdir()
    report.write_final_report(tmp_path)
    assert "report.html cannot be written" in caplog.text
    assert "trainwright report" in caplog.text


def test_the_report_has_no_external_resource_and_allows_only_its_own_script(runs):
    html = (runs / "plain" / "report.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-\S+'; script-src 'sha256-\S+'; img-src data:", policy)
    assert re.findall(r'(?:src|href)="(?!data:)[^"]*"', html) == []
    assert "style=" not in re.sub(r"<noscript>.*?</noscript>", "", html.partition("</head>")[2]).partition("<script")[0]


def test_the_report_of_100_000_steps_is_small(tmp_path):
    generator = np.random.default_rng(0)
    names = ["loss", *(f"metric {number}" for number in range(20))]
    values = generator.random((20_000, len(names))).tolist()
    lines = ({"step": 5 * step, **dict(zip(names, row, strict=True))} for step, row in enumerate(values, 1))
    write_lines(tmp_path / "metrics.json", *lines, {"step": 100_001, "sample": "x" * 10**6})
    path = write_report(tmp_path)
    assert path.stat().st_size < 1e6
    curve = data_of(path.read_text())["curves"]["loss"]
    assert min(curve["y"]) == pytest.approx(min(row[0] for row in values), rel=1e-4)
    assert curve["x"][-1] == 100_000


def test_of_too_many_curves_losses_and_evaluations_are_kept(tmp_path):
    layers = {f"layer_{number}/norm": 1.0 for number in range(200)}
    write_lines(tmp_path / "metrics.json", *({"step": step, **layers, "loss": 2.0, "lr": 0.1} for step in (1, 2)))
    write_lines(tmp_path / "metrics.json", {"step": 2, "valid/loss": 1.0, "valid/accuracy": 0.5})
    html = write_report(tmp_path).read_text()
    curves = data_of(html)["curves"]
    assert len(curves) == 150
    assert {"loss", "lr", "valid/loss", "valid/accuracy", "layer_0/norm"} <= curves.keys()
    assert "150 of 204 curves" in html


def test_names_and_texts_of_others_are_text(tmp_path):
    html = write_report(write_hostile_run(tmp_path)).read_text()
    assert "<img src=x" not in html
    assert "&lt;img src=x" in html
    assert HOSTILE in data_of(html)["curves"]


def test_the_markdown_has_metrics_settings_and_environment(runs):
    done = invoke(runs / "group" / "broken", "--markdown")
    assert done.exit_code == 0
    first, _, facts, *_ = done.stdout.splitlines()
    assert first == "### `group/broken`: finished, step 12 of 12"
    assert "1 restart, 1 anomaly" in facts
    assert re.search(r", \d+:\d\d of training,", facts)
    row = next(line for line in done.stdout.splitlines() if line.startswith("| `valid/loss` |"))
    assert re.fullmatch(r"\| `valid/loss` \| [\d.]+ \| [\d.]+ at \d+ \| [▁▂▃▄▅▆▇█]+ \|", row)
    assert "| `trainer.optimizer.lr` | `0.01` |" in done.stdout
    assert "torch `" in done.stdout
    assert "data.on_error" not in done.stdout  # a default


def test_markdown_of_others_has_no_markup(tmp_path):
    text = markdown(write_hostile_run(tmp_path))
    outside = re.sub(r"`[^`\n]*`", "", text)
    assert re.findall(r"<(?!/?(?:details|summary)>)", outside) == []


def test_the_command_writes_where_it_is_told(runs, tmp_path):
    done = invoke(runs / "plain", "--output", tmp_path / "a.html")
    assert done.stdout.strip() == str(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert invoke(runs / "plain", "--markdown", "--output", tmp_path / "a.md").exit_code == 0
    assert (tmp_path / "a.md").read_text().startswith("### `plain`")


def test_a_folder_without_a_run_is_explained(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        done = invoke(path)
        assert isinstance(done.exception, TrainwrightError)
        assert "is not a run folder" in str(done.exception)
    write_lines(tmp_path / "metrics.json", {"step": 1, "loss": 1.0})
    done = invoke(tmp_path, "--output", tmp_path / "absent" / "a.html")
    assert isinstance(done.exception, TrainwrightError)
    assert "--output" in str(done.exception)
