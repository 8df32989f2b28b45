"""A job of SLURM that was told to leave asks to be queued again: once, by the first rank, and only if it left."""

import os
import signal

import pytest
from tests.faults.runs import SMALL, log_of
from tests.faults.two_ranks import Fault, Run, send
from tests.messages import mentions

REQUEUE = (*SMALL, "preemption.requeue=true")


@pytest.fixture
def scontrol(tmp_path):
    """A `scontrol` that notes how it was called, and what it is to say; returns what puts it on the child's PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n. {tmp_path}/rest\n')
    (folder / "scontrol").chmod(0o755)
    (tmp_path / "rest").write_text("")

    def prepare(job="4711"):
        def act():
            os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
            os.environ.pop("SLURM_JOB_ID", None)
            if job is not None:
                os.environ["SLURM_JOB_ID"] = job

        return act

    return prepare


def calls(tmp_path):
    return (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []


@pytest.mark.parametrize("told", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
def test_a_job_that_was_told_to_leave_is_queued_again_once(told, tmp_path, scontrol, tried):
    tried("a SLURM job that is preempted")
    fault = Fault("forward", send(signal.SIGUSR1), ranks=told, step=3)
    run = Run(tmp_path / "run", *REQUEUE, faults=[fault], prepare=scontrol())
    assert run.wait() == [128 + signal.SIGUSR1] * 2
    assert calls(tmp_path) == ["requeue 4711"]
    assert "Requeued job 4711." in log_of(tmp_path / "run")


def test_a_job_that_ends_by_itself_is_not_queued_again(tmp_path, scontrol):
    assert Run(tmp_path / "run", *REQUEUE, num_ranks=1, prepare=scontrol()).wait() == [0]
    assert calls(tmp_path) == []


def test_what_is_no_job_of_slurm_is_told_so(tmp_path, scontrol):
    fault = Fault("forward", send(signal.SIGTERM), step=3)
    run = Run(tmp_path / "run", *REQUEUE, num_ranks=1, faults=[fault], prepare=scontrol(job=None))
    assert run.wait() == [128 + signal.SIGTERM]
    assert calls(tmp_path) == []
    assert mentions(log_of(tmp_path / "run"), "SLURM_JOB_ID")


def test_a_rejection_of_slurm_is_a_warning_and_the_run_is_safe(tmp_path, scontrol, tried):
    tried("SLURM refuses to requeue a job")
    (tmp_path / "rest").write_text("echo 'Requested operation is disabled' >&2\nexit 1\n")
    fault = Fault("forward", send(signal.SIGTERM), step=3)
    run = Run(tmp_path / "run", *REQUEUE, num_ranks=1, faults=[fault], prepare=scontrol())
    assert run.wait() == [128 + signal.SIGTERM]
    assert "cannot requeue job 4711: Requested operation is disabled" in log_of(tmp_path / "run")
