"""`trainwright new`: its projects train unchanged, and existing files stay."""

import ast
import json
import sys
from pathlib import Path

import pytest
from tests.forked_program import run_forked
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.commands.new import Kind, template_folder

KINDS = [kind.value for kind in Kind]
FOLDERS = {"trainers", "models", "optimizers", "collators", "hooks", "datasets", "tests"}


def invoke(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("classifier", []),
        ("custom", []),
        ("lm", ["trainer.max_steps=40", "evaluation.every_steps=20"]),
        pytest.param("lm", [], marks=pytest.mark.slow),
    ],
)
def test_a_new_project_trains_unchanged_and_shows_the_next_commands(kind, overrides, in_tmp, monkeypatch):
    done = invoke("new", "mine", "--kind", kind)
    assert done.exit_code == 0, done.output
    assert "  cd mine\n" in done.output
    assert "  trainwright train run.yaml" in done.output
    monkeypatch.chdir(in_tmp / "mine")
    trained = invoke("train", "run.yaml", *overrides)
    assert trained.exit_code == 0, trained.exception
    lines = [json.loads(line) for line in next(Path("runs").glob("*/metrics.json")).read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert any("valid/loss" in line for line in lines)


# A classifier is what docs/getting_started.md makes, and tests, too.
@pytest.mark.parametrize("kind", ["lm", "custom", pytest.param("classifier", marks=pytest.mark.slow)])
def test_the_test_of_a_new_project_passes(kind, in_tmp):
    assert invoke("new", "mine", "--kind", kind).exit_code == 0
    command = ["-q", "-p", "no:cacheprovider", "--rootdir", "."]
    done = run_forked(lambda: sys.exit(int(pytest.main(command))), cwd=in_tmp / "mine")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_each_component_is_one_short_file_with_a_summary(kind):
    folder = template_folder(Kind(kind))
    assert {path.parent.name for path in folder.glob("*/*.py")} == FOLDERS
    for path in folder.rglob("*.py"):
        text = path.read_text("utf-8")
        assert len(text.splitlines()) < 60, path
        assert ast.get_docstring(ast.parse(text)), path
    assert len((folder / "run.yaml").read_text("utf-8").splitlines()) < 60


@pytest.mark.parametrize("kind", KINDS)
def test_each_readme_names_every_file(kind):
    folder = template_folder(Kind(kind))
    readme = (folder / "README.md").read_text("utf-8")
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.py")]
    assert [file for file in files if f"`{file}`" not in readme] == []


def test_a_classifier_is_written_by_default_and_no_cache_files(in_tmp):
    assert invoke("new", "mine").exit_code == 0
    template = template_folder(Kind.CLASSIFIER)
    written = {path.relative_to("mine") for path in Path("mine").rglob("*") if path.is_file()}
    assert Path("trainers/smooth.py") in written
    assert Path(".gitignore") in written
    assert {path.suffix for path in written} <= {".py", ".yaml", ".md", ""}
    assert all((Path("mine") / path).read_bytes() == (template / path).read_bytes() for path in written)


def test_an_empty_folder_and_the_current_one_are_taken(in_tmp, monkeypatch):
    Path("empty").mkdir()
    monkeypatch.chdir("empty")
    done = invoke("new", ".")
    assert done.exit_code == 0
    assert Path("run.yaml").is_file()
    assert "cd " not in done.output  # it is here


def test_a_folder_that_holds_something_is_rejected_by_name_and_left_alone(in_tmp):
    Path("mine").mkdir()
    Path("mine/run.yaml").write_text("mine")
    done = invoke("new", "mine")
    assert str(done.exception) == (
        "mine is not empty: it has run.yaml. Nothing was written. Use a folder that does not exist, or an empty one."
    )
    assert [path.name for path in Path("mine").iterdir()] == ["run.yaml"]
    assert Path("mine/run.yaml").read_text() == "mine"


def test_a_file_is_rejected_by_name(in_tmp):
    Path("mine").write_text("")
    assert "mine exists and is not a folder" in str(invoke("new", "mine").exception)


def test_a_folder_below_a_file_cannot_be_written(in_tmp):
    Path("file").write_text("")
    error = str(invoke("new", "file/mine").exception)
    assert "cannot be written" in error
    assert "file" in error


def test_an_unknown_kind_is_rejected_with_the_known_ones(in_tmp):
    done = invoke("new", "mine", "--kind", "gan")
    assert done.exit_code == 2
    assert "custom" in done.output
    assert not Path("mine").exists()
