"""Saving beside training, on a real disk that is made slow, full or absent for a while."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from tests.messages import raises

import trainwright.checkpoint.background as background_module
from trainwright.checkpoint.background import BackgroundSaver, default_backoff
from trainwright.checkpoint.retention import Retention
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError


class Disk:
    """The disk under the store: syncing a file may wait, or fail so many times with a given error."""

    def __init__(self, fsync):
        self._fsync = fsync
        self.failures = 0
        self.error = OSError(errno.EIO, "Input/output error")
        self.is_free = threading.Event()
        self.is_free.set()
        self.is_reached = threading.Event()

    def fsync(self, descriptor):
        self.is_reached.set()
        assert self.is_free.wait(10)
        if self.failures and stat.S_ISREG(os.fstat(descriptor).st_mode):
            self.failures -= 1
            raise self.error
        self._fsync(descriptor)

    def fill(self, failures):
        self.failures, self.error = failures, OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(os.fsync)
    monkeypatch.setattr(os, "fsync", disk.fsync)
    return disk


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def make(store):
    """Makes savers over the store that wait for nothing between attempts, and closes them."""
    made = []

    def make_saver(retention=Retention(None), **options):  # noqa: B008  # it is frozen
        made.append(BackgroundSaver(store, retention=retention, **{"backoff": lambda attempt: 0.0, **options}))
        return made[-1]

    yield make_saver
    for saver in made:
        saver.close()


def parts_of(value):
    return {"model": {"weight": torch.full((50,), float(value))}, "training": {"step": value}}


def value_of(store, step):
    store.verify(step)
    weight = store.read(step, "model")["weight"]
    assert torch.equal(weight, torch.full((50,), float(store.read(step, "training")["step"])))
    return int(weight[0])


@pytest.fixture(params=[True, False], ids=["asynchronous", "synchronous"])
def asynchronous(request):
    return request.param


def test_what_is_saved_is_the_state_at_the_call(make, store, disk):
    saver, parts = make(), parts_of(1)
    disk.is_free.clear()
    saver.save(10, parts, metrics={"loss": 0.5})
    parts["model"]["weight"].fill_(77)
    parts["training"]["step"] = 77
    disk.is_free.set()
    saver.wait(must_succeed=True)
    assert value_of(store, 10) == 1
    assert store.metrics(10) == {"loss": 0.5}


def test_training_continues_while_the_disk_is_slow(make, store, disk):
    saver = make()
    disk.is_free.clear()
    saver.save(10, parts_of(1), metrics={})
    assert disk.is_reached.wait(10)
    assert store.steps() == []
    assert saver.take_committed() == []
    saver.check()
    disk.is_free.set()
    saver.wait()
    assert saver.take_committed() == [10]
    assert saver.take_committed() == []


def test_a_second_save_waits_for_the_first_and_both_are_whole(make, store, disk):
    saver = make()
    disk.is_free.clear()
    saver.save(10, parts_of(1), metrics={})
    threading.Timer(0.05, disk.is_free.set).start()
    saver.save(20, parts_of(2), metrics={})
    assert saver.take_committed() == [10]
    saver.wait()
    assert [value_of(store, step) for step in (10, 20)] == [1, 2]
    assert saver.take_committed() == [20]


def test_a_long_wait_for_the_previous_save_is_logged(make, disk, caplog, monkeypatch):
    monkeypatch.setattr(background_module, "REPORTED_WAIT_SECONDS", 0.01)
    saver = make()
    disk.is_free.clear()
    saver.save(10, parts_of(1), metrics={})
    threading.Timer(0.05, disk.is_free.set).start()
    with caplog.at_level(logging.INFO, logger="trainwright"):
        saver.save(20, parts_of(2), metrics={})
    assert "Step 20 waited" in caplog.text


def test_a_synchronous_save_is_there_when_it_returns(make, store):
    saver = make(asynchronous=False)
    saver.save(10, parts_of(1), metrics={})
    assert value_of(store, 10) == 1
    assert saver.take_committed() == [10]


def test_the_policy_is_applied_before_a_step_is_reported_as_committed(make, store, asynchronous):
    saver = make(Retention(2, "loss", "min"), asynchronous=asynchronous)
    for step, loss in [(10, 2.0), (20, 1.0), (30, 3.0), (40, 4.0), (50, 5.0)]:
        saver.save(step, parts_of(step), metrics={"loss": loss})
    saver.wait()
    assert saver.take_committed() == [10, 20, 30, 40, 50]
    assert store.steps() == [20, 40, 50]
    assert (store.folder / "best").readlink().name == "step-00000020"
    assert (store.folder / "latest").readlink().name == "step-00000050"


def test_without_a_metric_there_is_no_link_to_the_best(make, store):
    make(Retention(2), asynchronous=False).save(10, parts_of(1), metrics={"loss": 1.0})
    assert not (store.folder / "best").is_symlink()


def test_a_write_that_fails_twice_is_tried_a_third_time(make, store, disk, caplog, asynchronous):
    waits = []
    saver = make(asynchronous=asynchronous, backoff=lambda attempt: waits.append(attempt) or 0.0)
    disk.failures = 2
    saver.save(10, parts_of(1), metrics={})
    saver.wait(must_succeed=True)
    assert waits == [1, 2]
    assert value_of(store, 10) == 1
    assert caplog.text.count("Saving step 10 failed") == 2
    assert "Input/output error" in caplog.text
    assert [default_backoff(attempt) for attempt in (1, 2)] == [1.0, 4.0]


def fail_once(saver, disk, step):
    """A save of which every attempt fails."""
    saver.wait()
    disk.failures = 3
    saver.save(step, parts_of(step), metrics={})
    saver.wait()


def test_a_failed_save_names_the_newest_and_the_count_and_training_continues(make, store, disk, caplog, asynchronous):
    saver = make(asynchronous=asynchronous)
    saver.save(10, parts_of(10), metrics={})
    fail_once(saver, disk, 20)
    saver.check()
    assert "Step 20 is not saved (failure 1 of 3 in a row before the run ends)" in caplog.text
    assert "the newest checkpoint is step 10" in caplog.text
    assert saver.take_committed() == [10]
    assert store.newest_intact() == 10
    assert [path.name for path in store.folder.iterdir() if path.name.startswith(".")] == []


def test_the_last_save_that_failed_is_raised_where_it_must_succeed(make, disk, asynchronous):
    saver = make(asynchronous=asynchronous)
    fail_once(saver, disk, 20)
    with raises(CheckpointError, "00000020") as raised:
        saver.wait(must_succeed=True)
    assert isinstance(raised.value.__cause__, OSError)
    saver.save(30, parts_of(3), metrics={})
    saver.wait(must_succeed=True)


def test_max_failures_in_a_row_end_saving_with_the_cause(make, store, disk, asynchronous):
    saver = make(asynchronous=asynchronous, max_failures=2)
    saver.save(10, parts_of(10), metrics={})
    fail_once(saver, disk, 20)
    saver.check()
    fail_once(saver, disk, 30)
    with raises(CheckpointError, "2", "10") as raised:
        saver.check()
    assert isinstance(raised.value.__cause__, CheckpointError)
    with raises(CheckpointError, "2"):
        saver.save(40, parts_of(40), metrics={})
    assert store.steps() == [10]


def test_a_success_resets_the_count_of_failures(make, disk, asynchronous):
    saver = make(asynchronous=asynchronous, max_failures=2)
    for step in (10, 30, 50):
        fail_once(saver, disk, step)
        saver.save(step + 10, parts_of(step), metrics={})
        saver.wait(must_succeed=True)
    saver.check()
    assert saver.take_committed() == [20, 40, 60]


def test_an_unexpected_error_surfaces_with_its_cause(make, disk):
    saver = make()
    disk.failures, disk.error = 1, ZeroDivisionError("a bug")
    saver.save(10, parts_of(1), metrics={})
    saver.wait()
    with raises(CheckpointError, "10", "ZeroDivisionError") as raised:
        saver.check()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with raises(CheckpointError):
        saver.wait(must_succeed=True)


def test_a_state_that_cannot_be_saved_is_rejected_at_once_and_counts_for_nothing(make, store, asynchronous):
    saver = make(asynchronous=asynchronous)
    with raises(CheckpointError, "training.seen"):
        saver.save(10, {"training": {"seen": {1}}}, metrics={})
    saver.wait(must_succeed=True)
    saver.save(20, parts_of(2), metrics={})
    saver.wait(must_succeed=True)
    assert store.steps() == [20]


def test_on_a_full_disk_only_what_the_new_one_would_replace_is_deleted(make, store, disk, caplog):
    saver = make(Retention(3), asynchronous=False)
    for step in (10, 20, 30):
        saver.save(step, parts_of(step), metrics={})
    (store.folder / ".trash-step-00000005-ab12cd34").mkdir()
    disk.fill(1)
    saver.save(40, parts_of(40), metrics={})
    assert "Deleted to free space" in caplog.text
    assert store.steps() == [20, 30, 40]
    assert not (store.folder / ".trash-step-00000005-ab12cd34").exists()


def test_a_disk_that_stays_full_deletes_one_checkpoint_only(make, store, disk):
    saver = make(Retention(3), asynchronous=False)
    for step in (10, 20, 30):
        saver.save(step, parts_of(step), metrics={})
    for step in (40, 50):
        disk.fill(3)
        saver.save(step, parts_of(step), metrics={})
    assert store.steps() == [20, 30]
    assert store.newest_intact() == 30


def test_replacing_a_step_on_a_full_disk_pushes_no_other_out(make, store, disk):
    saver = make(Retention(2), asynchronous=False)
    for step in (10, 20):
        saver.save(step, parts_of(step), metrics={})
    disk.fill(1)
    saver.save(20, parts_of(21), metrics={})
    assert [value_of(store, step) for step in store.steps()] == [10, 21]


def test_with_the_whole_folder_lost_saving_fails_clearly_and_recovers(make, store, asynchronous, caplog):
    saver = make(Retention(2), asynchronous=asynchronous)
    saver.save(10, parts_of(1), metrics={})
    saver.wait()
    shutil.rmtree(store.folder)
    store.folder.write_text("a mount that is not there")
    saver.save(20, parts_of(2), metrics={})
    saver.wait()
    saver.check()
    assert "failure 1 of 3" in caplog.text
    store.folder.unlink()
    saver.save(30, parts_of(3), metrics={})
    saver.wait(must_succeed=True)
    assert store.steps() == [30]


def test_ctrl_c_while_waiting_copying_or_handing_over_leaves_the_saver_usable(make, store, disk, monkeypatch):
    saver = make()
    disk.is_free.clear()
    saver.save(10, parts_of(1), metrics={})

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(saver._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saver.save(20, parts_of(2), metrics={})
    disk.is_free.set()
    with monkeypatch.context() as patched:
        patched.setattr(saver._buffers, "copy_to_host", lambda parts, overlaps: interrupt())
        with pytest.raises(KeyboardInterrupt):
            saver.save(30, parts_of(3), metrics={})
    with monkeypatch.context() as patched:
        # Handed over, but the thread was not woken: whoever waits wakes it.
        calls = iter([lambda: None, interrupt])
        patched.setattr(saver._changed, "notify_all", lambda: next(calls)())
        with pytest.raises(KeyboardInterrupt):
            saver.save(40, parts_of(4), metrics={})
    saver.wait(must_succeed=True)
    assert [value_of(store, step) for step in store.steps()] == [1, 4]


def test_a_closed_saver_has_saved_all_and_takes_no_more(make, store, disk):
    others = set(threading.enumerate())
    saver = make()
    disk.is_free.clear()
    saver.save(10, parts_of(1), metrics={})
    threading.Timer(0.05, disk.is_free.set).start()
    saver.close()
    saver.close()
    assert value_of(store, 10) == 1
    assert saver.take_committed() == [10]
    mine = set(threading.enumerate()) - others
    assert [thread for thread in mine if thread.name == "save checkpoints"] == []
    with raises(CheckpointError):
        saver.save(20, parts_of(2), metrics={})


def test_closing_a_saver_that_never_saved_does_nothing(make, store):
    make().close()
    assert not store.folder.exists()


def test_saving_works_from_a_thread_that_is_not_the_main_one(make, store):
    saver = make()
    caller = threading.Thread(target=saver.save, args=(10, parts_of(1)), kwargs={"metrics": {}})
    caller.start()
    caller.join()
    saver.wait(must_succeed=True)
    assert store.steps() == [10]


def test_the_interpreter_ends_though_the_disk_never_answers(tmp_path):
    code = """
        import os, sys, threading, torch
        from trainwright.checkpoint.background import BackgroundSaver
        from trainwright.checkpoint.retention import Retention
        from trainwright.checkpoint.store import CheckpointStore

        reached = threading.Event()
        def stuck(descriptor):
            reached.set()
            threading.Event().wait()

        os.fsync = stuck
        saver = BackgroundSaver(CheckpointStore(sys.argv[1]), retention=Retention(1))
        saver.save(1, {"model": {"w": torch.zeros(2)}}, metrics={})
        assert reached.wait(10)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "checkpoints")]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert CheckpointStore(tmp_path / "checkpoints").steps() == []
