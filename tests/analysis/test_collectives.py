"""Recorded collectives on fake ranks, and the same on real ones."""

import pytest
import torch
import torch.distributed as dist
from tests.parallel.forked_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainwright.analysis.fake_ranks import imaginary_ranks
from trainwright.analysis.shard import (
    Collective,
    CollectiveRecorder,
    axes_by_ranks,
    extrapolate,
    share_sent,
)
from trainwright.parallel.mesh import Mesh

WIDTH, BLOCKS = 16, 3
BLOCK_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


def fsdp_step(mesh):
    """One forward and backward of three equal blocks, split over the ranks; returns what was recorded."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])
    for block in model:
        fully_shard(block, mesh=mesh.along("shard"))
    fully_shard(model, mesh=mesh.along("shard"))
    with CollectiveRecorder(mesh) as recorder:
        model(torch.zeros(2, WIDTH)).sum().backward()
    return recorder.found


def test_a_step_of_fsdp_gathers_every_block_twice_and_reduces_it_once():
    with imaginary_ranks({"fsdp": 8}, world_size=8) as ranks:
        found = {each.kind: each for each in fsdp_step(ranks.mesh)}
    gathered, reduced = found.pop("all-gather"), found.pop("reduce-scatter")
    assert found == {}
    # The last block is still there when the backward begins, and each is gathered for both, or kept.
    assert gathered.count in (2 * BLOCKS - 1, 2 * BLOCKS)
    assert gathered.num_bytes == gathered.count * BLOCK_BYTES
    assert (reduced.count, reduced.num_bytes) == (BLOCKS, BLOCKS * BLOCK_BYTES)
    assert gathered.axis == reduced.axis == "fsdp"
    assert gathered.sent_bytes == pytest.approx(gathered.num_bytes * 7 / 8)


def test_fake_ranks_run_the_collectives_of_real_ones(tmp_path):
    real = on_ranks(tmp_path, {"fsdp": 2}, fsdp_step)
    with imaginary_ranks({"fsdp": 2}, world_size=2) as ranks:
        imagined = fsdp_step(ranks.mesh)
    assert real[0] == real[1] == imagined
    assert imagined


def test_collectives_of_distributed_tensors_are_recorded_along_their_axis():
    with imaginary_ranks({"fsdp": 2, "tensor": 4}, world_size=8, rank=5) as ranks:
        mesh = ranks.mesh.along("tensor")
        split = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)])
        with CollectiveRecorder(ranks.mesh) as recorder:
            split.redistribute(placements=[Replicate()]).to_local().sum()
    assert recorder.found == [Collective("all-gather", "tensor", 4, 1, 4 * 3 * 2 * 4)]


def test_the_loop_s_own_collectives_are_recorded():
    with imaginary_ranks({"replicate": 4}, world_size=4) as ranks, CollectiveRecorder(ranks.mesh) as recorder:
        dist.all_reduce(torch.zeros(10), group=ranks.mesh.group("replicate"))
        dist.all_reduce(torch.zeros(10))
        dist.barrier()
    assert recorder.found == [Collective("all-reduce", "replicate", 4, 2, 80)]


def test_each_rank_s_groups_have_the_names_of_their_axes():
    mesh = Mesh({"pipeline": 1, "replicate": 2, "fsdp": 3, "context": 1, "tensor": 2}, 5)
    named = axes_by_ranks(mesh)
    assert named[frozenset({4, 5})] == "tensor"
    assert named[frozenset({1, 3, 5})] == "fsdp"
    assert named[frozenset({5, 11})] == "replicate"
    assert named[frozenset(range(6))] == "fsdp × tensor"
    assert named[frozenset(range(12))] == "replicate × fsdp × tensor"
    assert len(named) == 7


def test_what_a_rank_sends_follows_from_the_kind():
    assert share_sent("all-reduce", 4) == pytest.approx(1.5)
    assert share_sent("all-gather", 4) == share_sent("reduce-scatter", 4) == pytest.approx(0.75)
    assert (share_sent("send", 4), share_sent("receive", 4)) == (1.0, 0.0)


def test_further_micro_batches_add_what_the_second_added():
    once = [Collective("all-gather", "fsdp", 8, 5, 500), Collective("all-reduce", "fsdp", 8, 1, 10)]
    twice = [Collective("all-gather", "fsdp", 8, 9, 900), Collective("all-reduce", "fsdp", 8, 1, 10)]
    assert extrapolate(once, twice, num_more=2, num_micro_batches=4) == [
        Collective("all-gather", "fsdp", 8, 17, 1700),
        Collective("all-reduce", "fsdp", 8, 1, 10),
    ]
