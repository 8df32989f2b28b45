"""The run folder."""

from __future__ import annotations

import json
import os

import pytest
from tests.messages import raises

from trainwright.build.run import build_trainer
from trainwright.checkpoint import run_folder as run_folders
from trainwright.config import RunConfig
from trainwright.errors import CheckpointError, ConfigError


def config_for(tmp_path, **settings):
    return RunConfig.from_dict({"name": "one", "output_dir": str(tmp_path), **settings})


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "one"
    (folder / "checkpoints" / "step-00000012").mkdir(parents=True)
    run_folders.save_settings(folder, config_for(tmp_path), "cpu")
    return folder


def test_the_run_folder_is_output_dir_and_name(tmp_path):
    assert run_folders.run_folder(config_for(tmp_path)) == tmp_path / "one"
    assert not (tmp_path / "one").exists()


def test_one_earlier_run_is_kept_beside(run):
    assert run_folders.set_aside(run) == run.with_name("one.old")
    assert not run.exists()
    assert (run.with_name("one.old") / "config.yaml").exists()
    run.mkdir()
    assert run_folders.set_aside(run) == run.with_name("one.old")
    assert [each.name for each in run.parent.iterdir()] == ["one.old"]
    assert list(run.with_name("one.old").iterdir()) == []


def test_the_target_of_a_link_is_never_deleted(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    run.with_name("one.old").symlink_to(tmp_path / "elsewhere")
    run_folders.set_aside(run)
    assert (tmp_path / "elsewhere").is_dir()
    assert (run.with_name("one.old") / "config.yaml").exists()


@pytest.mark.parametrize("name", ["one.old", "group.old/one"])
def test_the_name_of_an_earlier_run_is_reserved(tmp_path, name):
    config = RunConfig.from_dict({"name": name, "output_dir": str(tmp_path)})
    with raises(ConfigError, "name", ".old"):
        run_folders.reject_reserved(config)
    with pytest.raises(ConfigError):
        build_trainer(config)


def test_where_nothing_is_nothing_is_set_aside(tmp_path):
    assert run_folders.set_aside(tmp_path / "one") is None


def test_preparing_makes_the_folder_and_leaves_nothing_in_it(tmp_path):
    run_folders.prepare(tmp_path / "deep" / "one")
    assert list((tmp_path / "deep" / "one").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(ConfigError, "output_dir", "file/one"):
        run_folders.prepare(tmp_path / "file" / "one")


def test_saved_settings_read_back_equal(tmp_path, run):
    assert run_folders.read_config(run) == config_for(tmp_path)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["device"] == "cpu"
    assert {"python", "torch", "numpy", "platform"} <= environment.keys()


def test_equal_settings_are_not_written_again(tmp_path, run):
    for file in run.glob("*.*"):
        os.utime(file, (1, 1))
    run_folders.save_settings(run, config_for(tmp_path), "cpu")
    assert {file.stat().st_mtime for file in run.glob("*.*")} == {1}
    run_folders.save_settings(run, config_for(tmp_path, seed=1), "cuda")
    assert (run / "config.yaml").stat().st_mtime != 1
    assert (run / "environment.json").stat().st_mtime != 1


def test_the_environment_holds_no_variables(tmp_path, run, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    run_folders.save_settings(run, config_for(tmp_path), "cpu")
    assert "hunter2" not in (run / "environment.json").read_text()


def test_a_folder_without_a_config_has_none(tmp_path):
    assert run_folders.read_config(tmp_path) is None


def test_a_run_is_found_by_its_folder_its_checkpoints_and_one_of_them(run):
    assert run_folders.find_run(run) == (run, None)
    assert run_folders.find_run(run / "checkpoints") == (run, None)
    assert run_folders.find_run(run / "checkpoints" / "step-00000012") == (run, 12)


def test_a_run_is_found_from_inside(run, monkeypatch):
    monkeypatch.chdir(run)
    from pathlib import Path

    assert run_folders.find_run(Path()) == (run, None)
    monkeypatch.chdir(run / "checkpoints")
    assert run_folders.find_run(Path("step-00000012")) == (run, 12)


@pytest.mark.parametrize("inside", [".", "checkpoints/step-00000099", "checkpoints/damaged-step-00000012", "nowhere"])
def test_anything_else_is_not_a_run(run, inside):
    wrong = run.parent / "other" if inside == "." else run / inside
    with raises(CheckpointError, wrong, "runs/NAME"):
        run_folders.find_run(wrong)


def test_a_checkpoint_whose_run_lost_its_config_is_rejected(run):
    (run / "config.yaml").unlink()
    with raises(CheckpointError, "config.yaml"):
        run_folders.find_run(run / "checkpoints" / "step-00000012")
