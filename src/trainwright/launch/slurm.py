"""Writes the SLURM job file of a run, submits it, follows its log and requeues a job. Does not import torch.

The job file is plain shell that users read and edit.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import ConfigError, TrainwrightError

logger = logging.getLogger(__name__)

SETTINGS: Mapping[str, str | None] = {
    "nodes": "nodes",
    "gpus": "gpus-per-node",
    "cpus": "cpus-per-task",
    "memory": "mem",
    "time": "time",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "reservation": "reservation",
    "nodelist": "nodelist",
    "exclude": "exclude",
    "dependency": "dependency",
    "restarts": None,
    "before": None,
}
"""The settings that may follow --slurm as NAME=VALUE, and sbatch's option for each; docs/launching.md explains them."""

_FOLLOW_SECONDS = 1.0


@dataclass(frozen=True)
class SlurmJob:
    """A run as a SLURM job. `command` is `trainwright train run.yaml …` without options of a launcher."""

    name: str
    command: Sequence[str]
    settings: Mapping[str, str]
    """The values that follow --slurm (`read_settings`)."""

    @property
    def nodes(self) -> int:
        """The number of machines."""
        return int(self.settings.get("nodes", 1))

    @property
    def processes(self) -> int:
        """The number of processes on each machine."""
        return int(self.settings.get("gpus", 1))

    def text(self) -> str:
        """Returns the job file."""
        before = self.settings.get("before", "120")
        options = {
            "job-name": file_stem(self.name),
            "nodes": str(self.nodes),
            "ntasks-per-node": "1",
            **{option: self.settings[name] for name, option in SETTINGS.items() if option and name in self.settings},
            "output": self.log_name("%j"),
            "open-mode": "append",
            "requeue": "",
            "signal": f"USR1@{before}",
        }
        cpus = self.settings.get("cpus")
        text = _JOB.format(
            name=file_stem(self.name),
            options="\n".join(f"#SBATCH --{name}{'=' + value if value else ''}" for name, value in options.items()),
            # srun does not inherit this option from sbatch.
            cores="" if cpus is None else f" --cpus-per-task={cpus}",
            remark=_NO_CPUS if cpus is None else "",
            before=before,
            command=" \\\n        ".join(_command_lines(self.command)),
            processes=self.processes,
            restarts=self.settings.get("restarts", "3"),
        )
        return f"{text}{_CHECKSUM}{_digest(text)}\n"

    def write(self, path: Path) -> None:
        """Writes the job file; raises if the existing file was edited or is of another kind."""
        text = self.text()
        if path.exists():
            present = path.read_text(encoding="utf-8", errors="replace")
            before, marker, digest = present.rpartition(_CHECKSUM)
            if present != text and (not marker or digest.strip() != _digest(before)):
                raise ConfigError(
                    f"--file: {path} was edited, or is not a job file, and is not overwritten. Submit it with sbatch, "
                    "choose another with --file, or delete it."
                )
        path.write_text(text, encoding="utf-8")

    def log_name(self, job_id: str) -> str:
        """Returns the name of the job's log file, in the folder where the job is submitted."""
        return f"{file_stem(self.name)}-{job_id}.log"


_NO_CPUS = """\
# No cpus= was given: on many clusters a task then gets one CPU, for all processes of its machine and their workers.
# Write the file again with cpus=N after --slurm, or add --cpus-per-task=N above and to srun below.
"""

_JOB = """\
#!/bin/bash
# Trains the run "{name}". Written by `trainwright launch`; edit it as needed, and submit it with: sbatch THIS_FILE
{options}
# Above: all attempts write one log (open-mode), SLURM may requeue the job (requeue), and every process receives USR1
# {before} s before the time limit (signal): the run finishes its step and saves a checkpoint.
{remark}
# Add lines that prepare the environment here, such as: module load cuda; source .venv/bin/activate

# One launcher per machine; the rendezvous is on the first machine, at a port derived from the job id.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
echo "Attempt $((${{SLURM_RESTART_COUNT:-0}} + 1)) of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"

rendezvous=()
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    rendezvous=(--nnodes "$SLURM_JOB_NUM_NODES" --rendezvous "$first:$port")
fi
# --wait: after one machine ends, the others have a minute to end as well.
srun --ntasks-per-node=1{cores} --wait=60 \\
    {command} \\
        --nproc {processes} --max-restarts {restarts} "${{rendezvous[@]}}"
code=$?

case $code in
    # 138: the time limit is near and the step is saved. 75: a rank was stuck. Both resume when the job runs again.
    138 | 75) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
"""


_CHECKSUM = "# An edited job file is not written again. Checksum as written: "


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def read_settings(words: Sequence[str]) -> dict[str, str]:
    """Returns the NAME=VALUE words after --slurm as a dict; rejects unknown names and invalid numbers."""
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1)
            hint = f' Did you mean "{near[0]}"?' if near else ""
            raise ConfigError(
                f'--slurm: no setting "{name}".{hint} Known: {", ".join(SETTINGS)}. '
                "Add other options of sbatch to the job file by hand."
            )
        if not equals or not value.strip() or "\n" in value:
            raise ConfigError(f"--slurm: {word!r} is not NAME=VALUE, such as nodes=4.")
        settings[name] = value.strip()
    for name in ("nodes", "gpus", "cpus", "restarts", "before"):
        smallest = 0 if name == "restarts" else 1
        if name in settings and not (settings[name].isdecimal() and int(settings[name]) >= smallest):
            raise ConfigError(f"--slurm: {name}={settings[name]} is not a whole number of at least {smallest}.")
    return settings


def file_stem(name: str) -> str:
    """Returns a run's name with the characters replaced that do not belong in a file name."""
    return re.sub(r"[^\w.-]+", "-", name)


def submit(path: Path) -> str:
    """Submits a job file and returns the job id."""
    if shutil.which("sbatch") is None:
        raise TrainwrightError(
            f"--submit: sbatch is not installed here. Copy {path} to a machine of the cluster and run: sbatch {path}"
        )
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TrainwrightError(f"--submit: sbatch rejected {path}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def follow(job_id: str, log: Path, *, pause_seconds: float = _FOLLOW_SECONDS) -> Iterator[str]:
    """Yields new text of the job's log until the job is neither pending nor running."""
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
        is_over = not _is_active(job_id)  # the log is read once more after the job has ended
        if not is_over:
            time.sleep(pause_seconds)


def _is_active(job_id: str) -> bool:
    """Returns True if the job is pending or running. SLURM drops an ended job from the list after some minutes."""
    command = ["squeue", "--noheader", "--format=%T", f"--jobs={job_id}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
    return any(line.strip() not in ended for line in done.stdout.splitlines())


def _command_lines(command: Sequence[str]) -> list[str]:
    """Returns the quoted command: the program and its file on one line, each override on a line of its own."""
    words = [shlex.quote(word) for word in command]
    head = next((index for index, word in enumerate(words) if word.endswith((".yaml", ".yml"))), len(words) - 1) + 1
    return [" ".join(words[:head]), *words[head:]]


def requeue() -> None:
    """Requeues this job. A failure is only a warning, because the run is saved."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        logger.warning("preemption.requeue: this is not a SLURM job (SLURM_JOB_ID is not set). Start it again by hand.")
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()
        logger.warning("preemption.requeue: cannot requeue job %s: %s. Start it again by hand.", job, why)
    else:
        logger.info("Requeued job %s.", job)
