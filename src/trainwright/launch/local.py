"""Starts the processes of this machine with torch's elastic launcher, and answers with their exit code.

Torch is imported only when something is launched. What a worker does is the same command, with RANK set. With restarts
a group that lost a process is started again, and goes on from the newest checkpoint as any run does.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import HANG_EXIT_CODE, TrainwrightError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

logger = logging.getLogger(__name__)

_LAUNCHED = "TRAINWRIGHT_LAUNCHED"
"""Names a folder of the launcher's, for notes between it and its workers."""
_EXPLAINED = "explained"
_EXPLAINED_CODE = 2
_EXPLAINED_CODES = (1, _EXPLAINED_CODE, HANG_EXIT_CODE, 130, 138, 143)  # an error was shown, or a signal obeyed
_ELASTIC = "torch.distributed.elastic"
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_ADVICE = "SIGKILL often means too little memory. The same command goes on from the newest checkpoint."


def launch(
    num_processes: int,
    arguments: Sequence[str],
    *,
    max_restarts: int = 0,
    num_nodes: int = 1,
    rendezvous: str | None = None,
) -> int:
    """Runs `python -m trainwright ARGUMENTS` on every rank; returns 0, or the first failing rank's exit code.

    With several nodes each calls this, with the same `rendezvous` (HOST:PORT of any one of them). A signal is passed on
    to the workers, which finish and save their step; the code is then 128 + the signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # More threads than cores are slower than one, and torch would say so with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=num_processes,
        # All nodes must name the run alike; alone nobody else may join it.
        run_id=str(uuid.uuid4()) if num_nodes == 1 else os.environ.get("SLURM_JOB_ID", "trainwright"),
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous or "localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    )
    with tempfile.TemporaryDirectory(prefix="trainwright-launch-") as notes, _own_words(config, Path(notes)):
        os.environ[_LAUNCHED] = notes
        try:
            elastic_launch(config, sys.executable)("-m", "trainwright", *arguments)
        except ChildFailedError as error:
            if (Path(notes) / _EXPLAINED).exists():
                return _EXPLAINED_CODE  # the others failed because that rank was gone
            rank, failure = error.get_first_failure()
            return _say_how_it_ended(rank, failure.pid, failure.exitcode)
        except SignalException as error:
            return 128 + int(error.sigval)
        except RendezvousError as error:
            raise TrainwrightError(
                f"The {num_nodes} machines did not meet at {rendezvous}: {error} Is the command started on all, "
                "with the same --nnodes and --rendezvous, and can they reach that address?"
            ) from error
        finally:
            del os.environ[_LAUNCHED]
    return 0


@contextmanager
def _own_words(config: LaunchConfig, notes: Path) -> Iterator[None]:
    """Keeps the log lines of torch's launcher from being shown, unless every detail is wanted: we say it ourselves."""
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_ELASTIC)]
    words = _TorchsWords(notes, num_nodes=config.max_nodes, max_restarts=config.max_restarts)
    for name in names:  # a logger's filter does not see what its children log
        logging.getLogger(name).addFilter(words)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(words)


class _TorchsWords(logging.Filter):
    """Takes what torch's launcher logs, and says of it who was lost where a restart follows.

    Torch tells nobody else: after a restart the failures before it are forgotten.
    """

    def __init__(self, notes: Path, *, num_nodes: int, max_restarts: int) -> None:
        super().__init__()
        self._notes = notes
        self._num_nodes = num_nodes
        self._max_restarts = max_restarts
        self._num_failures = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets nothing pass."""
        match record.args:
            case (int(code), int(local_rank), int(process), *_) if str(record.msg).startswith("failed (exitcode"):
                self._num_failures += 1
                if self._num_failures <= self._max_restarts and not (self._notes / _EXPLAINED).exists():
                    self._say_restart(local_rank, process, code)
        return False

    def _say_restart(self, local_rank: int, process: int, code: int) -> None:
        # Of several machines' launchers none knows the number among all.
        rank = f"Rank {local_rank}" if self._num_nodes == 1 else f"Local rank {local_rank} on {socket.gethostname()}"
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        logger.warning(
            "%s (process %d) %s. Restart %d of %d: all ranks are started again.",
            rank,
            process,
            ended,
            self._num_failures,
            self._max_restarts,
        )


def _say_how_it_ended(rank: int, process: int, code: int) -> int:
    """Names a rank that could say nothing itself; returns the exit code as a shell would."""
    if code < 0:
        killer = signal.Signals(-code).name
        logger.error("Rank %d (process %d) was ended by %s. %s", rank, process, killer, _ADVICE)
        return 128 - code
    if code not in _EXPLAINED_CODES:
        logger.error("Rank %d (process %d) left with exit code %d, without a word.", rank, process, code)
    return code


def is_launched() -> bool:
    """Was this process started by `launch`?"""
    return _LAUNCHED in os.environ


def num_restarts() -> int:
    """How often the processes of this run were started again after a failure, by torch's launcher or by SLURM."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) + int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def note_explained_error() -> None:
    """Lets the launcher's further attempts end at once: an error that was explained will not go away by itself."""
    if is_launched():
        (Path(os.environ[_LAUNCHED]) / _EXPLAINED).touch()


def leave_if_explained() -> None:
    """Ends a worker whose run has failed in words before; the launcher can only be told by the exit code."""
    if is_launched() and (Path(os.environ[_LAUNCHED]) / _EXPLAINED).exists():
        sys.exit(_EXPLAINED_CODE)


def die_with_launcher() -> None:
    """Asks Linux to send this worker SIGTERM when its launcher dies, so that a killed launcher leaves no orphans."""
    if is_launched() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
