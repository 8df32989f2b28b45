"""Ranks in forked children, joined by gloo: torch is imported already, so that they start in tenths of a second."""

import gc
import os
import sys
import traceback

import torch
import torch.distributed as dist

from trainwright.parallel.mesh import lay_out


def on_ranks(folder, axes, act):
    """Calls `act(mesh)` on one process for each rank; returns what they returned: nests of tensors and numbers."""
    size = 1
    for number in axes.values():
        size *= number
    folder.mkdir(exist_ok=True)
    children = [_fork(folder, rank, size, axes, act) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    problems = "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))
    assert codes == [0] * size, problems
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(size)]


def _fork(folder, rank, size, axes, act):
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        gc.freeze()  # else the collector would touch, and so copy, all that the parent has
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        torch.save(act(lay_out(axes, device_type="cpu")), folder / f"rank-{rank}.pt")
        dist.barrier()
        code = 0
    except BaseException:
        (folder / f"rank-{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(code)
