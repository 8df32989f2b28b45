"""`trainwright export`: what it prints and writes."""

from __future__ import annotations

import pytest
from tests.export.runs import train_run
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.errors import CheckpointError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_run(tmp_path_factory.mktemp("project"))[0]


def invoke(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.mark.parametrize("options", [[], ["--dtype", "bf16"], ["--step", "2"], ["--format", "safetensors"]])
def test_the_folder_is_written_and_named(run, tmp_path, options):
    done = invoke(run, "--to", tmp_path / "out", *options)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path / 'out'}\n"
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_folder_without_a_run_is_an_explained_error(tmp_path):
    done = invoke(tmp_path, "--to", tmp_path / "out")
    assert isinstance(done.exception, CheckpointError)
    assert "is not a run folder" in str(done.exception)


def test_an_unknown_format_shows_the_known_ones(run, tmp_path):
    done = invoke(run, "--to", tmp_path / "out", "--format", "onnx")
    assert done.exit_code == 2
    assert "huggingface" in done.output


def test_a_folder_with_files_of_others_needs_overwrite(run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = invoke(run, "--to", tmp_path)
    assert isinstance(done.exception, CheckpointError)
    assert "--overwrite" in str(done.exception)
    for _ in range(2):
        done = invoke(run, "--to", tmp_path, "--overwrite")
        assert done.exit_code == 0, done.output
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert invoke(run, "--to", tmp_path).exit_code == 0  # an earlier export by now
