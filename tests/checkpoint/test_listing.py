"""What a folder's names and sizes say of its checkpoints; the command's own tests are in tests/commands."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.messages import raises

from trainwright import RunConfig
from trainwright.checkpoint.listing import checkpoints_location, list_checkpoints
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (10, 20):
        store.write(step, {"model": {"w": torch.ones(step)}}, metrics={"loss": 1 / step})
    return store


def test_a_run_s_checkpoints_are_where_its_settings_say(tmp_path):
    source = tmp_path / "run.yaml"
    source.write_text("name: x\n")

    def place(*overrides):
        return checkpoints_location(tmp_path / "run", RunConfig.load(source, overrides))

    assert place() == tmp_path / "run" / "checkpoints"
    assert place("checkpoint.folder=s3://bucket/run") == "s3://bucket/run/x"
    assert place(f"checkpoint.folder={tmp_path}/other") == tmp_path / "other" / "x"
    assert place(f"checkpoint.folder=file://{tmp_path}/other") == tmp_path / "other" / "x"


def test_what_the_store_counts_is_listed(store):
    found = list_checkpoints(store.folder)
    assert [one.step for one in found] == store.steps()
    assert [dict(one.metrics) for one in found] == [store.metrics(step) for step in store.steps()]
    assert found[0].size == sum(path.stat().st_size for path in store.path(10).iterdir())
    assert [one.problem for one in found] == [None, None]
    assert list_checkpoints(store.folder.parent / "nowhere") == []


def test_one_that_is_being_replaced_counts_while_nothing_bears_its_name(store):
    aside = store.folder / ".aside-step-00000020-0a1b"
    shutil.copytree(store.path(20), aside)
    assert [one.name for one in list_checkpoints(store.folder)] == ["step-00000010", "step-00000020"]
    shutil.rmtree(store.path(20))
    assert [one.name for one in list_checkpoints(store.folder)] == ["step-00000010", aside.name]
    assert store.steps() == [10, 20]


def test_links_staging_and_trash_are_not_listed(store):
    store.mark_best(10)
    for name in (".staging-step-00000030-0a", ".trash-step-00000030-0a", "step-5"):
        (store.folder / name).mkdir()
    assert [one.step for one in list_checkpoints(store.folder)] == [10, 20]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_a_manifest_that_cannot_be_read_is_a_problem(store, content):
    (store.path(20) / "MANIFEST.json").write_bytes(content)
    found = list_checkpoints(store.folder)
    assert found[1].problem.startswith("The manifest is damaged")
    assert found[0].problem is None


def test_a_folder_of_another_name_is_a_problem(store):
    store.path(20).rename(store.path(30))
    assert list_checkpoints(store.folder)[1].problem == "the manifest is of step 20"


def test_a_file_in_place_of_the_folder_is_explained(tmp_path):
    (tmp_path / "checkpoints").touch()
    with raises(CheckpointError):
        list_checkpoints(tmp_path / "checkpoints")
