"""Ranks of one run as forked children of the test, which cost tenths of a second: torch is imported already."""

import gc
import math
import os
import pickle
import traceback

import torch
import torch.distributed as dist

from trainwright.parallel.mesh import lay_out


def on_ranks(folder, axes, act):
    """Calls `act(mesh)` on as many ranks as the axes have; returns what it returned on each, in rank order."""
    size = math.prod(axes.values())
    children = [_fork(lambda rank=rank: _live(folder, axes, act, rank, size), folder, rank) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * size, [path.read_text()[-3000:] for path in folder.glob("*.error")]
    return [pickle.loads((folder / f"{rank}.returned").read_bytes()) for rank in range(size)]


def _live(folder, axes, act, rank, size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    returned = act(lay_out(axes, device_type="cpu"))
    (folder / f"{rank}.returned").write_bytes(pickle.dumps(returned))
    dist.barrier()
    dist.destroy_process_group()


def _fork(live, folder, rank):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        gc.freeze()  # else the collector would touch, and so copy, all that the parent has
        live()
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(code)
