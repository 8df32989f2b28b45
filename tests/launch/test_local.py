"""The launcher's answers: exit codes of ranks and signals, and no orphans. Real processes."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.distributed.forked_launch import command, launch_well
from tests.launch.forked_launcher import Launcher
from tests.messages import mentions, raises

from trainwright import cli
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import TrainwrightError
from trainwright.launch import local

PROJECT = Path(__file__).parents[1] / "project"
LONG = (
    "trainer.max_steps=1000000",
    "log.every_steps=1",
    "evaluation.every_steps=1000000",
    "checkpoint.every_steps=1000000",
)


FAILS = """
import os, signal
from pathlib import Path
from trainwright import Hook


class KillOnce(Hook):
    def after_step(self):
        mark = Path(os.environ["MARK"])
        if self.trainer.step == 7 and self.trainer.ranks.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
DIES = """
import os
if os.environ["RANK"] == "1":
    os._exit(9)
"""


def start(tmp_path, *overrides, project=PROJECT):
    return Launcher(tmp_path, "train", project / "run.yaml", "--nproc", "2", "name=launched", *overrides)


def wait_for_steps(folder):
    """Waits until the run has written a line, so that it is in its loop."""
    deadline = time.monotonic() + 60
    while not (folder / "metrics.json").exists():
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.1)


def test_an_explained_error_of_the_ranks_is_the_launchers_exit_code(tmp_path):
    process = start(tmp_path, "trainer.optimizer.type=adamww", "--max-restarts", "2")
    assert process.wait() == 2
    errors = process.said
    # Both ranks met it, and no restart makes it go away: it is shown once.
    assert errors.count('no optimizer "adamww". Did you mean "adamw"?') == 1
    assert "ChildFailedError" not in errors
    assert "Restart" not in errors
    # Torch's launcher logs who was told to end and who failed; all of it is said in the one error.
    assert not re.search(r"^[WE]\d{4} |exitcode|closing signal", errors, re.MULTILINE)
    assert not re.search(r"^rank \d+:", errors, re.MULTILINE), "a setting is wrong on every rank"


def test_a_killed_launcher_leaves_no_orphans_and_no_step_is_lost(tmp_path):
    process = start(tmp_path, *LONG)
    folder = tmp_path / "runs" / "launched"
    wait_for_steps(folder)
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    store, deadline = CheckpointStore(folder / "checkpoints"), time.monotonic() + 60
    while not store.steps():
        assert time.monotonic() < deadline, "the ranks did not save when their launcher died"
        time.sleep(0.1)
    store.verify(store.steps()[-1])


WAITS = """
import os, time
from pathlib import Path
if os.environ["RANK"] == "1":
    Path(os.environ["MARK"]).touch()
    time.sleep(300)
"""


def ranks_of(launcher):
    return [int(each) for each in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def wait_until(is_so, seconds=60):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("moment", ["as soon as its ranks exist", "while one imports and one waits in the rendezvous"])
def test_a_launcher_that_is_killed_at_start_up_leaves_no_orphans(moment, tmp_path, monkeypatch):
    project, mark = tmp_path / "project", tmp_path / "mark"
    shutil.copytree(PROJECT, project)
    (project / "waits.py").write_text(WAITS)
    monkeypatch.setenv("MARK", str(mark))
    process = start(tmp_path, "imports=[waits.py]", project=project)
    wait_until(lambda: len(ranks_of(process.process)) == 2)
    if moment != "as soon as its ranks exist":
        wait_until(mark.exists)
        time.sleep(2)  # for rank 0 to be in the rendezvous; the outcome is the same if it is not there yet
    ranks = ranks_of(process.process)
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), seconds=30)


def test_a_worker_without_prctl_notices_that_its_launcher_died(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(local, "_PARENT_CHECK_SECONDS", 0.05)
    reader, writer = os.pipe()
    launcher = os.fork()
    if not launcher:
        monkeypatch.setenv("TRAINWRIGHT_LAUNCHED", "/nowhere")
        monkeypatch.setenv("TRAINWRIGHT_LAUNCHER", str(os.getpid()))
        if not os.fork():
            local.die_with_launcher()
            os.write(writer, b"watching")
            time.sleep(60)
            os.write(writer, b"still there")
        else:
            time.sleep(60)
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 20) == b"watching"
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert os.read(reader, 20) == b"", "closed by the end of the worker"
    os.close(reader)


def test_a_signal_to_the_launcher_reaches_the_ranks_and_is_its_exit_code(tmp_path):
    launched = start(tmp_path, *LONG)
    wait_for_steps(tmp_path / "runs" / "launched")
    launched.send(signal.SIGUSR1)
    assert launched.wait() == 138
    last = [line for line in (tmp_path / "runs/launched/metrics.json").read_text().splitlines() if line][-1]
    assert CheckpointStore(tmp_path / "runs/launched/checkpoints").newest_intact() == json.loads(last)["step"]


def untimed_lines(tmp_path):
    timed = re.compile(r"_per_second|_per_step|slowest_rank_share")
    lines = map(json.loads, (tmp_path / "runs/launched/metrics.json").read_text().splitlines())
    return [{name: value for name, value in line.items() if not timed.search(name)} for line in lines]


def test_a_lost_process_restarts_the_group_which_repeats_the_same_losses(tmp_path, monkeypatch):
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project)
    (project / "hooks").mkdir()
    (project / "hooks" / "fails.py").write_text(FAILS)
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    overrides = ("hooks=[fails.KillOnce]", "log.every_steps=1")
    (tmp_path / "mark").touch()  # the first run is left in peace
    launch_well(tmp_path, 2, command("train", project / "run.yaml", "name=launched", *overrides))
    undisturbed = untimed_lines(tmp_path)
    (tmp_path / "mark").unlink()
    process = start(tmp_path, *overrides, "--fresh", "--max-restarts", "1", project=project)
    assert process.wait() == 0, process.said
    errors = process.said
    lost = r"^Rank 1 \(process \d+\) was ended by SIGKILL\. Restart 1 of 1: starting all ranks again\.$"
    assert len(re.findall(lost, errors, re.MULTILINE)) == 1
    assert "Traceback" not in errors, "the other rank only says that it lost a connection"
    assert errors.count("Restart 1: the run resumes from its newest checkpoint.") == 1
    assert untimed_lines(tmp_path) == undisturbed
    assert len(undisturbed) == 12
    # --fresh was for the first attempt: the run before was set aside, this one's own steps were not.
    assert len(list((tmp_path / "runs").iterdir())) == 2
    for rank in range(2):
        said = (tmp_path / "runs/launched/logs" / f"rank-{rank}.txt").read_text()
        assert said.count("12 steps of 8 samples") == 2, "both attempts write there"


def test_a_rank_that_dies_at_start_up_ends_all_and_is_named(tmp_path):
    (tmp_path / "project").mkdir()
    shutil.copytree(PROJECT, tmp_path / "project", dirs_exist_ok=True)
    (tmp_path / "project" / "dies.py").write_text(DIES)
    process = start(tmp_path, "imports=[dies.py]", project=tmp_path / "project")
    assert process.wait() == 9
    errors = process.said
    (pid,) = re.findall(r"^Rank 1 \(process (\d+)\) exited with code 9\. It printed no error\.$", errors, re.MULTILINE)
    assert not Path(f"/proc/{pid}").exists()
    alive = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout
    assert str(tmp_path) not in alive, "an orphan is left"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes", "2"], "--nnodes 2 needs --rendezvous HOST:PORT"),
        (["--rendezvous", "here:1"], "--rendezvous is for several machines"),
        (["--nnodes", "2", "--rendezvous", "here"], "'here' is not HOST:PORT, such as node-1:29400"),
    ],
)
def test_options_of_a_launcher_that_do_not_fit_are_rejected(options, message, in_tmp, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trainwright", "train", str(PROJECT / "run.yaml"), *options])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_launcher_inside_a_launcher_is_rejected(in_tmp, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(sys, "argv", ["trainwright", "train", str(PROJECT / "run.yaml"), "--nproc", "2"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert mentions(capsys.readouterr().err, "WORLD_SIZE")


@pytest.fixture
def other_launcher(tmp_path, monkeypatch):
    """The folder that the processes of another launcher, such as torchrun, share."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"trainwright-{os.getuid()}-{os.getppid()}"


def test_the_ranks_of_another_launcher_share_a_folder_of_their_user(other_launcher):
    assert [local.shared_folder() for _ in range(2)] == [other_launcher] * 2
    assert stat.S_IMODE(other_launcher.stat().st_mode) == 0o700


@pytest.mark.parametrize("found", ["a link", "a broken link", "a file", "open to others"])
def test_a_shared_folder_that_may_belong_to_someone_else_is_rejected(found, other_launcher, tmp_path):
    if found == "a file":
        other_launcher.touch()
    elif found == "open to others":
        other_launcher.mkdir()
        other_launcher.chmod(0o770)
    else:
        other_launcher.symlink_to(tmp_path if found == "a link" else tmp_path / "nowhere")
    with raises(TrainwrightError, str(other_launcher), golden=False):
        local.shared_folder()
    assert not (tmp_path / "nowhere").exists()
