"""kill -9 before every act of a save of a real run: the same command goes on and ends as if nothing had happened.

A child counts its acts on the file system from the end of step 4 to the end of step 5, in the thread that saves, and
kills itself before the n-th; each write is also cut in half. The parent tries every n. Acts that only read change
nothing for whoever comes after, so that a death before them is a death before the next one.
"""

import os
import signal
import sys
import threading

import pytest
from tests.faults.hooks import die, kill_at
from tests.faults.runs import assert_same_end, copy_run, store_of, train

from trainwright import Hook

ACTS = {
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "os.symlink", "os.link", "os.utime"),
    *("fcntl.flock", "fcntl.lockf"),
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NUM_SHARES = 4  # as many tests, which the workers of xdist share


class DieBeforeAct(Hook):
    """Counts the acts of the save of step 4 in the thread that writes it, and dies before number `number`."""

    def __init__(self, number, thread_name):
        self.number, self.thread_name = number, thread_name
        self.count, self.is_counting = 0, False
        self.fsync, self.write = os.fsync, os.write

    def before_train(self):
        os.fsync, os.write = self.counted_fsync, self.counted_write
        sys.addaudithook(self.hear)

    def after_step(self):
        if self.trainer.step in (4, 5):
            self.trainer.checkpoints.settle()  # the save before is not counted, and step 4's is counted to its end
            self.is_counting = self.trainer.step == 4

    def after_train(self):
        (self.trainer.folder / "acts").write_text(str(self.count))

    def hear(self, event, arguments):
        if event in ACTS or (event == "open" and arguments[2] & WRITES):
            self.act()

    def act(self):
        if self.is_counting and threading.current_thread().name == self.thread_name:
            if self.count == self.number:
                die()
            self.count += 1

    def counted_fsync(self, descriptor):
        self.act()
        self.fsync(descriptor)

    def counted_write(self, descriptor, content):
        self.act()
        half = len(content) // 2
        if half:
            self.write(descriptor, content[:half])
            self.act()
        return half + self.write(descriptor, content[half:])


@pytest.mark.parametrize("share", range(NUM_SHARES))
@pytest.mark.parametrize("saving", ["asynchronous", "synchronous"])
def test_a_run_killed_before_any_act_of_a_save_ends_as_if_nothing_had_happened(saving, share, tmp_path, tried):
    settings = ("checkpoint.keep_last=1", f"checkpoint.asynchronous={str(saving == 'asynchronous').lower()}")
    thread = "save checkpoints" if saving == "asynchronous" else "MainThread"
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    assert train(whole, *settings, hooks=[DieBeforeAct(None, thread)]) == 0
    num_acts = int((whole / "acts").read_text())
    assert num_acts > 80
    assert train(begun, *settings, hooks=[kill_at(3)]) == -signal.SIGKILL
    numbers = range(share, num_acts, NUM_SHARES)
    found = []
    for number in numbers:
        run = copy_run(begun, tmp_path / f"act-{number}")
        assert train(run, *settings, hooks=[DieBeforeAct(number, thread)]) == -signal.SIGKILL
        found.append(4 in store_of(run).steps())
        assert train(run, *settings) == 0
        assert_same_end(whole, run)
        assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith((".", "damaged"))]
    assert found == sorted(found)  # none before the commit, and from there on one
    assert set(found) == {False, True}
    tried("kill -9 before each act of a save (open, write, sync, rename, link, removal)", cases=len(numbers))
