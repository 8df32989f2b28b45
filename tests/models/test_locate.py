"""Finding a model by name: the named folder, the home folders, Hugging Face's cache, and a clear error at the end."""

from __future__ import annotations

import sys

import pytest
from tests.messages import raises

from trainwright.errors import CheckpointError
from trainwright.models.pretrained import find_folder, home_folders


def make_model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def make_snapshot(cache, name):
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    return make_model(repository / "snapshots" / "abc")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No hub, and caches that are empty."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr("trainwright.models.pretrained.find_spec", lambda name: None)
    monkeypatch.setenv("TRAINWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_a_folder_is_taken_as_it_is(tmp_path):
    assert find_folder(tmp_path) == tmp_path


def test_a_name_is_looked_for_in_the_home_path(tmp_path):
    made = make_model(tmp_path / "org" / "small")
    assert find_folder("org/small", home_path=tmp_path) == made


def test_the_user_s_caches_are_looked_into(offline):
    own, cached = make_model(offline / "home" / "mine"), make_snapshot(offline / "hub", "org/theirs")
    assert find_folder("mine") == own
    assert find_folder("org/theirs") == cached
    assert home_folders() == [offline / "home", offline / "hub"]


def test_a_name_that_is_nowhere_says_where_was_looked(offline):
    with raises(CheckpointError):
        find_folder("org/none")


def test_a_hub_that_does_not_answer_is_said(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def fail(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with raises(CheckpointError, "ConnectionError"):
        find_folder("org/none", home_path=tmp_path)


@pytest.mark.parametrize("name", ["/nowhere/a/b", "./nowhere", "../nowhere", "~/nowhere"])
def test_a_path_that_is_no_name_is_rejected_without_asking_anyone(name):
    with raises(CheckpointError):
        find_folder(name)


def test_a_file_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with raises(CheckpointError):
        find_folder(tmp_path / "config.json")
