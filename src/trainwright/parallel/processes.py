"""Joins the processes of a run: reads torchrun's variables and opens the process group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import lay_out


def world_size() -> int:
    """Returns the number of processes that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Returns this process's number on its machine, 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """Returns the number of this run's processes on its machine, 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def join(axes: Mapping[str, int], *, collectives: str, device_type: str) -> Ranks:
    """Opens the process group where there are several processes, and returns this process's place in it."""
    if world_size() == 1:
        return Ranks()
    if not dist.is_initialized():
        store, rank, size = next(rendezvous("env://"))
        # A process may join several times, one run after the other; the addresses of the last time are still there.
        joined = store.add(f"trainwright/joins/{rank}", 1)
        dist.init_process_group(
            collectives,
            store=PrefixStore(f"trainwright/join-{joined}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=30),
        )
    # A group of its own for objects and flags on the CPU: it must never queue behind a device's collectives.
    control = dist.new_group(backend="gloo")
    mesh = lay_out(axes, device_type=device_type)
    return Ranks(dist.get_rank(), dist.get_world_size(), control=control, mesh=mesh)


def leave() -> None:
    """Closes the process group, where there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
