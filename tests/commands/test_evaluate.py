"""`trainwright evaluate`: benchmarks of a run and of a file, and options that belong to lm-eval's tasks."""

from __future__ import annotations

import json

import pytest
from tests.benchmarks.quiz import build
from tests.messages import check_message
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.errors import ConfigError, TrainwrightError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trainer = build(tmp_path_factory.mktemp("project"), "checkpoint.keep_best={metric: quiz/acc, mode: max}")
    logs = trainer.train()
    return trainer.folder, logs


def invoke(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_the_benchmarks_of_the_run_are_evaluated(run):
    folder, logs = run
    done = invoke(folder, "--step", "best")
    assert json.loads(done.stdout) == logs


def test_those_of_a_file_are_added_and_replace_their_names(run, tmp_path):
    folder, logs = run
    entries = [
        {"type": "multiple_choice", "path": "quiz.jsonl", "tokenizer": "bytes", "max_samples": 1},
        {"type": "generate", "name": "more", "path": "cities.jsonl", "tokenizer": "bytes", "max_new_tokens": 2},
    ]
    for content in (entries, {"benchmarks": entries}, {"evaluation": {"benchmarks": entries}}):
        (tmp_path / "file.yaml").write_text(json.dumps(content))
        found = json.loads(invoke(folder, "--benchmarks", tmp_path / "file.yaml").stdout)
        assert found.keys() == {*logs, "more/exact_match", "more/truncated"}
        assert found["quiz/acc"] in (0.0, 1.0)
        assert found["more/truncated"] == 1.0


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        (["--limit", 3], ["--limit", "--tasks"]),
        (["--include-path", "."], ["--include-path", "--tasks"]),
        (["--apply-chat-template"], ["--apply-chat-template", "--tasks"]),
        (["--tasks", "a", "--benchmarks", "b.yaml"], ["--benchmarks", "--tasks"]),
        (["--tasks", "a", "--include-path", "nowhere"], ["--include-path", "nowhere"]),
        (["--tasks", ","], ["--tasks"]),
        (["--benchmarks", "nowhere.yaml"], ["--benchmarks", "nowhere.yaml"]),
    ],
)
def test_options_without_effect_are_rejected(run, options, mentions, in_tmp):
    done = invoke(run[0], *options)
    assert isinstance(done.exception, ConfigError)
    check_message(str(done.exception), *mentions)


@pytest.mark.parametrize("content", ["[]", "text", "[{path: a}]", "{a: 1", "[quiz]"])
def test_a_file_of_another_form_is_rejected(run, tmp_path, content):
    (tmp_path / "file.yaml").write_text(content)
    done = invoke(run[0], "--benchmarks", tmp_path / "file.yaml")
    assert isinstance(done.exception, ConfigError)
    assert "file.yaml" in str(done.exception)


def test_an_error_names_the_line_of_the_file(run, tmp_path):
    (tmp_path / "file.yaml").write_text(
        "- {type: multiple_choice, path: quiz.jsonl, tokenizer: bytes}\n"
        "- {type: generate, name: more, path: absent.jsonl, tokenizer: bytes}\n"
    )
    done = invoke(run[0], "--benchmarks", tmp_path / "file.yaml")
    assert isinstance(done.exception, TrainwrightError)
    assert str(done.exception.where) == f"{tmp_path / 'file.yaml'}:2"


def test_a_run_is_found_by_its_name(run, tmp_path, monkeypatch):
    folder, logs = run
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quiz-run").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert json.loads(invoke("quiz-run", "--step", "best").stdout) == logs
    done = invoke("quiz-rnu")
    assert isinstance(done.exception, ConfigError)
    check_message(str(done.exception), "quiz-rnu", "trainwright runs")
