"""SLURM: writes the job file of a run, submits it, follows its log, and queues a job again. Imports no torch.

The job file is for people to read and change: it says in plain shell what happens on which machine.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainwright.errors import ConfigError, TrainwrightError

logger = logging.getLogger(__name__)

SETTINGS: Mapping[str, str] = {
    "nodes": "how many machines",
    "gpus": "GPUs, and so processes, on each machine; without it one process runs on the CPU of each",
    "cpus": "cores for each machine",
    "memory": "main memory of each machine, such as 200G",
    "time": "the time limit, such as 24:00:00; the run saves before it and is queued again",
    "partition": "the partition",
    "account": "who pays",
    "qos": "the quality of service",
    "constraint": "features that the machines must have",
    "reservation": "a reservation",
    "nodelist": "machines to use",
    "exclude": "machines to leave out",
    "dependency": "jobs to wait for",
    "restarts": "how often the processes are started again after one is lost, 3",
    "before": "seconds before the time limit at which the run is told to save, 120",
}
"""What may stand after --slurm, as name=value."""

# How sbatch spells what we call otherwise; the rest is spelled alike.
_SPELLED = {"gpus": "gpus-per-node", "cpus": "cpus-per-task", "memory": "mem"}
_OWN = ("restarts", "before")
_FOLLOW_SECONDS = 1.0


@dataclass(frozen=True)
class SlurmJob:
    """A run as a job: which command, on how many machines, with which options of sbatch."""

    name: str
    command: Sequence[str]
    """`trainwright train run.yaml …`, without options of a launcher."""
    nodes: int = 1
    processes: int = 1
    """On each machine."""
    restarts: int = 3
    before: int = 120
    """Seconds before the time limit at which the run is told to leave."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further options of sbatch, by its own spelling."""

    def text(self) -> str:
        """Returns the job file."""
        name = file_stem(self.name)
        options = {
            "job-name": name,
            "nodes": str(self.nodes),
            "ntasks-per-node": "1",
            **self.options,
            "output": self.log_name("%j"),
            "open-mode": "append",
            "requeue": "",
            "signal": f"USR1@{self.before}",
        }
        lines = [f"#SBATCH --{name}{'=' + value if value else ''}" for name, value in options.items()]
        return _JOB.format(
            name=name,
            # srun does not take this one over from sbatch.
            cores=" --cpus-per-task=" + self.options["cpus-per-task"] if "cpus-per-task" in self.options else "",
            options="\n".join(lines),
            remark="" if "cpus-per-task" in self.options else _NO_CPUS,
            before=self.before,
            command=" \\\n        ".join(_wrapped(self.command)),
            processes=self.processes,
            restarts=self.restarts,
        )

    def log_name(self, job_id: str) -> str:
        """Returns the file that the job writes, in the folder where it is submitted."""
        return f"{file_stem(self.name)}-{job_id}.log"


_NO_CPUS = """\
# No cpus= was given: on many clusters a task then gets one CPU, for all processes of its machine and their workers.
# Write the file again with cpus=N after --slurm, or add --cpus-per-task=N above and to srun below.
"""

_JOB = """\
#!/bin/bash
# Trains the run "{name}". Written by `trainwright launch`; change what you like, and submit it with: sbatch THIS_FILE
{options}
# Above: all attempts write one log (open-mode), the job may be queued again (requeue), and {before} s before the time
# limit every process is told to leave (signal): the run finishes its step and saves it.
{remark}
# Lines that prepare the environment belong here, such as: module load cuda; source .venv/bin/activate

# One launcher on each machine; they meet at the first one, at a port of this job's own.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
echo "Attempt $((${{SLURM_RESTART_COUNT:-0}} + 1)) of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"

meet=()
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    meet=(--nnodes "$SLURM_JOB_NUM_NODES" --rendezvous "$first:$port")
fi
# --wait: when a machine has ended, the others have a minute to end too.
srun --ntasks-per-node=1{cores} --wait=60 \\
    {command} \\
        --nproc {processes} --max-restarts {restarts} "${{meet[@]}}"
code=$?

case $code in
    # 138: the time is up and the step is saved. 75: a rank was stuck. Both go on where they were, in another turn.
    138 | 75) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
"""


def read_settings(words: Sequence[str]) -> dict[str, str]:
    """Returns what stands after --slurm as name → value; unknown names and numbers that are none are rejected."""
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1)
            hint = f' Did you mean "{near[0]}"?' if near else ""
            raise ConfigError(
                f'--slurm: no setting "{name}".{hint} Known: {", ".join(SETTINGS)}. '
                "Other options of sbatch can be written into the job file by hand."
            )
        if not equals or not value.strip() or "\n" in value:
            raise ConfigError(f"--slurm: {word!r} is not NAME=VALUE, such as nodes=4.")
        settings[name] = value.strip()
    for name in ("nodes", "gpus", "cpus", "restarts", "before"):
        smallest = 0 if name == "restarts" else 1
        if name in settings and not (settings[name].isdecimal() and int(settings[name]) >= smallest):
            raise ConfigError(f"--slurm: {name}={settings[name]} is not a whole number from {smallest} on.")
    return settings


def job_of(name: str, command: Sequence[str], settings: Mapping[str, str]) -> SlurmJob:
    """Returns the job that runs a command with these settings (`read_settings`)."""
    options = {_SPELLED.get(key, key): value for key, value in settings.items() if key not in ("nodes", *_OWN)}
    return SlurmJob(
        name=name,
        command=command,
        nodes=int(settings.get("nodes", 1)),
        processes=int(settings.get("gpus", 1)),
        restarts=int(settings.get("restarts", 3)),
        before=int(settings.get("before", 120)),
        options=options,
    )


def file_stem(name: str) -> str:
    """Returns a run's name as the name of a file."""
    return re.sub(r"[^\w.-]+", "-", name)


def submit(path: Path) -> str:
    """Submits a job file and returns the job's number."""
    if shutil.which("sbatch") is None:
        raise TrainwrightError(
            f"--submit: there is no sbatch here. Take {path} to a machine of the cluster: sbatch {path}"
        )
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TrainwrightError(f"--submit: sbatch rejected {path}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def follow(job_id: str, log: Path, *, pause_seconds: float = _FOLLOW_SECONDS) -> Iterator[str]:
    """Yields what the job writes, as it comes, until SLURM knows nothing more of it."""
    position, is_over = 0, False
    while True:
        if log.exists():
            with log.open("rb") as file:
                file.seek(position)
                fresh = file.read()
            position += len(fresh)
            if fresh:
                yield fresh.decode("utf-8", errors="replace")
        if is_over:
            return
        is_over = not _is_known(job_id)  # then what it wrote last is read once more
        if not is_over:
            time.sleep(pause_seconds)


def _is_known(job_id: str) -> bool:
    """Is the job waiting or running? A finished one is forgotten after minutes, or shown without a state of these."""
    asked = ["squeue", "--noheader", "--format=%T", f"--jobs={job_id}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
    return any(line.strip() not in ended for line in done.stdout.splitlines())


def _wrapped(command: Sequence[str]) -> list[str]:
    """The command's words as a shell takes them; the program and its file on one line, each override on its own."""
    words = [shlex.quote(word) for word in command]
    head = next((place for place, word in enumerate(words) if word.endswith((".yaml", ".yml"))), len(words) - 1) + 1
    return [" ".join(words[:head]), *words[head:]]


def requeue() -> None:
    """Puts this job back into the queue; a warning says why where that fails, for the run itself is safe."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        logger.warning("preemption.requeue: this is no job of SLURM (SLURM_JOB_ID is not set). Start it again by hand.")
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()
        logger.warning("preemption.requeue: job %s could not be queued again: %s. Start it again by hand.", job, why)
    else:
        logger.info("Job %s is queued again.", job)
