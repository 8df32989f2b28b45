"""`trainwright checkpoints`: what it lists, verifies and deletes, of local folders and of addresses."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import fsspec
import pytest
import torch
from tests.messages import mentions, raises
from typer.testing import CliRunner

from trainwright import RunConfig
from trainwright.checkpoint.listing import checkpoints_location
from trainwright.checkpoint.manifest import read_manifest, render_manifest
from trainwright.checkpoint.remote_store import open_store
from trainwright.cli import app
from trainwright.commands.terminal import size_text
from trainwright.errors import CheckpointError, ConfigError

LOSSES = {10: 0.5, 20: 0.25, 30: 0.75, 40: 1.0}


def make_run(folder, overrides=()):
    """A run's folder with a checkpoint for each of LOSSES."""
    source = folder.parent / "source.yaml"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("checkpoint: {keep_last: 1, keep_best: {metric: valid/loss}}\n")
    config = RunConfig.load(source, list(overrides))
    config.save(folder / "config.yaml")
    store = open_store(checkpoints_location(folder, config))
    for step, loss in LOSSES.items():
        store.write(step, {"model": {"w": torch.ones(step)}}, metrics={"valid/loss": loss, "other": 1.0})
    return store


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    make_run(folder)
    return folder


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run", symlinks=True)


@pytest.fixture(params=["local", "remote"])
def either(request, tmp_path):
    """A run with its checkpoints in its folder, and one with them behind an address."""
    if request.param == "local":
        return tmp_path / "run", make_run(tmp_path / "run")
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    return tmp_path / "run", make_run(tmp_path / "run", ["checkpoint.folder=memory://bucket/run"])


def ask(*arguments):
    return CliRunner().invoke(app, ["checkpoints", *map(str, arguments)])


def rows(done):
    header, *lines = [line for line in done.stdout.splitlines() if re.match(r"step|\d+ ", line)]
    columns = re.split(r"  +", header)
    return {cells[0]: dict(zip(columns, cells, strict=True)) for cells in (re.split(r"  +", line) for line in lines)}


def damage(store, step, name="model.safetensors", *, cut=False):
    files, path = fsspec.url_to_fs(str(store.path(step) / name))
    raw = bytes(files.cat_file(path))
    files.pipe_file(path, raw[:-1] if cut else raw[:-1] + bytes([raw[-1] ^ 1]))


def test_each_checkpoint_has_a_line_and_the_best_is_marked(either):
    folder, _ = either
    done = ask(folder)
    assert done.exit_code == 0, done.output
    found = rows(done)
    assert list(found) == ["10", "20", "30", "40"]
    assert found["10"]["valid/loss"] == "0.5"
    assert found["20"]["valid/loss"] == "0.25 (best)"
    assert found["40"]["state"] == "intact"
    assert re.fullmatch(r"just now|\d+ seconds? ago", found["40"]["age"])
    assert re.fullmatch(r"\d+ bytes|\d\.\d kB", found["40"]["size"])


def test_the_age_is_that_of_the_commit(run):
    folder = run / "checkpoints" / "step-00000040"
    content = read_manifest(folder)
    content["created"] = (datetime.now(UTC) - timedelta(hours=5)).isoformat()
    (folder / "MANIFEST.json").write_bytes(render_manifest(content))
    assert rows(ask(run))["40"]["age"] == "5 hours ago"


def test_without_a_policy_a_metric_is_shown_and_none_is_the_best(run):
    RunConfig().save(run / "config.yaml")
    found = rows(ask(run))
    assert found["20"]["valid/loss"] == "0.25"


def test_the_checkpoints_folder_will_do(run):
    assert rows(ask(run / "checkpoints"))["20"]["valid/loss"] == "0.25 (best)"
    elsewhere = run.rename(run.with_name("moved")) / "checkpoints"
    shutil.move(elsewhere, elsewhere.parent.parent / "copies")
    assert rows(ask(elsewhere.parent.parent / "copies"))["20"]["valid/loss"] == "0.25"


def test_an_address_will_do(tmp_path):
    fsspec.filesystem("memory").store.clear()
    make_run(tmp_path / "run", ["checkpoint.folder=memory://bucket/run"])
    assert list(rows(ask("memory://bucket/run/source"))) == ["10", "20", "30", "40"]
    assert ask("memory://bucket/nothing").stdout == "There is no checkpoint in memory://bucket/nothing.\n"


def test_a_run_without_a_checkpoint_is_reported(tmp_path):
    RunConfig().save(tmp_path / "run" / "config.yaml")
    done = ask(tmp_path / "run", "--verify")
    assert done.exit_code == 0
    assert done.stdout == f"There is no checkpoint in {tmp_path / 'run' / 'checkpoints'}.\n"


def test_other_folders_are_rejected(tmp_path):
    with raises(CheckpointError, "runs/NAME"):
        raise ask(tmp_path / "nowhere").exception
    with raises(CheckpointError, "config.yaml"):
        raise ask(tmp_path).exception


def test_settings_that_cannot_be_read_do_not_hide_the_checkpoints(run):
    (run / "config.yaml").write_text("trainer: [")
    done = ask(run)
    assert done.exit_code == 0
    assert list(rows(done)) == ["10", "20", "30", "40"]
    assert "warning: the run's settings cannot be read" in done.stderr
    with pytest.raises(ConfigError):
        raise ask(run, "--prune").exception


def test_what_sizes_tell_is_listed_without_reading(either):
    folder, store = either
    damage(store, 40, cut=True)
    damage(store, 30)
    found = rows(ask(folder))
    assert re.fullmatch(r"damaged: model.safetensors has \d+ bytes instead of \d+", found["40"]["state"])
    assert found["30"]["state"] == "intact"


def test_verify_reads_every_byte_and_exits_with_1(either):
    folder, store = either
    done = ask(folder, "--verify")
    assert done.exit_code == 0, done.output
    assert {row["state"] for row in rows(done).values()} == {"verified"}
    damage(store, 30)
    done = ask(folder, "--verify")
    assert done.exit_code == 1
    found = rows(done)
    assert mentions(found["30"]["state"], "step-00000030/model.safetensors")
    assert found["20"]["state"] == "verified"
    assert "some checkpoints are damaged" in done.stderr
    assert store.steps() == [10, 20, 30, 40]


def test_a_local_folder_without_its_manifest_is_damaged(run):
    (run / "checkpoints" / "step-00000040" / "MANIFEST.json").unlink()
    done = ask(run, "--verify")
    assert done.exit_code == 1
    assert rows(done)["40"]["state"] == "damaged: MANIFEST.json is missing"


def test_what_was_set_aside_is_listed_and_counts_no_more(either):
    folder, store = either
    damage(store, 40)
    assert store.newest_intact() == 30
    done = ask(folder, "--verify")
    assert done.exit_code == 0, done.output
    assert rows(done)["40"]["state"].startswith("set aside as damaged: ")
    assert "0.25 (best)" in done.stdout


def test_an_unfinished_upload_is_not_damage(tmp_path):
    files = fsspec.filesystem("memory")
    files.store.clear()
    store = make_run(tmp_path / "run", ["checkpoint.folder=memory://bucket/run"])
    files.pipe_file("/bucket/run/source/step-00000050/model.safetensors", b"half")
    done = ask(tmp_path / "run", "--verify")
    assert done.exit_code == 0
    assert rows(done)["50"]["state"] == "not finished"
    assert store.steps() == [10, 20, 30, 40]


def test_prune_applies_the_policy_and_lists_what_was_deleted(either):
    folder, store = either
    done = ask(folder, "--prune")
    assert done.exit_code == 0, done.output
    assert store.steps() == [20, 40]
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"Deleted 10, 30: (\d+ bytes|\d\.\d kB) freed\. Kept 20, 40\.", last)
    assert ask(folder, "--prune").stdout.splitlines()[-1] == "Nothing was deleted: the policy keeps them all."


def test_prune_lets_no_damaged_one_push_out_an_intact_one(either):
    folder, store = either
    damage(store, 40, cut=True)
    ask(folder, "--prune")
    assert store.steps() == [20, 30, 40]


def test_verify_and_prune_delete_nothing_when_one_is_damaged(either):
    folder, store = either
    damage(store, 40)
    done = ask(folder, "--verify", "--prune")
    assert done.exit_code == 1
    assert "Nothing was deleted" in done.stderr
    assert store.steps() == [10, 20, 30, 40]


def test_prune_needs_a_run(run):
    shutil.move(run / "checkpoints", run.parent / "copies")
    with raises(CheckpointError):
        raise ask(run.parent / "copies", "--prune").exception


def test_prune_is_rejected_while_the_run_is_trained(run):
    program = (
        "import sys\nfrom pathlib import Path\nfrom trainwright.checkpoint.folder_lock import FolderLock\n"
        f"with FolderLock(Path({str(run)!r})):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **options) as holder:
        assert holder.stdout.readline() == "held\n"
        with raises(CheckpointError, holder.pid, golden=False):
            raise ask(run, "--prune").exception
        assert ask(run).exit_code == 0
        holder.communicate("")
    assert open_store(run / "checkpoints").steps() == [10, 20, 30, 40]


def test_the_plain_listing_imports_no_torch_and_changes_nothing(run):
    before = {path: path.lstat().st_mtime for path in run.rglob("*")}
    program = (
        "import sys\nfrom trainwright.cli import main\n"
        f"sys.argv = ['trainwright', 'checkpoints', {str(run)!r}]\n"
        "try:\n    main()\nfinally:\n    assert not {'torch', 'numpy', 'fsspec'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "(best)" in done.stdout
    assert {path: path.lstat().st_mtime for path in run.rglob("*")} == before


def test_sizes_are_in_words():
    assert [size_text(number) for number in (0, 999, 1000, 1_250_000, 13 * 10**9, 2 * 10**12)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "1.2 MB",
        "13.0 GB",
        "2.0 TB",
    ]
