"""Ranks of one run as forked children of the test, which cost tenths of a second: torch is imported already."""

import os
import pickle
import traceback

import torch
import torch.distributed as dist
from tests.faults.runs import fork

from trainwright.parallel.mesh import lay_out


def on_ranks(folder, axes, act):
    """Calls `act(mesh)` on as many ranks as the axes have; returns what it returned on each, in rank order."""
    size = 1
    for number in axes.values():
        size *= number

    def live(rank):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
        try:
            returned = act(lay_out(axes, device_type="cpu"))
            (folder / f"{rank}.returned").write_bytes(pickle.dumps(returned))
        except BaseException:
            (folder / f"{rank}.error").write_text(traceback.format_exc())
            raise
        dist.barrier()
        dist.destroy_process_group()

    children = [fork(lambda rank=rank: live(rank), folder / f"rank-{rank}") for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * size, [path.read_text()[-3000:] for path in folder.glob("*.error")]
    return [pickle.loads((folder / f"{rank}.returned").read_bytes()) for rank in range(size)]  # our own
