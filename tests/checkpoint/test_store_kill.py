"""kill -9 before every act on the file system: the old or the new checkpoint is there, whole.

The child is forked, so torch is not imported again. It counts its acts (opens, writes, renames, links, removals, syncs)
and kills itself before the n-th; the parent raises n until a child lives to the end. Each write is also cut in half.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys

import pytest
import torch

from trainwright.checkpoint.background import BackgroundSaver
from trainwright.checkpoint.retention import Retention
from trainwright.checkpoint.store import CheckpointStore

# Python 3.12 warns of forking beside threads; the child takes no lock that another thread could hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

ACTS = {
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.listdir", "os.scandir", "fcntl.flock"),
    *("os.symlink", "os.link", "os.truncate", "os.utime"),
}


def parts_of(version):
    return {
        "model": {"w": torch.full((4,), float(version))},
        "optimizer": {"state": {0: torch.full((2,), float(version))}},
        "hooks": {"seen": version},
    }


def run_killed_before(act_number, action):
    """Run `action` in a child that dies before its act number `act_number`; return whether it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_before(act_number)
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def die_before(act_number):
    acts = 0

    def act(event, arguments=()):
        nonlocal acts
        if event in ACTS:
            if acts == act_number:
                os.kill(os.getpid(), signal.SIGKILL)
            acts += 1

    fsync, write = os.fsync, os.write

    def counted_fsync(descriptor):
        act("open")
        fsync(descriptor)

    def counted_write(descriptor, content):
        act("open")
        half = len(content) // 2
        if half:
            write(descriptor, content[:half])
            act("open")
        return half + write(descriptor, content[half:])

    os.fsync, os.write = counted_fsync, counted_write
    sys.addaudithook(act)


def state_of(store, step):
    """The version of a checkpoint, every part of which must be of that version."""
    store.verify(step)
    version = store.read(step, "hooks")["seen"]
    assert torch.equal(store.read(step, "model")["w"], torch.full((4,), float(version)))
    assert torch.equal(store.read(step, "optimizer")["state"][0], torch.full((2,), float(version)))
    assert store.metrics(step) == {"version": version}
    return version


def hidden(store):
    """What a writer left; links for people must lead somewhere or nowhere, but never to what is hidden."""
    names = [path.name for path in store.folder.iterdir()]
    links = [name for name in names if (store.folder / name).is_symlink() and name in ("latest", "best")]
    assert all((store.folder / link).readlink().name.startswith("step-") for link in links)
    return [name for name in names if name.startswith(".")]


def kill_at_every_act(tmp_path, prepare, action, check):
    """Kill `action(store)` at each act, each time in a copy of what was prepared; return how many acts there are."""
    template = CheckpointStore(tmp_path / "template" / "checkpoints")
    template.folder.parent.mkdir()
    prepare(template)
    for act_number in range(500):
        store = CheckpointStore(tmp_path / f"{act_number}" / "checkpoints")
        shutil.copytree(template.folder.parent, store.folder.parent, symlinks=True)
        killed = run_killed_before(act_number, lambda store=store: action(store))
        check(store, killed)
        if not killed:
            return act_number
    raise AssertionError("the child never finished")


def write(store, step, version):
    store.write(step, parts_of(version), metrics={"version": version})


def test_a_killed_first_write_leaves_none_or_all(tmp_path):
    found = []

    def check(store, killed):
        assert store.newest_intact() in (None, 10)
        store.clean()
        found.append(store.newest_intact())
        if found[-1] is not None:
            assert state_of(store, 10) == 1
        assert not store.folder.exists() or hidden(store) == []
        assert killed or found[-1] == 10

    acts = kill_at_every_act(tmp_path, lambda store: None, lambda store: write(store, 10, 1), check)
    assert acts > 35
    assert found == sorted(found, key=lambda step: step or 0)


def test_a_killed_write_leaves_the_step_before(tmp_path):
    def check(store, killed):
        store.clean()
        newest = store.newest_intact()
        assert newest in ((10, 20) if killed else (20,))
        assert state_of(store, 10) == 1
        assert state_of(store, newest) == newest // 10
        assert not [path for path in store.folder.iterdir() if "damaged" in path.name]

    kill_at_every_act(tmp_path, lambda store: write(store, 10, 1), lambda store: write(store, 20, 2), check)


def check_next_write(folder):
    """A write after the killed one needs no clean before it."""
    store = CheckpointStore(folder)
    write(store, 10, 3)
    assert state_of(store, 10) == 3
    store.clean()
    assert state_of(store, 10) == 3
    assert hidden(store) == []


def test_a_killed_overwrite_leaves_the_old_or_the_new_at_every_moment(tmp_path):
    versions = []

    def check(store, killed):
        # Before any repair, as a reader beside the writer sees it.
        assert store.steps() == [10]
        before = state_of(store, 10)
        check_next_write(shutil.copytree(store.folder, store.folder.parent / "continued", symlinks=True))
        store.clean()
        assert store.newest_intact() == 10
        assert state_of(store, 10) == before
        assert hidden(store) == []
        assert store.path(10).is_dir()
        versions.append(before)

    acts = kill_at_every_act(tmp_path, lambda store: write(store, 10, 1), lambda store: write(store, 10, 2), check)
    assert acts > 42
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}


@pytest.mark.parametrize("leave_aside", [False, True])
def test_a_killed_delete_leaves_all_or_nothing_of_the_checkpoint(tmp_path, leave_aside):
    def prepare(store):
        write(store, 10, 1)
        write(store, 20, 2)
        if leave_aside:
            shutil.copytree(store.path(20), store.folder / ".aside-step-00000020-00000000")

    def check(store, killed):
        for step in store.steps():
            state_of(store, step)
        store.clean()
        assert store.newest_intact() == (20 if 20 in store.steps() else 10)
        assert hidden(store) == []
        assert killed or store.steps() == [10]

    kill_at_every_act(tmp_path, prepare, lambda store: store.delete(20), check)


def test_a_killed_clean_loses_nothing(tmp_path):
    def prepare(store):
        write(store, 10, 1)
        store.path(10).rename(store.folder / ".aside-step-00000010-00000000")
        write(store, 20, 2)
        for name in (".staging-step-00000030-00000000", ".trash-step-00000005-00000000"):
            (store.folder / name).mkdir()
            (store.folder / name / "file").touch()

    def check(store, killed):
        assert [state_of(store, step) for step in store.steps()] == [1, 2]
        store.clean()
        assert [state_of(store, step) for step in store.steps()] == [1, 2]
        assert hidden(store) == []

    kill_at_every_act(tmp_path, prepare, lambda store: store.clean(), check)


def test_a_killed_background_save_leaves_the_old_or_the_new_and_never_less_than_the_policy(tmp_path):
    found = []

    def prepare(store):
        for step in (10, 20, 30):
            write(store, step, step // 10)

    def action(store):
        saver = BackgroundSaver(store, retention=Retention(keep_last=2, keep_best="version", mode="min"))
        saver.save(40, parts_of(4), metrics={"version": 4})
        saver.wait(must_succeed=True)

    def check(store, killed):
        assert [state_of(store, step) for step in store.steps()] == [step // 10 for step in store.steps()]
        store.clean()
        found.append(store.steps())
        assert store.newest_intact() == store.steps()[-1]
        assert hidden(store) == []

    acts = kill_at_every_act(tmp_path, prepare, action, check)
    assert acts > 50
    whole = [[10, 20, 30], [10, 20, 30, 40], [10, 30, 40]]
    assert [steps for number, steps in enumerate(found) if number == 0 or steps != found[number - 1]] == whole
