"""The cache: files and folders arrive whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainwright.data.cache import cache_root, staged_file, sync_folder


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / "trainwright"
    assert cache_root("~/mine") == Path("~/mine").expanduser()


def test_a_folder_that_is_synced_stays_as_it_is(tmp_path):
    (tmp_path / "file").touch()
    sync_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "nothing")


def test_a_staged_file_appears_only_when_all_is_written(tmp_path):
    path = tmp_path / "deep" / "file"
    with staged_file(path) as file:
        file.write(b"abc")
        assert not path.exists()
    assert path.read_bytes() == b"abc"
    assert os.listdir(path.parent) == ["file"]  # noqa: PTH208


def test_a_failure_leaves_the_older_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail_half_way():
        with staged_file(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]
