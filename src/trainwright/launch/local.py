"""Starts the processes of this machine with torch's elastic launcher and returns their exit code.

A worker runs the same command with RANK set. With restarts, a group that has lost a process is restarted and resumes
from the newest checkpoint. Only `launch` imports torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import HANG_EXIT_CODE, TrainwrightError
from trainwright.progress import free_terminal

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

logger = logging.getLogger(__name__)

_LAUNCHED = "TRAINWRIGHT_LAUNCHED"
"""Environment variable: a folder through which the launcher and its workers communicate."""
_LAUNCHER = "TRAINWRIGHT_LAUNCHER"
"""Environment variable: the process id of the launcher."""
_EXPLAINED = "explained"
_EXPLAINED_CODE = 2
_EXPLAINED_CODES = (1, _EXPLAINED_CODE, HANG_EXIT_CODE, 129, 130, 138, 143)
"""The rank printed an error, or exited on a signal."""
_ELASTIC = "torch.distributed.elastic"
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_PARENT_CHECK_SECONDS = 1.0  # on systems without prctl
_ADVICE = "SIGKILL often means too little memory. The same command resumes from the newest checkpoint."


def launch(
    num_processes: int,
    arguments: Sequence[str],
    *,
    max_restarts: int = 0,
    num_nodes: int = 1,
    rendezvous: str | None = None,
) -> int:
    """Runs `python -m trainwright ARGUMENTS` on every rank; returns 0, or the first failing rank's exit code.

    Every node calls this with the same `rendezvous` (HOST:PORT of one of the nodes). A signal is forwarded to the
    workers, which finish and save their step; the code is then 128 + the signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # More threads than cores would be slower than one thread; torch warns unless this is set.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=num_processes,
        # All nodes need the same id; the id of a single node is unique, so that no other run joins it.
        run_id=str(uuid.uuid4()) if num_nodes == 1 else os.environ.get("SLURM_JOB_ID", "trainwright"),
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous or "localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        signals_to_handle=",".join(_forwarded_signals()),
    )
    with tempfile.TemporaryDirectory(prefix="trainwright-launch-") as notes, _replace_torch_log(config, Path(notes)):
        os.environ.update({_LAUNCHED: notes, _LAUNCHER: str(os.getpid())})
        try:
            elastic_launch(config, sys.executable)("-m", "trainwright", *arguments)
        except ChildFailedError as error:
            if (Path(notes) / _EXPLAINED).exists():
                return _EXPLAINED_CODE  # the others failed because that rank had ended
            rank, failure = error.get_first_failure()
            free_terminal()  # a killed worker has left its panel
            return _report_failure(rank, failure.pid, failure.exitcode)
        except SignalException as error:
            return 128 + int(error.sigval)
        except RendezvousError as error:
            raise TrainwrightError(
                f"The rendezvous of {num_nodes} machines at {rendezvous} failed: {error} Start the command on all, "
                "with the same --nnodes and --rendezvous, and check that they can reach that address."
            ) from error
        finally:
            del os.environ[_LAUNCHED], os.environ[_LAUNCHER]
    return 0


def _forwarded_signals() -> list[str]:
    """Returns the signals that the launcher forwards; under nohup, which ignores SIGHUP, that one stays ignored."""
    names = ["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1"]
    return names if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [*names, "SIGHUP"]


@contextmanager
def _replace_torch_log(config: LaunchConfig, notes: Path) -> Iterator[None]:
    """Hides the log of torch's launcher, unless the level is DEBUG, and reports each restart in one line instead."""
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    num_failures = 0

    def report_restart(record: logging.LogRecord) -> bool:
        # torch reports a failure that a restart follows in its log only.
        nonlocal num_failures
        match record.args:
            case (int(code), int(local_rank), int(process), *_) if str(record.msg).startswith("failed (exitcode"):
                num_failures += 1
                if num_failures <= config.max_restarts and not (notes / _EXPLAINED).exists():
                    # A launcher of several machines does not know the global rank.
                    is_alone = config.max_nodes == 1
                    rank = f"Rank {local_rank}" if is_alone else f"Local rank {local_rank} on {socket.gethostname()}"
                    ended = _describe_exit(process, code)
                    free_terminal()
                    restart = f"Restart {num_failures} of {config.max_restarts}: starting all ranks again."
                    logger.warning("%s %s. %s", rank, ended, restart)
        return False

    names = [name for name in logging.root.manager.loggerDict if name.startswith(_ELASTIC)]
    for name in names:  # a logger's filter does not see the records of its children
        logging.getLogger(name).addFilter(report_restart)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(report_restart)


def _describe_exit(process: int, code: int) -> str:
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"(process {process}) {ended}"


def _report_failure(rank: int, process: int, code: int) -> int:
    """Logs the failed rank, unless it has printed its own error; returns the exit code like a shell."""
    if code not in _EXPLAINED_CODES:
        advice = _ADVICE if code < 0 else "It printed no error."
        logger.error("Rank %d %s. %s", rank, _describe_exit(process, code), advice)
    return 128 - code if code < 0 else code


def is_launched() -> bool:
    """Returns True if `launch` started this process."""
    return _LAUNCHED in os.environ


def shared_folder() -> Path | None:
    """Returns a temporary folder that only this user can access, the same on all ranks of a machine; None for one rank.

    The launcher of this package has created it. The processes of another launcher know only that launcher's process
    id, so they share a folder of a known name, which may belong to someone else.
    """
    if is_launched():
        return Path(os.environ[_LAUNCHED]) / "run"
    if "WORLD_SIZE" not in os.environ:
        return None
    folder = Path(tempfile.gettempdir()) / f"trainwright-{os.getuid()}-{os.getppid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise TrainwrightError(f"{folder} belongs to another user, or others can write it. Delete it, or set TMPDIR.")
    return folder


def num_restarts() -> int:
    """Returns how often torch's launcher or SLURM has restarted the processes of this run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) + int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def note_explained_error() -> None:
    """Makes further attempts of the launcher end immediately, because a restart does not fix a TrainwrightError."""
    if is_launched():
        (Path(os.environ[_LAUNCHED]) / _EXPLAINED).touch()


def leave_if_explained() -> None:
    """Exits if an earlier attempt of the run ended with a TrainwrightError."""
    if is_launched() and (Path(os.environ[_LAUNCHED]) / _EXPLAINED).exists():
        sys.exit(_EXPLAINED_CODE)


def die_with_launcher() -> None:
    """Makes this worker receive SIGTERM when its launcher dies, so that no orphans remain.

    Called first in a worker: SIGTERM ends it immediately while it starts, and later makes it save its step.
    """
    if not is_launched():
        return
    launcher = int(os.environ[_LAUNCHER])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # it died before the call
            os.kill(os.getpid(), signal.SIGTERM)
    else:
        threading.Thread(target=_watch_launcher, args=(launcher,), name="trainwright-launcher", daemon=True).start()


def _watch_launcher(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_PARENT_CHECK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
