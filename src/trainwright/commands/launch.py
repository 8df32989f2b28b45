"""`trainwright launch run.yaml … --slurm nodes=4 gpus=8`: writes the job of a cluster for a run, and submits it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwright.commands.terminal import Trust
from trainwright.config import RunConfig, resolve_batch, resolve_mesh
from trainwright.errors import ConfigError
from trainwright.launch.slurm import SETTINGS, SlurmJob, file_stem, follow, read_settings, submit
from trainwright.registry.trust import reject_untrusted

_TOP_SETTINGS = {*RunConfig.model_fields, "extends"}


def launch(
    run: Annotated[Path, typer.Argument(help="The YAML file of the run.", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SETTING=VALUE",
            help=f"Settings of the run to replace, and of the job: {', '.join(SETTINGS)}.",
            show_default=False,
        ),
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a job file for SLURM.")] = False,
    submits: Annotated[bool, typer.Option("--submit", help="Submit the job with sbatch, and show its output.")] = False,
    file: Annotated[
        Path | None, typer.Option(help="The path of the job file.", show_default="NAME.slurm in this folder")
    ] = None,
    trust: Trust = False,
) -> None:
    """Write the job file that runs a YAML file on a cluster; --submit submits it."""
    if not slurm:
        raise ConfigError(
            "launch needs a cluster. Add --slurm, such as: --slurm nodes=4 gpus=8. "
            "On one machine: trainwright train run.yaml --nproc N."
        )
    # Settings of a job and of a run have different names, so their order does not matter.
    overrides = [word for word in words or [] if re.split("[.=]", word.removeprefix("~"))[0] in _TOP_SETTINGS]
    settings = read_settings([word for word in words or [] if word not in overrides])
    config = RunConfig.load(run, overrides, trust=trust or None)
    reject_untrusted(config)  # raises here, not after hours in a queue
    command = ["trainwright", "train", str(run), *overrides, *(["--trust"] if trust else [])]
    job = SlurmJob(config.name, command, settings)
    _check_ranks(config, job, has_gpus="gpus" in settings)
    path = file or Path(f"{file_stem(config.name)}.slurm")
    job.write(path)
    num_processes = job.nodes * job.processes
    print(f"Wrote {path}: {num_processes} processes, {job.processes} on each of {job.nodes} machines.")
    if not submits:
        print(f"Submit it with: sbatch {path}")
        return
    job_id = submit(path)
    log = Path(job.log_name(job_id))
    print(f"Submitted job {job_id}; its log is {log}. Ctrl-C stops showing it, not the job.")
    try:
        for text in follow(job_id, log):
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\nJob {job_id} continues. scancel {job_id} cancels it.")


def _check_ranks(config: RunConfig, job: SlurmJob, *, has_gpus: bool) -> None:
    """Raises the errors of the start of a run that depend on the number of processes."""
    if has_gpus and config.runtime.device.startswith("cpu"):
        raise ConfigError(
            f"runtime.device: cpu does not use the GPUs that --slurm requests (gpus={job.processes}). Set "
            "runtime.device=auto, or omit gpus=: one process then runs on the CPU of each machine.",
            where=config.origin("runtime.device"),
        )
    axes = resolve_mesh(config, job.nodes * job.processes)
    if config.data.train is not None:  # otherwise the trainer may make batches of any size
        resolve_batch(config, axes["replicate"] * axes["fsdp"])
