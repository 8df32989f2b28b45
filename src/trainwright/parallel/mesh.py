"""Joins the processes of a run: reads torchrun's variables, opens the process group, lays out the axes.

Of the mesh's axes only `replicate` is built so far; the others are refused by name. What ranks say to
each other is in collectives.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trainwright.errors import ConfigError
from trainwright.parallel.collectives import Ranks

_BUILT_AXES = ("replicate",)


def world_size() -> int:
    """Returns the number of processes that torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Returns this process's number on its machine, 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """Returns the number of this run's processes on its machine, 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def join(axes: Mapping[str, int], *, collectives: str, where: object | None = None) -> Ranks:
    """Opens the process group where there are several processes, and returns this process's place in it."""
    for axis, size in axes.items():
        if size > 1 and axis not in _BUILT_AXES:
            raise ConfigError(
                f"runtime.mesh.{axis}: {size}, but only the replicate axis can be larger than 1 so far. "
                f"Use runtime.mesh={{replicate: {size}}}: every process then holds the whole model.",
                where=where,
            )
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
    return Ranks(dist.get_rank(), dist.get_world_size(), control=control)


def leave() -> None:
    """Closes the process group, where there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
