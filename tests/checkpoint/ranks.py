"""Ranks in forked children, for what several of them do together; torch is not imported again.

What a rank's function returns comes back pickled, in the order of the ranks.
"""

import os
import pickle
import signal
import socket
import time
import traceback
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.tensor  # takes long: here once, not in each child
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh

from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import ALONE, Mesh

PATIENCE_SECONDS = 60


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def on_ranks(size, act, **axes):
    """Calls `act(ranks)` on ranks that are laid out along `axes`, and returns what each returned."""
    port = free_port()

    def join(rank):
        torch.set_num_threads(1)
        store = TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=40))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=40))
        ranks = along(Ranks(rank, size, control=dist.new_group(backend="gloo")), axes)
        answer = act(ranks)
        ranks.part()
        dist.destroy_process_group()
        return answer

    return in_children([lambda rank=rank: join(rank) for rank in range(size)])


def along(ranks, axes):
    """The same ranks in a layout of their own; the groups that training needs besides are left out."""
    sizes = {**ALONE, **axes}
    shape = (sizes["pipeline"], sizes["replicate"], sizes["fsdp"] * sizes["context"], sizes["tensor"])
    layers = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))
    return Ranks(ranks.rank, ranks.size, control=ranks._control, mesh=Mesh(sizes, ranks.rank, layers))


def in_children(acts):
    """Calls each in a child of its own, at the same time; returns their answers, and fails with what one raised."""
    with TemporaryDirectory() as folder:
        children = [_fork(act, Path(folder) / str(number)) for number, act in enumerate(acts)]
        until = time.monotonic() + PATIENCE_SECONDS
        codes = [_wait(child, until) for child in children]
        said = [_read(Path(folder) / str(number)) for number in range(len(acts))]
    problems = [
        f"rank {number} ended with {code}: {text}"
        for number, (code, text) in enumerate(zip(codes, said, strict=True))
        if code
    ]
    assert not problems, "\n".join(problems)
    return said


def _fork(act, path):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        path.write_bytes(pickle.dumps(act()))
        code = 0
    except BaseException:
        path.write_bytes(pickle.dumps(traceback.format_exc()))
    finally:
        os._exit(code)


def _wait(child, until):
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def _read(path):
    return pickle.loads(path.read_bytes()) if path.exists() else None
