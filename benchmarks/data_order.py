"""What it costs to know a shuffled order: seconds to the first batch of indices, memory, and microseconds a batch.

Each trial is a process of its own, which prints what it measured: memory that was taken once does not come back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_rounds import Measured, median, table, take_turns

BATCH, NUM_BATCHES = 256, 2_000
OURS, PERMUTATION, SAMPLER = "Order", "torch.randperm", "BatchSampler(RandomSampler)"
FIRST, MEMORY, EACH = "seconds to the first batch", "megabytes", "microseconds a batch"


def of_order(size: int) -> Iterator[list[int]]:
    from trainwright.data.order import Order

    order = Order(size, seed=0)
    for start in range(0, size, BATCH):
        yield order.indices(start, start + BATCH).tolist()


def of_permutation(size: int) -> Iterator[list[int]]:
    import torch

    order = torch.randperm(size)
    for start in range(0, size, BATCH):
        yield order[start : start + BATCH].tolist()


def of_sampler(size: int) -> Iterator[list[int]]:
    """What a DataLoader with shuffle=True draws its batches from."""
    from torch.utils.data import BatchSampler, RandomSampler

    return iter(BatchSampler(RandomSampler(range(size)), BATCH, drop_last=False))


MAKERS: dict[str, Callable[[int], Iterator[list[int]]]] = {
    OURS: of_order,
    PERMUTATION: of_permutation,
    SAMPLER: of_sampler,
}


def read_memory(field: str) -> float:
    """Megabytes that this process has now (VmRSS) or had at most (VmHWM); Linux only.

    getrusage's ru_maxrss does not serve: it begins with what the process that started this one had.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def measure_here(name: str, size: int) -> Measured:
    """Measures one contender in this process, which must be fresh."""
    import torch

    import trainwright.data.order  # noqa: F401  # before the clock starts, like torch

    torch.set_num_threads(1)
    torch.randperm(BATCH)  # what torch sets up once
    before = read_memory("VmRSS")
    began = time.perf_counter()
    batches = MAKERS[name](size)
    next(batches)
    first = time.perf_counter() - began
    num_batches = min(NUM_BATCHES, size // BATCH - 1)
    start = time.perf_counter()
    for _ in range(num_batches):
        next(batches)
    each = (time.perf_counter() - start) / num_batches * 1e6
    return {FIRST: first, MEMORY: read_memory("VmHWM") - before, EACH: each}


def measure_apart(name: str, size: int) -> Measured:
    """Measures one contender in a process of its own."""
    done = subprocess.run([sys.executable, __file__, name, str(size)], capture_output=True, text=True, check=True)
    measured: Measured = json.loads(done.stdout)
    return measured


def measure(*, rounds: int, size: int, sizes_of_ours: list[int]) -> dict[str, Any]:
    """Returns the rounds of every contender at `size`, and of ours at further sizes."""
    trials = [(name, size) for name in MAKERS] + [(OURS, each) for each in sizes_of_ours]
    contenders = {
        f"{name}; {rows}": lambda name=name, rows=rows: measure_apart(name, rows)  # this trial's own
        for name, rows in trials
    }
    turns = take_turns(contenders, rounds, warmups=0)
    for name in turns:
        print(f"order: {name}: {', '.join(f'{median(turns, name, each):.3g} {each}' for each in turns[name])}")
    return turns


def report(turns: dict[str, Any]) -> str:
    """Returns one table."""
    rows = []
    for name in turns:
        contender, size = name.split("; ")
        first, memory, each = (median(turns, name, quantity) for quantity in (FIRST, MEMORY, EACH))
        rows.append(
            [contender, f"{float(size):.0e}".replace("e+0", "e"), f"{first:.4f}", f"{memory:,.1f}", f"{each:.1f}"]
        )
    return table(["order", "rows", "first batch, s", "extra memory at its peak, MB", "each further batch, µs"], rows)


if __name__ == "__main__":
    print(json.dumps(measure_here(sys.argv[1], int(sys.argv[2]))))
