"""The job file of a run, done by stand-ins for SLURM's commands: two launchers on this machine are two machines."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.messages import mentions, raises

from trainwright import cli
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.launch.slurm import SlurmJob, follow, read_settings, submit

PROJECT = Path(__file__).parents[1] / "project"

SRUN = """
import os, subprocess, sys
from pathlib import Path
command = [word for word in sys.argv[1:] if not word.startswith(("--ntasks", "--wait", "--cpus"))]
tasks = [
    subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": "2"})
    for number in range(int(os.environ["SLURM_JOB_NUM_NODES"]))
]
Path("tasks").write_text(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """
import sys
from pathlib import Path
if sys.argv[1] == "show":
    print("localhost\\nlocalhost")
else:
    Path("scontrol").write_text(" ".join(sys.argv[1:]))
"""
SBATCH = """
from pathlib import Path
Path("small-7.log").write_text("Attempt 1\\n")
print("7;cluster")
"""
SQUEUE = """
from pathlib import Path
log = Path("small-7.log")
if "Finished" not in log.read_text():
    with log.open("a") as file:
        file.write("Finished at step 12.\\n")
    print("RUNNING")
"""


@pytest.fixture
def slurm(in_tmp, monkeypatch):
    """Stand-ins on the path; returns how to add one."""
    folder = in_tmp / "bin"
    folder.mkdir()

    def add(name, program):
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{program}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]))
    return add


def launch(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["trainwright", "launch", *map(str, words)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code or 0


def test_a_job_file_is_written_again_unless_someone_has_edited_it(in_tmp, monkeypatch, capsys):
    file = Path("small.slurm")
    for nodes in ("nodes=1", "nodes=1", "nodes=2"):
        assert launch(monkeypatch, PROJECT / "run.yaml", "--slurm", nodes) == 0
    assert "#SBATCH --nodes=2" in file.read_text()
    for edited in (file.read_text().replace("# Add lines", "module load cuda\n# Add lines"), "", "notes of mine\n"):
        file.write_text(edited)
        capsys.readouterr()
        assert launch(monkeypatch, PROJECT / "run.yaml", "--slurm", "nodes=1") == 2
        assert file.read_text() == edited
        assert mentions(capsys.readouterr().err, "--file", "small.slurm")
    assert launch(monkeypatch, PROJECT / "run.yaml", "--slurm", "nodes=2", "--file", "other.slurm") == 0


def test_the_job_file_is_shell_that_a_person_can_read(in_tmp, monkeypatch, capsys):
    words = [
        "trainer.optimizer={type: lion, lr: 1e-4}",
        "name=big/run",
        "--slurm",
        "nodes=4",
        "gpus=8",
        "time=24:00:00",
        "runtime.device=cuda",
        "trainer.global_batch_size=256",
    ]
    assert launch(monkeypatch, PROJECT / "run.yaml", *words, "memory=200G", "cpus=16", "restarts=0") == 0
    assert mentions(capsys.readouterr().out, "big-run.slurm", "32", "8", "4")
    text = Path("big-run.slurm").read_text()
    assert subprocess.run(["bash", "-n", "big-run.slurm"], check=False).returncode == 0
    asked = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}
    assert asked == {
        *("--job-name=big-run", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=16"),
        *("--time=24:00:00", "--mem=200G", "--output=big-run-%j.log", "--open-mode=append", "--requeue"),
        "--signal=USR1@120",
    }
    assert (
        f"trainwright train {PROJECT / 'run.yaml'} \\\n        'trainer.optimizer={{type: lion, lr: 1e-4}}' \\\n"
        in text
    )
    assert "--nproc 8 --max-restarts 0" in text
    assert "srun --ntasks-per-node=1 --cpus-per-task=16" in text
    assert "module load" in text
    assert "No cpus= was given" not in text


def test_a_job_without_cores_says_what_that_means_and_how_to_set_them():
    text = SlurmJob("big", ["trainwright", "train", "run.yaml"], {"nodes": "2"}).text()
    assert "# No cpus= was given: on many clusters a task then gets one CPU" in text
    assert mentions(text, "--cpus-per-task=N", "srun")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([], "runtime.device: cpu does not use the GPUs that --slurm requests (gpus=8)."),
        (
            ["runtime.device=auto"],
            "8 is not micro_batch_size 4 × 32 data ranks × a whole number. Use a multiple of 128.",
        ),
        (
            ["runtime.device=auto", "runtime.mesh={tensor: 5, fsdp: -1}"],
            "fsdp ? × tensor 5 cannot have 32 ranks: 32 is not a multiple of 5.",
        ),
    ],
)
def test_what_the_number_of_processes_makes_impossible_is_rejected_as_by_the_run(
    overrides, problem, in_tmp, monkeypatch, capsys
):
    assert launch(monkeypatch, PROJECT / "run.yaml", *overrides, "--slurm", "nodes=4", "gpus=8") == 2
    assert problem in capsys.readouterr().err
    assert list(in_tmp.iterdir()) == []


def test_a_run_with_a_mistake_is_rejected_before_it_waits_in_a_queue(in_tmp, monkeypatch, capsys):
    assert launch(monkeypatch, PROJECT / "run.yaml", "trainer.max_stepss=3", "--slurm", "nodes=2") == 2
    assert "max_stepss" in capsys.readouterr().err
    assert list(in_tmp.iterdir()) == []


def test_a_cluster_must_be_named(in_tmp, monkeypatch, capsys):
    assert launch(monkeypatch, PROJECT / "run.yaml") == 2
    assert mentions(capsys.readouterr().err, "--slurm", "4", "8")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("node=4", ("nodes",)),
        ("nodes=0", ("0", "1")),
        ("gpus=many", ()),
        ("time", ("time",)),
        ("account=a\n#SBATCH --uid=0", ()),
    ],
)
def test_invalid_settings_are_rejected(word, message):
    with raises(ConfigError, *message):
        read_settings([word])


def test_a_name_cannot_write_lines_into_the_job():
    text = SlurmJob("a\nrm -r $HOME", ["trainwright", "train", "run.yaml"], {}).text()
    assert "rm -r" not in text
    assert "#SBATCH --job-name=a-rm--r-HOME\n" in text


def test_two_machines_train_save_before_the_time_limit_and_are_requeued(slurm, monkeypatch):
    slurm("srun", SRUN)
    slurm("scontrol", SCONTROL)
    slurm("trainwright", "from trainwright.cli import main\nmain()\n")
    monkeypatch.setenv("SLURM_JOB_ID", str(os.getpid()))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    long = ("trainer.max_steps=1000000", "evaluation.every_steps=1000000", "checkpoint.every_steps=1000000")
    assert launch(monkeypatch, PROJECT / "run.yaml", *long, "log.every_steps=1", "--slurm", "nodes=2") == 0
    with Path("job.log").open("w") as log:
        job = subprocess.Popen(["bash", "small.slurm"], stdout=log, stderr=log)
    folder, until = Path("runs/small"), time.monotonic() + 90
    while not (folder / "metrics.json").exists():
        assert time.monotonic() < until, Path("job.log").read_text()
        assert job.poll() is None, Path("job.log").read_text()
        time.sleep(0.1)
    for launcher in Path("tasks").read_text().split():
        os.kill(int(launcher), signal.SIGUSR1)
    assert job.wait(timeout=60) == 138, Path("job.log").read_text()
    assert Path("scontrol").read_text() == f"requeue {os.getpid()}"
    last = [line for line in (folder / "metrics.json").read_text().splitlines() if line][-1]
    assert CheckpointStore(folder / "checkpoints").newest_intact() == json.loads(last)["step"]
    said = Path("job.log").read_text()
    assert mentions(said, "1", os.getpid())
    assert "2 processes" in said


def test_a_job_is_submitted_and_what_it_writes_is_shown_until_it_ends(slurm, monkeypatch, capsys):
    slurm("sbatch", SBATCH)
    slurm("squeue", SQUEUE)
    assert launch(monkeypatch, PROJECT / "run.yaml", "--slurm", "nodes=2", "--submit") == 0
    shown = capsys.readouterr().out
    assert mentions(shown, "7", "small-7.log")
    assert shown.endswith("Attempt 1\nFinished at step 12.\n")


def test_a_job_that_never_wrote_ends_the_following(slurm, in_tmp):
    slurm("squeue", "print('CANCELLED')")
    assert list(follow("7", in_tmp / "none.log")) == []


def test_without_sbatch_the_file_is_there_and_the_error_says_where_to_take_it(in_tmp, monkeypatch):
    monkeypatch.setenv("PATH", str(in_tmp))
    with raises(TrainwrightError, "run.slurm"):
        submit(Path("run.slurm"))


def test_an_error_of_sbatch_is_shown(slurm):
    slurm("sbatch", "import sys\nsys.exit('invalid partition')")
    with raises(TrainwrightError, "run.slurm"):
        submit(Path("run.slurm"))
