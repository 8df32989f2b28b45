"""The real launchers: `trainwright train --nproc 2` that is told to leave, and torchrun that starts dead ranks again.

Here the launcher and its ranks are forked from the test process, which has torch imported; as commands, in fresh
interpreters, by `make test-slow`.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.faults.runs import SMALL, assert_same_end, fork, log_of, stderr_of, store_of
from tests.faults.two_ranks import PATIENCE_SECONDS, train_two
from tests.messages import mentions
from torch.distributed import run as torchrun
from torch.distributed.launcher import api

from trainwright import cli

HERE = Path(__file__).parent
TORCHRUN = ("--standalone", "--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.1", "-m", "trainwright")
TRAIN = ("train", str(HERE / "run.yaml"))
WAYS = ["forked", pytest.param("as a command", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train_two(folder, *SMALL) == [0, 0]
    return folder


class Forked:
    """A launcher in a forked child, which forks its ranks; it ends as the command does."""

    def __init__(self, main, words, folder):
        self.code = None
        self.process = fork(lambda: self._launch(main, words), folder)

    @staticmethod
    def _launch(main, words):
        launch = api.elastic_launch

        def fork_ranks(config, entrypoint):
            return launch(replace(config, start_method="fork"), be_a_rank)

        def be_a_rank(*words):
            sys.argv = list(words[words.index("trainwright") :])
            cli.main()

        api.elastic_launch = torchrun.elastic_launch = fork_ranks
        sys.argv = ["launcher", *words]
        try:
            main()
        except SystemExit as left:
            sys.stderr.flush()
            os._exit(int(left.code or 0))

    def poll(self):
        if self.code is None:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code

    def wait(self, seconds):
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.poll()

    def terminate(self):
        os.kill(self.process, signal.SIGTERM)


def begin(way, launcher, folder, *overrides):
    """Starts a launcher that trains the run in `folder`: torchrun, or our own."""
    place = (f"name={folder.name}", f"output_dir={folder.parent}")
    words = (*TORCHRUN, *TRAIN) if launcher == "torchrun" else (*TRAIN, "--nproc", "2")
    words += (*SMALL, *place, *overrides)
    if way == "forked":
        return Forked(torchrun.main if launcher == "torchrun" else cli.main, words, folder)
    module = "torch.distributed.run" if launcher == "torchrun" else "trainwright"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with folder.with_name(f"{folder.name}.stderr").open("a") as said:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words], cwd=HERE.parents[1], env=environment, stdout=said, stderr=said
        )


def end(process, folder):
    """How a launcher ended; if it does not, the test fails."""
    try:
        return process.wait(PATIENCE_SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE_SECONDS)
            print(stderr_of(folder))


def wait_until(is_so, process):
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_so() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert is_so()


@pytest.mark.slow
def test_a_command_that_is_told_to_leave_saves_and_goes_on(tmp_path, undisturbed):
    folder = tmp_path / "run"
    command = begin("as a command", "trainwright", folder, "hooks=[tests.faults.once:Slowly]")
    wait_until(lambda: store_of(folder).steps(), command)
    command.send_signal(signal.SIGTERM)
    assert end(command, folder) == 128 + signal.SIGTERM
    saved = store_of(folder).steps()[-1]
    assert mentions(log_of(folder), saved)
    assert train_two(folder, *SMALL) == [0, 0]
    assert_same_end(undisturbed, folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_dies_is_started_again_by_torchrun(way, tmp_path, undisturbed, tried):
    tried("kill -9 of a rank under torchrun --max-restarts")
    folder, marker = tmp_path / "run", tmp_path / "died"
    hook = f"hooks=[{{type: tests.faults.once:DieOnce, marker: {marker}, step: 5}}]"
    assert end(begin(way, "torchrun", folder, hook), folder) == 0, stderr_of(folder)
    assert marker.exists()
    assert_same_end(undisturbed, folder)


def test_a_killed_worker_of_the_loader_is_started_again_with_its_rank(tmp_path, undisturbed, tried):
    tried("kill -9 of a worker of the data loader under --max-restarts")
    folder, marker = tmp_path / "run", tmp_path / "died"
    hook = f"hooks=[{{type: tests.faults.once:KillWorkerOnce, marker: {marker}, step: 3}}]"
    slow = "data.loader={prefetch_factor: 1}"
    command = begin("forked", "trainwright", folder, hook, "data.num_workers=1", slow, "--max-restarts", "1")
    assert end(command, folder) == 0, stderr_of(folder)
    assert marker.exists()
    assert "killed by SIGKILL" in stderr_of(folder)
    assert "Restart 1" in stderr_of(folder)
    assert_same_end(undisturbed, folder)


def test_a_run_that_loses_its_workers_more_often_than_it_may_restart_exits_with_2(tmp_path):
    folder, marker = tmp_path / "run", tmp_path / "died"
    hook = f"hooks=[{{type: tests.faults.once:KillWorkerOnce, marker: {marker}, step: 3}}]"
    slow = "data.loader={prefetch_factor: 1}"
    command = begin("forked", "trainwright", folder, hook, "data.num_workers=1", slow)
    assert end(command, folder) == 2
    assert "data.train: worker 0 was killed by SIGKILL" in stderr_of(folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_in_a_collective_that_never_ends_leaves_at_the_deadline_and_takes_the_other_along(
    way, tmp_path, undisturbed, tried
):
    tried("SIGTERM to one rank of a launched run while the other is stuck")
    folder, marker = tmp_path / "run", tmp_path / "stuck"
    hook = f"hooks=[{{type: tests.faults.once:StickOnce, marker: {marker}, step: 4}}]"
    deadline = "preemption.deadline_seconds=0.5"
    command = begin(way, "trainwright", folder, hook, deadline)
    wait_until(lambda: marker.exists() and marker.read_text(), command)
    os.kill(int(marker.read_text()), signal.SIGTERM)
    assert end(command, folder) == 128 + signal.SIGTERM
    assert "exiting without saving" in log_of(folder)
    assert store_of(folder).newest_intact() == 4
    assert train_two(folder, *SMALL) == [0, 0]
    assert_same_end(undisturbed, folder)
