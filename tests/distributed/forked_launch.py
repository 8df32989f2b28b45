"""Ranks of a run as a launcher's workers, but as forked children of the test, which has torch imported.

A launch costs a second and not ten. What the launcher itself does is tests/launch's and tests/faults'.
"""

import gc
import os
import signal
import socket
import sys
import traceback

import torch
import torch._dynamo  # torch imports it with the first optimizer: here once, not in each child
import torch.distributed as dist

from trainwright import cli
from trainwright.parallel import context, fully_shard, pipeline, processes, tensor  # noqa: F401  # before the fork

PATIENCE_SECONDS = 240


def launch(folder, world, act):
    """Calls `act(folder)` on forked ranks; returns their exit codes, and what those that failed said."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    children = [_fork(folder, world, rank, port, act) for rank in range(world)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return codes, [path.read_text()[-3000:] for path in sorted(folder.glob("rank-*.error"))]


def launch_well(folder, world, act):
    """Calls `act(folder)` on forked ranks, none of which may fail."""
    codes, errors = launch(folder, world, act)
    assert codes == [0] * world, errors


def forget_groups():
    """Closes the groups of the runs before this one in the same ranks, but for that of all ranks.

    Each has threads that wake up a hundred times a second; after fifty runs they take as long as the runs.
    """
    if dist.is_initialized():
        dist.barrier()  # nobody is still in one of them
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        gc.collect()  # whoever still refers to one holds its threads


def command(*arguments):
    """What a launcher's worker does: the command line, in the folder."""

    def act(folder):
        os.chdir(folder)
        sys.argv = ["trainwright", *map(str, arguments)]
        try:
            cli.main()
        except SystemExit as left:
            if left.code:
                raise RuntimeError(f"the command ended with {left.code}") from None

    return act


def _fork(folder, world, rank, port, act):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        gc.freeze()  # else the collector would touch, and so copy, all that the parent has
        signal.alarm(PATIENCE_SECONDS)  # a rank that waits for ever is ended, and the test fails
        torch.set_num_threads(1)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        act(folder)
        processes.leave()
        code = 0
    except BaseException:
        (folder / f"rank-{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(code)
