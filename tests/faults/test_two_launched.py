"""The real commands: `trainwright train --nproc 2` that is told to leave, and torchrun that starts dead ranks again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.faults.runs import SMALL, assert_same_end, log_of, store_of
from tests.faults.two_ranks import PATIENCE_SECONDS, train_two

HERE = Path(__file__).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TRAINWRIGHT = ("-m", "trainwright", "train", str(HERE / "run.yaml"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train_two(folder, *SMALL) == [0, 0]
    return folder


def begin(command, folder, *overrides):
    """Starts a command that trains the run in `folder`."""
    place = (f"name={folder.name}", f"output_dir={folder.parent}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with folder.with_name("said").open("a") as said:
        return subprocess.Popen(
            [*command, *SMALL, *place, *overrides], cwd=HERE.parents[1], env=environment, stdout=said, stderr=said
        )


def end(process, folder):
    """How a command ended; if it does not, the test fails."""
    try:
        return process.wait(PATIENCE_SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE_SECONDS)
            print(folder.with_name("said").read_text())


def wait_until(is_so, process):
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_so() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert is_so()


@pytest.mark.slow
def test_a_command_that_is_told_to_leave_saves_and_goes_on(tmp_path, undisturbed):
    folder = tmp_path / "run"
    command = begin((sys.executable, *TRAINWRIGHT, "--nproc", "2"), folder, "hooks=[tests.faults.once:Slowly]")
    wait_until(lambda: store_of(folder).steps(), command)
    command.send_signal(signal.SIGTERM)
    assert end(command, folder) == 128 + signal.SIGTERM
    saved = store_of(folder).steps()[-1]
    assert f"SIGTERM: step {saved} is finished and saved" in log_of(folder)
    assert train_two(folder, *SMALL) == [0, 0]
    assert_same_end(undisturbed, folder)


def test_a_rank_that_dies_is_started_again_by_torchrun(tmp_path, undisturbed, tried):
    tried("kill -9 of a rank under torchrun --max-restarts")
    folder, marker = tmp_path / "run", tmp_path / "died"
    hook = f"hooks=[{{type: tests.faults.once:DieOnce, marker: {marker}, step: 5}}]"
    assert end(begin((*TORCHRUN, "--max-restarts=2", *TRAINWRIGHT), folder, hook), folder) == 0
    assert marker.exists()
    assert_same_end(undisturbed, folder)


def test_a_rank_in_a_collective_that_never_ends_leaves_at_the_deadline_and_takes_the_other_along(
    tmp_path, undisturbed, tried
):
    tried("SIGTERM to one rank of a launched run while the other is stuck")
    folder, marker = tmp_path / "run", tmp_path / "stuck"
    hook = f"hooks=[{{type: tests.faults.once:StickOnce, marker: {marker}, step: 4}}]"
    deadline = "preemption.deadline_seconds=0.5"
    command = begin((sys.executable, *TRAINWRIGHT, "--nproc", "2"), folder, hook, deadline)
    wait_until(lambda: marker.exists() and marker.read_text(), command)
    os.kill(int(marker.read_text()), signal.SIGTERM)
    assert end(command, folder) == 128 + signal.SIGTERM
    assert "leaving without saving" in log_of(folder)
    assert store_of(folder).newest_intact() == 4
    assert train_two(folder, *SMALL) == [0, 0]
    assert_same_end(undisturbed, folder)
