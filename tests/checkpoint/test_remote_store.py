"""Checkpoints behind an address: what is put, what is found, what damage does, and every call going wrong."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from tests.checkpoint.hostile import FAULTS, HostileMemory, Plan
from tests.messages import raises

from trainwright.checkpoint import remote_files, tensor_files
from trainwright.checkpoint.manifest import UnreachableError, render_manifest
from trainwright.checkpoint.remote_files import RemoteFolder, RemotePath
from trainwright.checkpoint.remote_store import RemoteStore, open_store
from trainwright.checkpoint.retention import Retention, metrics_by_step, prune
from trainwright.checkpoint.snapshot import HostBuffers
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError

LONG_AGO = 10_000


def parts_of(version):
    return {
        "model": {"w": torch.full((4,), float(version)), "b": torch.zeros(2, dtype=torch.bfloat16)},
        "hooks": {"seen": version, "worst": math.nan, "betas": (0.9, 0.95)},
    }


def write(store, step, version):
    return store.write(step, parts_of(version), metrics={"version": version})


def version_of(store, step):
    """The version of a checkpoint, every part of which must be of that version."""
    store.verify(step)
    version = store.read(step, "hooks")["seen"]
    assert torch.equal(store.read(step, "model")["w"], torch.full((4,), float(version)))
    assert store.metrics(step) == {"version": version}
    return version


@pytest.fixture(autouse=True)
def _empty():
    """No files of the test before, and no fault yet."""
    for files in (fsspec.filesystem("memory"), HostileMemory):
        files.store.clear()
        files.pseudo_dirs[:] = [""]
    Plan.set(None, -1)
    yield
    Plan.set(None, -1)


@pytest.fixture(params=["memory://bucket/run", "hostile://bucket/run", "hostiledisk:/"])
def address(request, tmp_path):
    return request.param if "bucket" in request.param else f"hostiledisk://{tmp_path}/bucket/run"


@pytest.fixture
def store(address):
    return open_store(address)


def files_of(store):
    files, root = fsspec.url_to_fs(store.folder.address)
    return sorted(path.removeprefix(root + "/") for path in files.find(root))


def content(store, name):
    files, root = fsspec.url_to_fs(f"{store.folder.address}/{name}")
    return files, root


def change(store, name, act):
    files, path = content(store, name)
    files.pipe_file(path, act(files.cat_file(path)))


def copy_take(store, folder):
    """Makes a second take of a step, as a replacement leaves it that died before it removed the first."""
    remote = RemoteFolder(store.folder.address)
    for name in [name for name in files_of(store) if name.startswith(f"{folder}/")]:
        remote.put(name.replace(folder, f"{folder}-2"), remote.read(name))


def test_a_path_gives_the_local_store_and_an_address_the_remote_one(tmp_path):
    assert isinstance(open_store(tmp_path), CheckpointStore)
    assert isinstance(open_store("runs/x"), CheckpointStore)
    local = open_store(f"file://{tmp_path}/checkpoints")
    assert isinstance(local, CheckpointStore)
    assert local.folder == tmp_path / "checkpoints"
    assert isinstance(open_store("s3://bucket/run"), RemoteStore)


def test_both_stores_have_the_same_public_methods():
    def public(kind):
        return {name for name in vars(kind) if not name.startswith("_")} - {"folder"}

    assert public(CheckpointStore) == public(RemoteStore)


def test_creating_a_store_makes_no_request(store):
    Plan.set("rejects", 0)
    again = open_store(store.folder.address)
    assert str(again.path(20)) == f"{store.folder}/step-00000020"
    assert not Plan.has_struck


def test_an_empty_folder_has_no_checkpoint(store):
    assert store.steps() == []
    assert store.newest_intact() is None
    store.clean()
    with raises(CheckpointError, "10"):
        store.verify(10)


def test_what_is_written_is_read_back(store):
    for step in (10, 20):
        write(store, step, step)
    assert store.steps() == [10, 20]
    assert store.parts(20) == ["model", "hooks"]
    hooks = store.read(20, "hooks")
    assert hooks["betas"] == (0.9, 0.95)
    assert math.isnan(hooks["worst"])
    assert store.read(20, "model")["b"].dtype == torch.bfloat16
    assert [version_of(store, step) for step in (10, 20)] == [10, 20]
    assert store.newest_intact() == 20
    with raises(CheckpointError, "optimizers"):
        store.read(20, "optimizers")


def test_a_staged_state_gives_the_same_files(store):
    write(store, 10, 1)
    store.write_snapshot(20, HostBuffers().copy_to_host(parts_of(1)), metrics={"version": 1})
    assert version_of(store, 20) == 1
    remote = RemoteFolder(store.folder.address)
    plain, snapshot = (remote.manifest(folder)["files"] for folder in remote.step_folders())
    assert plain == snapshot


def test_a_copy_of_the_folder_is_a_local_checkpoint(store, tmp_path):
    write(store, 10, 1)
    files, root = fsspec.url_to_fs(store.folder.address)
    for name in files_of(store):
        target = tmp_path / "copy" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(files.cat_file(f"{root}/{name}"))
    assert version_of(CheckpointStore(tmp_path / "copy"), 10) == 1


def test_the_manifest_is_put_last(store):
    write(store, 10, 1)
    for name in ("model.safetensors", "hooks.json"):
        assert f"step-00000010/{name}" in files_of(store)
    files, path = content(store, "step-00000010/MANIFEST.json")
    files.rm_file(path)
    assert store.steps() == []
    assert store.newest_intact() is None


def test_no_temporary_file_stays(store, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    write(store, 10, 1)
    version_of(store, 10)
    assert list(temporary.iterdir()) == []


class WatchedDisk(LocalFileSystem):
    """A disk behind an address that notes the ranges that are read, and what is in the temporary folder meanwhile."""

    protocol = "watched"
    cachable = False
    ranges: ClassVar = []
    temporary_files: ClassVar = []

    def open(self, *arguments, **options):
        self.temporary_files += Path(tempfile.gettempdir()).rglob("*")
        return super().open(*arguments, **options)

    def cat_file(self, path, start=None, end=None, **options):
        self.temporary_files += Path(tempfile.gettempdir()).rglob("*")
        self.ranges.append((Path(path).name, start, end))
        return super().cat_file(path, start=start, end=end, **options)


fsspec.register_implementation("watched", WatchedDisk, clobber=True)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    WatchedDisk.ranges.clear()
    WatchedDisk.temporary_files.clear()
    return open_store(f"watched://{tmp_path}/bucket/run")


def test_files_are_uploaded_and_read_without_a_local_copy(watched):
    weights = {"a": torch.randn(700_000), "b": torch.randn(1000, 700), "c": torch.tensor(3.0)}
    watched.write(10, {"model": weights}, metrics={})
    found = watched.read(10, "model")
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert WatchedDisk.temporary_files == []


def test_only_the_rows_that_are_asked_for_are_downloaded(watched, monkeypatch):
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 1 << 19)
    weights = {"a": torch.randn(700_000), "b": torch.randn(1000, 700)}
    watched.write(10, {"model": weights}, metrics={})
    WatchedDisk.ranges.clear()
    found = watched.read_split(10, "model")
    rows = torch.empty(100, 700)
    found["b"].copy_into(rows, (500, 0))
    assert torch.equal(rows, weights["b"][500:600])
    read = [end - start for name, start, end in WatchedDisk.ranges if name == "model.safetensors"]
    assert sum(read) <= (1 << 18) + 2 * (1 << 19)  # the window with the header, and the chunks of the rows


def test_many_small_tensors_take_few_requests(watched):
    weights = {f"w{number}": torch.full((10,), float(number)) for number in range(200)}
    watched.write(10, {"model": weights}, metrics={})
    WatchedDisk.ranges.clear()
    found = watched.read(10, "model")
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert len(WatchedDisk.ranges) < 5


def test_a_range_across_windows_and_at_the_end_is_exact(watched, monkeypatch):
    monkeypatch.setattr(remote_files, "_WINDOW_BYTES", 16)
    content = bytes(range(100))
    remote = RemoteFolder(watched.folder.address)
    remote.put("step-00000010/x", content)
    read = remote.range_reader("step-00000010/x", len(content))
    for start in range(0, 101, 3):
        for stop in range(start, 110):
            assert read(start, stop) == content[start:stop]


def test_a_region_that_arrives_damaged_raises(watched):
    watched.write(10, {"model": {"a": torch.randn(1000), "b": torch.randn(1000)}}, metrics={})
    change(watched, "step-00000010/model.safetensors", lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]))
    found = watched.read_split(10, "model")
    found["a"].whole()
    with raises(CheckpointError):
        found["b"].whole()


def test_a_second_attempt_has_its_own_folder():
    """The connection that failed may store what it has sent only now."""
    store = RemoteStore("hostile://bucket/run")
    Plan.set("rejects", 4)
    with pytest.raises(CheckpointError):
        write(store, 10, 1)
    assert Plan.has_struck
    Plan.set(None, -1)
    assert write(store, 10, 2).name == "step-00000010-2"
    RemoteFolder(store.folder.address).put("step-00000010/model.safetensors", b"late")
    assert store.newest_intact() == 10
    assert version_of(store, 10) == 2


def test_a_replacement_has_its_own_folder_and_the_old_one_is_deleted(store):
    write(store, 10, 1)
    assert write(store, 10, 2).name == "step-00000010-2"
    assert store.steps() == [10]
    assert version_of(store, 10) == 2
    assert {name.partition("/")[0] for name in files_of(store)} == {"step-00000010-2"}
    assert open_store(store.folder.address).newest_intact() == 10
    write(store, 10, 3)
    assert version_of(store, 10) == 3


def test_a_deleted_checkpoint_leaves_no_file(store):
    for step in (10, 20):
        write(store, step, 1)
    store.delete(10)
    assert store.steps() == [20]
    assert {name.partition("/")[0] for name in files_of(store)} == {"step-00000020"}
    with raises(CheckpointError, "20"):
        store.delete(10)


def test_retention_counts_remote_ones_alike(store):
    for step, version in ((10, 1), (20, 3), (30, 2)):
        write(store, step, version)
    assert prune(store, Retention(1, keep_best="version", mode="min")) == [20]
    assert metrics_by_step(store).keys() == {10, 30}


@pytest.mark.parametrize("name", ["model.safetensors", "hooks.json", "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(store, caplog, name, damage):
    for step in (10, 20):
        write(store, step, step)
    files, path = content(store, f"step-00000020/{name}")
    raw = bytes(files.cat_file(path))
    if damage == "gone":
        files.rm_file(path)
    else:
        files.pipe_file(path, raw[:-3] if damage == "cut" else raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:])
    before = files_of(store)
    is_unfinished = name == "MANIFEST.json" and damage == "gone"
    assert store.newest_intact(set_aside=False) == 10
    assert files_of(store) == before
    with caplog.at_level(logging.WARNING):
        assert store.newest_intact() == 10
    if not is_unfinished:
        assert "step-00000020" in caplog.text
        assert "Using step-00000010 instead." in caplog.text
        assert "step-00000020/MANIFEST.damaged.json" in files_of(store)
    # No file of it is gone, and none goes when the step is trained and cleaned anew.
    kept = [one for one in files_of(store) if one.startswith("step-00000020/")]
    assert len(kept) == len([one for one in before if one.startswith("step-00000020/")])
    assert store.steps() == [10]
    write(store, 20, 7)
    store.clean()
    assert version_of(store, 20) == 7
    assert set(kept) <= set(files_of(store))


def test_damage_below_a_replacement_that_is_damaged_too_is_found(store):
    write(store, 10, 1)
    write(store, 20, 2)
    copy_take(store, "step-00000020")
    change(store, "step-00000020-2/model.safetensors", lambda raw: raw[:-1] + b"\1")
    assert store.newest_intact() == 20
    assert version_of(store, 20) == 2
    assert store.path(20).name == "step-00000020"


def test_a_format_of_a_later_trainwright_is_not_damage(store):
    write(store, 10, 1)
    write(store, 20, 1)

    def later(raw):
        manifest = json.loads(raw)
        del manifest["sha256"]
        return render_manifest({**manifest, "format": 99})

    change(store, "step-00000020/MANIFEST.json", later)
    with raises(CheckpointError, "99"):
        store.newest_intact()
    assert store.steps() == [10, 20]


def test_leftovers_go_when_they_are_old_and_replaced_ones_at_once(store, monkeypatch):
    write(store, 10, 1)
    copy_take(store, "step-00000010")
    remote = RemoteFolder(store.folder.address)
    remote.put("step-00000020/model.safetensors", b"half")
    store.clean()
    assert "step-00000020/model.safetensors" in files_of(store)
    assert not [name for name in files_of(store) if name.startswith("step-00000010/")]
    now = remote_files.time.time()
    monkeypatch.setattr(remote_files.time, "time", lambda: now + LONG_AGO)
    store.clean()
    assert {name.partition("/")[0] for name in files_of(store)} == {"step-00000010-2"}
    assert version_of(store, 10) == 1


def test_unknown_files_are_left_alone(store):
    remote = RemoteFolder(store.folder.address)
    for name in ("notes.txt", "step-5/x", "step-000000005/MANIFEST.json", "step-00000007-1/MANIFEST.json"):
        remote.put(name, b"mine")
    before = files_of(store)
    assert store.steps() == []
    assert store.newest_intact() is None
    store.clean()
    assert files_of(store) == before


def test_no_password_is_shown():
    store = open_store("ftp://ann:secret@host/run")
    assert "secret" not in f"{store.folder} {store.path(10)}"
    assert str(store.path(10)) == "ftp://ann:***@host/run/step-00000010"
    assert store.path(10).address.startswith("ftp://ann:secret@host/")


def test_a_remote_path_is_joined_like_a_path():
    path = RemotePath("s3://bucket/run/") / "step-00000010" / "model.safetensors"
    assert str(path) == "s3://bucket/run/step-00000010/model.safetensors"
    assert path.name == "model.safetensors"


def test_an_unknown_scheme_is_explained():
    with pytest.raises(UnreachableError, match=r"nosuch://bucket/run: It cannot be reached: ValueError: .*nosuch"):
        open_store("nosuch://bucket/run").steps()


def test_no_answer_is_not_damage():
    store = RemoteStore("hostile://bucket/run")
    for step in (10, 20):
        write(store, step, step)
    before = files_of(store)
    at = 0
    while True:
        Plan.set("rejects", at)
        try:
            assert store.newest_intact() == 20
        except UnreachableError:
            at += 1
        else:
            break
        finally:
            Plan.set(None, -1)
        assert files_of(store) == before
    assert at > 5


# From here on: every call of an act goes wrong, one after the other, in every way.


def strike_every_call(address, prepare, act, check, fault):
    """Runs `act` with its first, second, … call going wrong, each time in a store prepared anew; returns how many."""
    for at in range(200):
        store = open_store(f"{address}/{at}")
        Plan.set(None, -1)
        prepare(store)
        Plan.set(fault, at)
        try:
            act(store)
            succeeded = True
        except CheckpointError:
            succeeded = False
        has_struck = Plan.has_struck
        Plan.set(None, -1)
        check(open_store(store.folder.address), succeeded)
        if not has_struck:
            assert succeeded
            return at
    raise AssertionError("it never finished")


@pytest.fixture
def base(request, tmp_path):
    return "hostile://bucket" if request.param == "memory" else f"hostiledisk://{tmp_path}"


# What is left of a file differs on a disk; what is merely not done, or not answered, does not.
in_every_way = pytest.mark.parametrize(
    ("base", "fault"),
    [
        *(("memory", fault) for fault in FAULTS),
        *(
            pytest.param("disk", fault, marks=[] if fault in ("dies", "truncates") else pytest.mark.slow)
            for fault in FAULTS
        ),
    ],
    indirect=["base"],
)


@in_every_way
def test_a_first_write_that_fails_leaves_none_or_all(base, fault):
    def check(store, succeeded):
        newest = store.newest_intact()
        assert newest == 10 if succeeded else newest in (None, 10)
        assert newest is None or version_of(store, 10) == 1
        # And the next write needs no clean before it.
        write(store, 10, 2)
        assert version_of(store, 10) == 2

    calls = strike_every_call(base, lambda store: None, lambda store: write(store, 10, 1), check, fault)
    assert calls > 6


@in_every_way
def test_a_write_that_fails_leaves_the_step_before(base, fault):
    def check(store, succeeded):
        newest = store.newest_intact()
        assert newest == 20 if succeeded else newest in (10, 20)
        assert version_of(store, 10) == 1
        assert version_of(store, newest) == newest // 10
        store.clean()
        assert version_of(store, newest) == newest // 10

    strike_every_call(base, lambda store: write(store, 10, 1), lambda store: write(store, 20, 2), check, fault)


@in_every_way
def test_a_replacement_that_fails_leaves_the_old_or_the_new(base, fault):
    versions = []

    def check(store, succeeded):
        assert store.newest_intact() == 10
        versions.append(version_of(store, 10))
        assert versions[-1] == 2 or not succeeded
        store.clean()
        assert version_of(store, 10) == versions[-1]
        assert store.steps() == [10]

    calls = strike_every_call(base, lambda store: write(store, 10, 1), lambda store: write(store, 10, 2), check, fault)
    assert calls > 10
    assert set(versions) == {1, 2}


@in_every_way
def test_a_delete_that_fails_leaves_the_others(base, fault):
    def prepare(store):
        for step in (10, 20):
            write(store, step, step)

    def check(store, succeeded):
        assert store.newest_intact() == 20
        assert version_of(store, 20) == 20
        # A delete that was answered with a lie leaves a damaged one, which `verify` names.
        assert fault == "drops" or not succeeded or store.steps() == [20]
        if 10 in store.steps() and fault != "drops":
            assert version_of(store, 10) == 10

    strike_every_call(base, prepare, lambda store: store.delete(10), check, fault)


@in_every_way
def test_a_search_that_fails_loses_nothing(base, fault):
    def prepare(store):
        for step in (10, 20):
            write(store, step, step)
        change(store, "step-00000020/model.safetensors", lambda raw: raw[:-1] + b"\1")

    def check(store, succeeded):
        assert store.newest_intact() == 10
        assert version_of(store, 10) == 10
        assert {Path(name).name for name in files_of(store) if name.startswith("step-00000020/")} >= {
            "model.safetensors",
            "hooks.json",
        }

    strike_every_call(base, prepare, lambda store: store.newest_intact(), check, fault)


def test_a_missing_package_of_a_file_system_is_named_with_its_extra(monkeypatch):
    def without_package(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", without_package)
    with raises(UnreachableError, "s3fs", "trainwright[s3]", at="s3://bucket/runs"):
        RemoteFolder("s3://bucket/runs").step_folders()
