"""The launcher's answers: exit codes of ranks and signals, and no orphans. Real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainwright.checkpoint.store import CheckpointStore

PROJECT = Path(__file__).parents[1] / "project"
LONG = (
    "trainer.max_steps=1000000",
    "log.every_steps=1",
    "evaluation.every_steps=1000000",
    "checkpoint.every_steps=1000000",
)


def start(tmp_path, *overrides):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainwright", "train", PROJECT / "run.yaml", "--nproc", "2", "name=launched"]
    return subprocess.Popen([*command, *overrides], cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_steps(folder):
    """Waits until the run has written a line, so that it is in its loop."""
    deadline = time.monotonic() + 60
    while not (folder / "metrics.json").exists():
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.1)


def test_an_explained_error_of_the_ranks_is_the_launchers_exit_code(tmp_path):
    process = start(tmp_path, "trainer.optimizer.type=adamww")
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 2
    assert 'no optimizer "adamww". Did you mean "adamw"?' in errors
    assert "ChildFailedError" not in errors


def test_a_killed_launcher_leaves_no_orphans_and_no_step_is_lost(tmp_path):
    process = start(tmp_path, *LONG)
    folder = tmp_path / "runs" / "launched"
    wait_for_steps(folder)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    store, deadline = CheckpointStore(folder / "checkpoints"), time.monotonic() + 60
    while not store.steps():
        assert time.monotonic() < deadline, "the ranks did not save when their launcher died"
        time.sleep(0.1)
    store.verify(store.steps()[-1])


def test_a_signal_to_the_launcher_reaches_the_ranks_and_is_its_exit_code(tmp_path):
    launched = start(tmp_path, *LONG)
    wait_for_steps(tmp_path / "runs" / "launched")
    launched.send_signal(signal.SIGUSR1)
    assert launched.wait(timeout=60) == 138
    last = [line for line in (tmp_path / "runs/launched/metrics.json").read_text().splitlines() if line][-1]
    assert CheckpointStore(tmp_path / "runs/launched/checkpoints").newest_intact() == json.loads(last)["step"]
