"""Starts several processes on this machine with torch's elastic launcher, and answers with their exit code.

Torch is imported only when something is launched. What a worker does is the same command, with RANK set.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import uuid
from collections.abc import Sequence

_LAUNCHED = "TRAINWRIGHT_LAUNCHED"
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def launch(num_processes: int, arguments: Sequence[str]) -> int:
    """Runs `python -m trainwright ARGUMENTS` on every rank; returns 0, or the first failing rank's exit code.

    A signal is passed on to the workers, which finish and save their step; the code is then 128 + the signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # More threads than cores are slower than one, and torch would say so with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[_LAUNCHED] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    )
    try:
        elastic_launch(config, sys.executable)("-m", "trainwright", *arguments)
    except ChildFailedError as error:
        code: int = error.get_first_failure()[1].exitcode if error.failures else 1
        return code if code >= 0 else 128 - code  # a signal as a shell would say it
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def die_with_launcher() -> None:
    """Asks Linux to send this worker SIGTERM when its launcher dies, so that a killed launcher leaves no orphans."""
    if os.environ.get(_LAUNCHED) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
