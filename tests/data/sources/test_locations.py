"""What a path names: files, globs, folders and URLs, and what is said when there is nothing."""

from __future__ import annotations

import gzip
import uuid
from pathlib import Path

import fsspec
import pytest
from tests.messages import raises

from trainwright.data.sources.locations import FileLocation, find_files, remote_version
from trainwright.errors import ConfigError, DataError


@pytest.fixture
def memory():
    """A folder of its own in fsspec's memory, as a URL, and the file system."""
    return f"memory://{uuid.uuid4().hex}", fsspec.filesystem("memory")


def names(paths, folder, suffixes=(".txt",)):
    return [Path(each.name).name for each in find_files(paths, suffixes=suffixes, project_dir=folder)]


def write(folder, *files):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_a_file_a_glob_a_folder_and_a_list_are_found_in_order(tmp_path):
    write(tmp_path, "b.txt", "a.txt", "sub/c.txt.gz", "other.csv", ".hidden/d.txt", "odd[1].txt")
    assert names("b.txt", tmp_path) == ["b.txt"]
    assert names("odd[1].txt", tmp_path) == ["odd[1].txt"]
    assert names("[ab].txt", tmp_path) == ["a.txt", "b.txt"]
    assert names("**/*.gz", tmp_path) == ["c.txt.gz"]
    assert names(".", tmp_path) == ["a.txt", "b.txt", "odd[1].txt", "c.txt.gz"]
    assert names(["b.txt", str(tmp_path / "a.txt"), f"file://{tmp_path}/b.txt"], tmp_path) == [
        "b.txt",
        "a.txt",
        "b.txt",
    ]


def labels(paths, folder):
    return [each.label for each in find_files(paths, suffixes=(".txt",), project_dir=folder)]


def test_a_label_is_the_name_below_what_was_asked_for(tmp_path, memory):
    write(tmp_path, "data/a.txt", "data/sub/b.txt", "data/odd[1].txt")
    url, files = memory
    for name in ("a.txt", "sub/b.txt"):
        files.pipe(f"{url}/{name}", b"x")
    assert labels("data", tmp_path) == ["a.txt", "odd[1].txt", "sub/b.txt"]
    assert labels(["data/sub/b.txt", "data/odd[1].txt"], tmp_path) == ["b.txt", "odd[1].txt"]
    assert labels("data/**/*.txt", tmp_path) == ["a.txt", "odd[1].txt", "sub/b.txt"]
    assert labels("da*/sub/b.txt", tmp_path) == ["data/sub/b.txt"]
    assert labels([url, f"{url}/sub/b.txt", f"{url}/*/b.txt"], tmp_path) == ["a.txt", "sub/b.txt", "b.txt", "sub/b.txt"]


def test_what_a_server_tells_changes_with_the_file(memory):
    url, files = memory
    files.pipe(f"{url}/a.txt", b"one")
    for asked in (url, f"{url}/a.txt", f"{url}/*.txt"):
        before = remote_version(asked)
        assert before == remote_version(asked)
        files.pipe(f"{url}/a.txt", b"other" + before[0][1].encode())
        assert len(before) == 1
        assert remote_version(asked) != before
    for unknown in ("", "plain", "odd://x", "memory://", f"{url}/nothing", "a word ://x", "s3:/x"):
        assert remote_version(unknown) in (None, [])


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path):
    write(tmp_path, "data/train.txt")
    with raises(DataError, "data/trian.txt", "data/train.txt"):
        names("data/trian.txt", tmp_path)
    with raises(DataError):
        names("dada/train.txt", tmp_path)
    with raises(DataError):
        names("*.nothing", tmp_path)


def test_a_folder_without_such_files_says_which_endings_are_looked_for(tmp_path):
    write(tmp_path, "data/train.json")
    with raises(DataError):
        names("data", tmp_path)
    with raises(ConfigError):
        names([], tmp_path)


def test_remote_files_are_found_like_local_ones(memory):
    url, files = memory
    for name in ("b.txt", "a.txt", "sub/c.txt", "other.csv"):
        files.pipe(f"{url}/{name}", name.encode())
    assert names(f"{url}/b.txt", None) == ["b.txt"]
    assert names(f"{url}/*.txt", None) == ["a.txt", "b.txt"]
    assert names(url, None) == ["a.txt", "b.txt", "c.txt"]
    assert find_files(f"{url}/b.txt", suffixes=(), project_dir=None)[0].open().read() == b"b.txt"
    with raises(DataError, "/other.csv", golden=False):  # the folder has a random name
        names(f"{url}/othr.csv", None)


def test_an_unknown_protocol_is_an_error_that_names_the_url():
    with raises(DataError, "bucket/x"):
        names("nosuch://bucket/x", None)


def test_a_remote_file_is_copied_once_and_again_when_it_changes(memory, tmp_path):
    url, files = memory
    files.pipe(f"{url}/a.txt", b"one")
    location = find_files(f"{url}/a.txt", suffixes=(), project_dir=None)[0]
    copy = location.fetch(tmp_path)
    assert copy.read_bytes() == b"one"
    copy.write_bytes(b"kept")
    assert location.fetch(tmp_path).read_bytes() == b"kept"
    files.pipe(f"{url}/a.txt", b"other")
    assert location.fetch(tmp_path).read_bytes() == b"other"
    assert all(not each.name.startswith(".") for each in (tmp_path / "files").iterdir())


def test_a_compressed_file_is_decompressed_into_the_cache(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"text"))
    copy = FileLocation(str(path), 1).fetch(tmp_path / "cache")
    assert copy.read_bytes() == b"text"
    assert copy.name.endswith("-a.txt")
