"""A run outlives the readers of its output: a closed pipe or terminal does not end it; SIGHUP saves, unless ignored."""

import fcntl
import os
import signal
import sys
import termios

import pytest
from tests.faults.runs import SMALL, assert_same_end, log_of, stderr_of, store_of, train
from tests.faults.test_two_launched import begin, end, wait_until
from tests.faults.two_ranks import train_two

from trainwright import Hook

CONSOLE = ("writers=[console, json]", "log.every_steps=1")
HUP = signal.SIGHUP


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folders of runs that nothing happened to, by their number of ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(folder / "one", *SMALL, *CONSOLE) == 0
    assert train_two(folder / "two", *SMALL, *CONSOLE) == [0, 0]
    return {1: folder / "one", 2: folder / "two"}


class CloseReader(Hook):
    """Closes the other end of stdout and stderr after the third step; each step prints."""

    reader = None

    def after_step(self):
        if self.trainer.step == 3:
            os.close(self.reader)
        print("a line of user code", flush=True)

    def connect(self, make, *, controls=False):
        """Makes a new pipe or terminal this process's stdout and stderr."""
        self.reader, writer = make()
        if controls:
            os.setsid()
            fcntl.ioctl(writer, termios.TIOCSCTTY, 0)
        for number in (1, 2):
            os.dup2(writer, number)
        os.close(writer)
        sys.stdout, sys.stderr = (open(each, "w", encoding="utf-8", closefd=False) for each in (1, 2))  # noqa: SIM115


@pytest.mark.parametrize("make", [os.pipe, os.openpty])
def test_a_run_whose_output_nobody_reads_ends_well(make, tmp_path, undisturbed, tried):
    tried("stdout and stderr without a reader: a pipe, a terminal")
    hook = CloseReader()
    assert train(tmp_path / "run", *SMALL, *CONSOLE, hooks=[hook], prepare=lambda: hook.connect(make)) == 0
    assert log_of(tmp_path / "run").count("the run continues") == (2 if make is os.pipe else 1)  # one for each stream
    assert_same_end(undisturbed[1], tmp_path / "run")


def test_output_on_a_full_disk_is_discarded(tmp_path, undisturbed, tried):
    tried("stdout and stderr on a full disk (/dev/full)")
    hook = CloseReader()

    def make():
        return os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)

    assert train(tmp_path / "run", *SMALL, *CONSOLE, hooks=[hook], prepare=lambda: hook.connect(make)) == 0
    assert "No space left on device" in log_of(tmp_path / "run")
    assert_same_end(undisturbed[1], tmp_path / "run")


def test_a_run_whose_own_terminal_is_closed_saves_and_goes_on(tmp_path, undisturbed, tried):
    tried("the terminal of a run is closed (SIGHUP, then no output)")
    hook = CloseReader()
    code = train(
        tmp_path / "run", *SMALL, *CONSOLE, hooks=[hook], prepare=lambda: hook.connect(os.openpty, controls=True)
    )
    assert code == 128 + HUP
    assert store_of(tmp_path / "run").newest_intact() in (3, 4), "the step in which the signal came is saved"
    assert train(tmp_path / "run", *SMALL, *CONSOLE) == 0
    assert_same_end(undisturbed[1], tmp_path / "run")


def test_a_run_under_nohup_outlives_its_terminal(tmp_path, undisturbed, tried):
    tried("the terminal of a run under nohup is closed")
    hook = CloseReader()

    def under_nohup():
        signal.signal(HUP, signal.SIG_IGN)
        hook.connect(os.openpty, controls=True)

    assert train(tmp_path / "run", *SMALL, *CONSOLE, hooks=[hook], prepare=under_nohup) == 0
    assert_same_end(undisturbed[1], tmp_path / "run")


@pytest.mark.parametrize("is_ignored", [False, True])
def test_sighup_to_a_launcher_is_as_sigterm_unless_it_is_ignored(is_ignored, tmp_path, undisturbed, tried):
    tried("SIGHUP to a launcher, with and without nohup")
    folder = tmp_path / "run"
    before = signal.signal(HUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        launcher = begin("forked", "trainwright", folder, *CONSOLE, "hooks=[tests.faults.once:Slowly]")
    finally:
        signal.signal(HUP, before)
    wait_until(lambda: store_of(folder).steps(), launcher)
    os.kill(launcher.process, HUP)
    assert end(launcher, folder) == (0 if is_ignored else 128 + HUP), stderr_of(folder)
    if not is_ignored:
        assert train_two(folder, *SMALL, *CONSOLE) == [0, 0]
    assert_same_end(undisturbed[2], folder)
