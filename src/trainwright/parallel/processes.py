"""Joins the processes of a run: reads the launcher's variables, meets the others, and opens the process group.

    place()  →  the store at MASTER_ADDR:MASTER_PORT  →  all are here (meeting.py)  →  all run the same (same_run.py)

Whatever is wrong before the group is open is an error in words, on every rank that is still there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented there
from torch.distributed.distributed_c10d import PrefixStore

from trainwright.errors import ConfigError, TrainwrightError
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.meeting import ARRIVE_SECONDS, meet
from trainwright.parallel.mesh import lay_out
from trainwright.parallel.same_run import RunFacts, refuse_other_runs

COLLECTIVE_SECONDS = 30 * 60
"""How long a collective may take before torch gives up. Who is stuck is found sooner, by hooks/watch_for_hangs.py."""

_WHO_SETS_THEM = (
    "`trainwright train --nproc N` and torchrun set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
)


class Place(NamedTuple):
    """This process's number among the processes of the run, and how many there are."""

    rank: int
    size: int


def place() -> Place:
    """Returns what the launcher's variables say, (0, 1) without any; what contradicts itself is refused."""
    size = _number("WORLD_SIZE", at_least=1)
    rank = _number("RANK", at_least=0)
    tasks = _number("SLURM_STEP_NUM_TASKS", at_least=1)
    if size is None and tasks is not None and tasks > 1:
        raise ConfigError(
            f"SLURM has started {tasks} tasks of this command, and none knows of the others: WORLD_SIZE is not set. "
            "`trainwright launch run.yaml --slurm nodes=N gpus=N` writes a job that starts them together."
        )
    if size is None and rank:
        raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is not set. {_WHO_SETS_THEM} For one process unset RANK.")
    if size is None or (size == 1 and rank is None):
        return Place(0, 1)
    if rank is None:
        raise ConfigError(
            f"WORLD_SIZE is {size}, but RANK is not set. {_WHO_SETS_THEM} For one process unset WORLD_SIZE."
        )
    if rank >= size:
        raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are numbered from 0 to {size - 1}.")
    return Place(rank, size)


def world_size() -> int:
    """Returns the number of processes that the launcher started, 1 without one."""
    return place().size


def local_rank() -> int:
    """Returns this process's number on its machine, 0 without a launcher."""
    number = _number("LOCAL_RANK", at_least=0)
    if number is None and world_size() > 1:
        raise ConfigError(f"WORLD_SIZE is {world_size()}, but LOCAL_RANK is not set. {_WHO_SETS_THEM}")
    return number or 0


def local_size() -> int:
    """Returns the number of this run's processes on its machine, 1 without a launcher."""
    return _number("LOCAL_WORLD_SIZE", at_least=1) or 1


def join(axes: Mapping[str, int], *, collectives: str, device_type: str, facts: RunFacts | None = None) -> Ranks:
    """Opens the process group where there are several processes, and returns this process's place in it.

    `facts` (same_run.facts_of) must be equal on all ranks, or every rank raises the same error; None: nothing is
    compared.
    """
    rank, size = place()
    if size == 1:
        return Ranks()
    if not dist.is_initialized():
        store = _find_store(rank)
        # A name that no other join has had: the launcher's store outlives the ranks, and holds what earlier ones left.
        own_store = PrefixStore(f"trainwright/join-{meet(store, rank, size)}", store)
        if facts is not None:
            refuse_other_runs(own_store, rank, size, facts)
        timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        own_store.set_timeout(timeout)
        dist.init_process_group(collectives, store=own_store, rank=rank, world_size=size, timeout=timeout)
    # A group of its own for objects and flags on the CPU: it must never queue behind a device's collectives.
    control = dist.new_group(backend="gloo")
    mesh = lay_out(axes, device_type=device_type)
    return Ranks(dist.get_rank(), dist.get_world_size(), control=control, mesh=mesh)


def leave() -> None:
    """Closes the process group, where there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _find_store(rank: int) -> TCPStore:
    """Connects to the store of the run; without a launcher that keeps it, the first rank does."""
    host, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT", at_least=1)
    if not host or port is None:
        missing = "MASTER_ADDR" if not host else "MASTER_PORT"
        raise ConfigError(f"RANK and WORLD_SIZE are set, but {missing} is not. {_WHO_SETS_THEM}")
    keeps_it = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(
            host,
            port,
            is_master=keeps_it,
            timeout=timedelta(seconds=ARRIVE_SECONDS),
            wait_for_workers=False,  # meeting.py waits, and hears of ranks that fail meanwhile
            multi_tenant=True,  # a process that joins again finds its own
        )
    except RuntimeError as error:  # what torch raises for the network
        if keeps_it and ("EADDRINUSE" in str(error) or "in use" in str(error)):
            raise ConfigError(
                f"MASTER_PORT: port {port} of this machine is taken, probably by another run. Give this one another "
                "(torchrun: --master-port); `trainwright train --nproc N` finds a free one by itself."
            ) from error
        raise TrainwrightError(
            f"Rank {rank} could not reach rank 0 at MASTER_ADDR {host}, MASTER_PORT {port}: {_first_line(error)} "
            "Is rank 0 started, and can this machine reach that one?"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _number(name: str, *, at_least: int) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < at_least:
        raise ConfigError(f"{name}: {text!r} is not a whole number from {at_least} on. {_WHO_SETS_THEM}")
    return int(text)
