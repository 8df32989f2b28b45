"""Starts several processes on this machine through torchrun, in place of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def relaunch(num_processes: int, arguments: Sequence[str]) -> None:
    """Replaces this process by torchrun, which runs `python -m trainwright ARGUMENTS` on every rank.

    Replaced, not started beside: a kill then reaches torchrun itself and leaves no orphans.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    # After `--` torchrun takes none of our options for its own.
    command += ["-m", "--", "trainwright", *arguments]
    # Without this torchrun sets it too, but with a warning; on a CPU more threads than cores are slower than one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)
