"""Checkpoints on a real disk: what is written, what is found, and what damage does."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import resource
import shutil
import stat
import threading

import pytest
import torch
from safetensors.torch import load_file
from tests.messages import raises

import trainwright.checkpoint.disk as disk_module
import trainwright.checkpoint.store as store_module
import trainwright.checkpoint.tensor_files as tensor_files
from trainwright.checkpoint.manifest import render_manifest
from trainwright.checkpoint.snapshot import HostBuffers
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError


def parts_of(step):
    """A small run's state: a flat model, tensors within a tree, and a tree alone."""
    return {
        "model": {"a.weight": torch.full((3, 2), float(step)), "b.bias": torch.zeros(2, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{"betas": (0.9, 0.95)}]},
        "hooks": {"InfoHook": {"seen": step, "worst": math.nan}},
    }


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def two(store):
    """A store with the checkpoints of steps 10 and 20."""
    for step in (10, 20):
        store.write(step, parts_of(step), metrics={"valid/loss": 1 / step})
    return store


def names(store):
    """What lies in the folder, without the links for people."""
    return sorted(path.name for path in store.folder.iterdir() if path.name not in ("latest", "best"))


def test_making_a_store_touches_no_disk(store):
    assert not store.folder.exists()
    assert store.steps() == []
    assert store.newest_intact() is None
    store.clean()
    assert not store.folder.exists()


def test_what_is_written_is_read_back(two):
    assert two.steps() == [10, 20]
    assert two.parts(20) == ["model", "optimizer", "hooks"]
    model = two.read(20, "model")
    assert list(model) == ["a.weight", "b.bias"]
    assert torch.equal(model["a.weight"], torch.full((3, 2), 20.0))
    assert model["b.bias"].dtype == torch.bfloat16
    optimizer = two.read(20, "optimizer")
    assert optimizer["state"][0]["step"].item() == 20
    assert optimizer["param_groups"][0]["betas"] == (0.9, 0.95)
    hooks = two.read(20, "hooks")["InfoHook"]
    assert hooks["seen"] == 20
    assert math.isnan(hooks["worst"])


def test_write_returns_the_folder_with_a_manifest_of_its_files(store):
    folder = store.write(1000, parts_of(1000), metrics={"loss": 0.5, "worst": math.nan})
    assert folder == store.folder / "step-00001000"
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert manifest["format"] == 1
    assert manifest["step"] == 1000
    assert manifest["created"].endswith("+00:00")
    assert manifest["parts"] == ["model", "optimizer", "hooks"]
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "MANIFEST.json"}
    assert {name: file["size"] for name, file in manifest["files"].items()} == files
    assert sorted(files) == ["hooks.json", "model.safetensors", "optimizer.json", "optimizer.safetensors"]
    assert names(store) == ["step-00001000"]


def test_the_model_file_is_a_plain_safetensors_file(two):
    tensors = load_file(two.path(20) / "model.safetensors")
    assert torch.equal(tensors["a.weight"], torch.full((3, 2), 20.0))


def test_a_state_dict_comes_back_in_its_own_order_and_tied(store):
    weight = torch.ones(2)
    store.write(1, {"model": {"weight": weight, "bias": torch.zeros(1), "again": weight}, "empty": {}}, metrics={})
    model = store.read(1, "model")
    assert list(model) == ["weight", "bias", "again"]
    assert model["again"] is model["weight"]
    assert store.read(1, "empty") == {}


def test_the_same_state_gives_the_same_hashes(store):
    written = []
    for _ in range(4):
        folder = store.write(5, parts_of(5), metrics={})
        written.append(json.loads((folder / "MANIFEST.json").read_text())["files"])
    assert all(files == written[0] for files in written)


def test_others_may_read_what_their_umask_lets_them(two):
    previous = os.umask(0o027)
    try:
        folder = two.write(30, parts_of(30), metrics={})
    finally:
        os.umask(previous)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}


def test_changing_what_was_read_does_not_change_the_file(two):
    before = two.read(20, "model")["a.weight"].clone()
    two.read(20, "model")["a.weight"].zero_()
    two.verify(20)
    assert torch.equal(two.read(20, "model")["a.weight"], before)


def test_metrics_keep_nan(store):
    folder = store.write(1, {}, metrics={"loss": math.nan, "norm": math.inf, "acc": 0.1})
    assert math.isnan(store.metrics(1)["loss"])
    assert json.loads((folder / "MANIFEST.json").read_text())["metrics"] == {"loss": None, "norm": None, "acc": 0.1}
    assert store.metrics(1)["acc"] == 0.1
    store.verify(1)


def test_a_missing_part_names_the_parts(two):
    with raises(CheckpointError, "scaler"):
        two.read(20, "scaler")


def test_a_missing_step_names_the_steps(two):
    with raises(CheckpointError, "15", "10", "20"):
        two.read(15, "model")


@pytest.mark.parametrize("name", ["../model", "MANIFEST", "a.b", "", "Model"])
def test_a_part_name_that_is_not_a_file_name_is_rejected(store, name):
    with raises(CheckpointError):
        store.write(1, {name: {}}, metrics={})


def test_a_negative_step_is_rejected(store):
    with raises(CheckpointError, "1"):
        store.write(-1, {}, metrics={})


def test_what_cannot_be_saved_leaves_the_old_checkpoint_and_no_staging(two):
    with raises(CheckpointError, "hooks.InfoHook.seen"):
        two.write(20, {**parts_of(21), "hooks": {"InfoHook": {"seen": {1}}}}, metrics={})
    assert names(two) == ["step-00000010", "step-00000020"]
    assert two.newest_intact() == 20


def test_writing_a_step_again_replaces_it(two):
    two.write(20, {"model": {"w": torch.ones(1)}}, metrics={"valid/loss": 7.0})
    assert two.parts(20) == ["model"]
    assert two.metrics(20) == {"valid/loss": 7.0}
    assert names(two) == ["step-00000010", "step-00000020"]


def test_staged_parts_are_written_as_the_state_itself(store):
    by_state = store.write(1, parts_of(7), metrics={"loss": 0.5})
    by_staged = store.write_snapshot(2, HostBuffers().copy_to_host(parts_of(7)), metrics={"loss": 0.5})
    manifests = [json.loads((folder / "MANIFEST.json").read_text()) for folder in (by_state, by_staged)]
    for key in ("files", "parts", "metrics"):
        assert manifests[0][key] == manifests[1][key]
    store.verify(2)


def test_the_link_latest_follows_the_newest_commit(two):
    assert (two.folder / "latest").readlink().name == "step-00000020"
    two.write(15, parts_of(15), metrics={})
    assert (two.folder / "latest").readlink().name == "step-00000020"
    two.write(30, parts_of(30), metrics={})
    assert (two.folder / "latest" / "MANIFEST.json").samefile(two.path(30) / "MANIFEST.json")
    assert not (two.folder / "best").exists()


def test_a_write_that_fails_moves_no_link(two, monkeypatch):
    monkeypatch.setattr(store_module, "rename", lambda source, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        two.write(30, parts_of(30), metrics={})
    assert (two.folder / "latest").readlink().name == "step-00000020"


def test_the_link_best_is_moved_and_taken_away(two):
    for step in (10, 20, 20, 10):
        two.mark_best(step)
        assert (two.folder / "best").readlink().name == two.path(step).name
    two.mark_best(None)
    two.mark_best(None)
    assert not (two.folder / "best").is_symlink()
    assert names(two) == ["step-00000010", "step-00000020"]


def test_saving_continues_without_links(store, monkeypatch, caplog):
    def reject(*arguments, **options):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", reject)
    with caplog.at_level(logging.DEBUG, logger="trainwright"):
        store.write(10, parts_of(10), metrics={})
    assert [path.name for path in store.folder.iterdir()] == ["step-00000010"]
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


def test_a_folder_with_the_name_of_a_link_is_left_alone(store):
    (store.folder / "latest").mkdir(parents=True)
    (store.folder / "latest" / "mine").touch()
    store.write(10, parts_of(10), metrics={})
    assert (store.folder / "latest" / "mine").exists()
    assert sorted(path.name for path in store.folder.iterdir()) == ["latest", "step-00000010"]


def test_wrong_links_do_not_affect_reading(two):
    for link in ("latest", "best"):
        (two.folder / link).unlink(missing_ok=True)
        (two.folder / link).symlink_to("step-00000099")
    assert two.steps() == [10, 20]
    assert two.newest_intact() == 20


def test_after_a_damaged_newest_the_link_follows_the_intact_one(two):
    (two.path(20) / "MANIFEST.json").unlink()
    assert two.newest_intact(set_aside=False) == 10
    assert (two.folder / "latest").readlink().name == "step-00000020"
    assert two.newest_intact() == 10
    assert (two.folder / "latest").readlink().name == "step-00000010"


def test_clean_removes_a_link_that_was_never_moved_in(two):
    (two.folder / ".latest-ab12cd34").symlink_to("step-00000010")
    two.clean()
    assert names(two) == ["step-00000010", "step-00000020"]


def test_delete_removes_the_whole_folder(two):
    two.delete(10)
    assert names(two) == ["step-00000020"]
    with raises(CheckpointError, "10"):
        two.delete(10)


def test_folders_that_are_no_checkpoints_are_not_listed(two):
    for name in ("step-00000030", "step-000000040", "step-5", "notes", "damaged-step-00000050"):
        (two.folder / name).mkdir()
    (two.folder / "step-000000040" / "MANIFEST.json").touch()
    assert two.steps() == [10, 20]


FILES = ["MANIFEST.json", "hooks.json", "model.safetensors", "optimizer.json", "optimizer.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "longer"])
def test_a_damaged_file_is_named_and_fallen_back_from(two, caplog, name, damage):
    path = two.path(20) / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": content[:-1], "longer": content + b" "}[damage])
    with raises(CheckpointError, name):
        two.verify(20)
    with caplog.at_level(logging.WARNING):
        assert two.newest_intact() == 10
    assert names(two) == ["damaged-step-00000020", "step-00000010"]
    [record] = caplog.records
    message = record.getMessage()
    assert name in message
    assert "kept as damaged-step-00000020" in message
    assert "Using step-00000010 instead" in message


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_are_found(two, name):
    path = two.path(20) / name
    content = path.read_bytes()
    # The manifest defends itself, so every byte of it is tried; 7 turns a line feed into a carriage return, which
    # JSON reads as the same. The others are hashed, and every seventh byte will do.
    for position in range(0, len(content), 1 if name == "MANIFEST.json" else 7):
        for mask in (1 << position % 8, 7):
            damaged = bytearray(content)
            damaged[position] ^= mask
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                two.verify(20)
    path.write_bytes(content)
    two.verify(20)


def test_a_wrong_size_and_a_wrong_hash_say_so(two):
    path = two.path(20) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    with raises(CheckpointError, len(content) - 3, len(content)):
        two.verify(20)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with raises(CheckpointError):
        two.verify(20)


def test_a_folder_under_another_steps_name_is_damaged(two):
    shutil.copytree(two.path(20), two.path(30))
    with raises(CheckpointError, "20"):
        two.verify(30)


def test_a_step_without_a_manifest_is_set_aside_never_over_another(two, caplog):
    for number in range(2):
        two.path(30).mkdir()
        (two.path(30) / f"file{number}").touch()
        assert two.newest_intact() == 20
    assert names(two) == ["damaged-step-00000030", "damaged-step-00000030-2", "step-00000010", "step-00000020"]
    assert "MANIFEST.json is missing" in caplog.text


def test_when_all_are_damaged_none_is_intact_and_all_are_kept(two, caplog):
    for step in (10, 20):
        (two.path(step) / "model.safetensors").unlink()
    assert two.newest_intact() is None
    assert names(two) == ["damaged-step-00000010", "damaged-step-00000020"]
    assert caplog.text.count("There is no intact checkpoint") == 2


def test_reading_a_damaged_file_names_it_as_a_checkpoint_error(two):
    (two.path(20) / "model.safetensors").write_bytes(b"x")
    with raises(CheckpointError, "model"):
        two.read(20, "model")


def test_what_a_store_has_verified_is_not_hashed_again(two, monkeypatch):
    two.verify(20)
    monkeypatch.setattr(tensor_files, "_piece_hash", lambda content: "")
    two.read(20, "model")
    with raises(CheckpointError):
        CheckpointStore(two.folder).read(20, "model")  # another process
    with raises(CheckpointError):
        two.read(10, "model")


def test_a_checkpoint_of_a_later_format_is_not_taken_for_damage(two):
    path = two.path(20) / "MANIFEST.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_bytes(render_manifest({**content, "format": 2}))
    with raises(CheckpointError, "2", "1"):
        two.newest_intact()
    assert two.path(20).is_dir()


def test_a_file_that_the_disk_has_no_room_for_raises_and_leaves_no_staging(two):
    # A real failure of write(2), inside safetensors: the kernel rejects files of more than 8 KiB.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with raises(CheckpointError, "00000020"):
            two.write(20, {"model": {"w": torch.ones(100_000)}}, metrics={})
        with raises(CheckpointError):
            two.write(20, {"text": "x" * 100_000}, metrics={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(two) == ["step-00000010", "step-00000020"]
    assert two.newest_intact() == 20


def test_a_full_disk_is_said_to_be_full(two, monkeypatch):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with raises(CheckpointError):
        two.write(30, parts_of(30), metrics={})
    assert names(two) == ["step-00000010", "step-00000020"]


def test_a_folder_that_cannot_be_made_raises(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with raises(CheckpointError):
        CheckpointStore(tmp_path / "checkpoints").write(1, {}, metrics={})


def test_a_commit_that_fails_brings_the_old_checkpoint_back(two, monkeypatch):
    rename = store_module.rename

    def reject_staging(source, target):
        if source.name.startswith(".staging"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        rename(source, target)

    monkeypatch.setattr(store_module, "rename", reject_staging)
    with raises(CheckpointError):
        two.write(20, {}, metrics={})
    assert names(two) == ["step-00000010", "step-00000020"]
    assert two.metrics(20) == {"valid/loss": 1 / 20}


def test_clean_leaves_the_staging_of_a_living_writer(two, monkeypatch):
    halfway, cleaned = threading.Event(), threading.Event()
    write_file = store_module.write_file

    def wait_halfway(path, content):
        halfway.set()
        assert cleaned.wait(10)
        return write_file(path, content)

    monkeypatch.setattr(store_module, "write_file", wait_halfway)
    writer = threading.Thread(target=two.write, args=(30, parts_of(30)), kwargs={"metrics": {}})
    writer.start()
    assert halfway.wait(10)
    two.clean()
    cleaned.set()
    writer.join()
    assert two.newest_intact() == 30


def test_clean_removes_the_files_of_dead_writers_and_nothing_else(two):
    for name in (".staging-step-00000030-ab12cd34", ".trash-step-00000005-ab12cd34", "mine", "step-00000040", ".mine"):
        (two.folder / name).mkdir()
        (two.folder / name / "file").touch()
    two.clean()
    assert names(two) == [".mine", "mine", "step-00000010", "step-00000020", "step-00000040"]


def test_without_locks_only_an_old_staging_folder_is_abandoned(two, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(disk_module.fcntl, "flock", no_locks)
    two.write(30, parts_of(30), metrics={})
    for age, name in ((60, ".staging-step-00000040-00000001"), (7200, ".staging-step-00000040-00000002")):
        folder = two.folder / name
        folder.mkdir()
        then = folder.stat().st_mtime - age
        os.utime(folder, (then, then))
    two.clean()
    assert [name for name in names(two) if name.startswith(".")] == [".staging-step-00000040-00000001"]


def test_an_aside_counts_while_its_name_is_free_and_clean_brings_it_back(two):
    two.path(20).rename(two.folder / ".aside-step-00000020-ab12cd34")
    assert two.steps() == [10, 20]
    assert two.read(20, "hooks")["InfoHook"]["seen"] == 20
    assert two.newest_intact() == 20
    two.clean()
    assert names(two) == ["step-00000010", "step-00000020"]


def test_an_aside_whose_replacement_arrived_is_removed(two):
    shutil.copytree(two.path(10), two.folder / ".aside-step-00000020-ab12cd34")
    assert two.metrics(20) == {"valid/loss": 1 / 20}
    two.clean()
    assert names(two) == ["step-00000010", "step-00000020"]
    assert two.metrics(20) == {"valid/loss": 1 / 20}


def test_of_two_asides_the_newer_one_is_restored(two):
    (two.folder / "step-00000020").rename(two.folder / ".aside-step-00000020-ffffffff")
    two.write(20, {}, metrics={"valid/loss": 9.0})
    shutil.copytree(two.path(20), two.folder / ".aside-step-00000020-00000000")
    two.path(10).rename(two.folder / ".aside-step-00000020-ffffffff")
    shutil.rmtree(two.path(20))
    two.clean()
    assert names(two) == ["step-00000020"]
    assert two.metrics(20) == {"valid/loss": 9.0}


def test_a_deleted_checkpoint_does_not_come_back_from_an_aside(two):
    shutil.copytree(two.path(20), two.folder / ".aside-step-00000020-ab12cd34")
    two.delete(20)
    two.clean()
    assert names(two) == ["step-00000010"]


def test_an_aside_alone_can_be_deleted(two):
    two.path(20).rename(two.folder / ".aside-step-00000020-ab12cd34")
    two.delete(20)
    assert names(two) == ["step-00000010"]
