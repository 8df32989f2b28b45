"""What a run asks of SLURM: to be queued again when it was told to leave. Imports no torch."""

from __future__ import annotations

import logging
import os
import subprocess

logger = logging.getLogger(__name__)


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
