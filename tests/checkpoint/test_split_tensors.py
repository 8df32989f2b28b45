"""Regions of tensors in pieces, for every rank of every layout, without starting them: on torch's fake group."""

import itertools

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.ranks import in_children
from tests.messages import raises
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.checkpoint.encoding import (
    SplitTensor,
    TensorLayout,
    as_split,
    fill,
    layout_of,
    map_tensors,
    shard_like,
    shard_location_of,
)
from trainwright.errors import CheckpointError
from trainwright.parallel.mesh import local


@pytest.fixture
def as_rank():
    def join(rank, size):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 9])
@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Replicate()), (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(1))],
    ids=str,
)
def test_the_shards_of_all_ranks_are_the_whole(placements, rows, as_rank):
    shape = (rows, 5)
    times = torch.zeros(shape)
    for rank in range(8):
        as_rank(rank, 8)
        layout = TensorLayout(init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "tensor")), placements)
        if layout.is_written_here(0):
            offsets, sizes = layout.region(shape)
            times[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] += 1
    assert torch.equal(times, torch.ones(shape))


def fsdp_over_tensor(rank, rows):
    """What a rank of 4 × 2 holds of a weight that both axes cut along dim 0, and where it says that it lies."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "tensor"))
    whole = torch.arange(float(rows * 3)).reshape(rows, 3)
    model = torch.nn.Linear(3, rows, bias=False)
    chunk = -(-rows // 2)
    mine = whole[chunk * (rank % 2) : chunk * (rank % 2 + 1)]  # what a scatter would bring
    weight = DTensor.from_local(mine, mesh["tensor"], [Shard(0)], run_check=False, shape=(rows, 3), stride=(3, 1))
    model.weight = torch.nn.Parameter(weight)
    fully_shard(model, mesh=mesh["shard"])
    return shard_location_of(model.weight.detach()).offsets, local(model.weight.detach()).tolist()


def test_fsdp_over_tensor_has_the_region_that_it_says():
    """FSDP cuts what `tensor` has left, also where neither divides."""
    sizes = (1, 2, 5, 8, 9)

    def act(rank):
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        return [fsdp_over_tensor(rank, rows) for rows in sizes]

    # A process for each rank: torch remembers meshes, and with them the rank that first asked.
    answers = in_children([lambda rank=rank: act(rank) for rank in range(8)])
    for number, rows in enumerate(sizes):
        whole, times = torch.arange(float(rows * 3)).reshape(rows, 3), torch.zeros(rows)
        for (start, _), found in (answer[number] for answer in answers):
            assert found == whole[start : start + len(found)].tolist()
            times[start : start + len(found)] += 1
        assert times.tolist() == [1.0] * rows


def pieces_of(whole, cuts):
    """Cuts a matrix into blocks at these rows and columns."""
    rows, columns = ([0, *cut, size] for cut, size in zip(cuts, whole.shape, strict=True))
    return [
        ((top, left), whole[top:bottom, left:right].clone())
        for (top, bottom), (left, right) in itertools.product(itertools.pairwise(rows), itertools.pairwise(columns))
    ]


@pytest.mark.parametrize("cuts", [((), ()), ((2, 3), ()), ((), (4,)), ((1, 6), (2, 3))])
def test_any_region_is_read_from_any_shards(cuts):
    whole = torch.arange(42.0).reshape(7, 6)
    split = SplitTensor(whole.shape, pieces_of(whole, cuts))
    assert torch.equal(split.whole(), whole)
    for top, left, height, width in itertools.product(range(6), range(5), (1, 2), (1, 2)):
        region = torch.empty(height, width)
        split.copy_into(region, (top, left))
        assert torch.equal(region, whole[top : top + height, left : left + width])


def test_what_no_shard_holds_is_an_error():
    whole = torch.arange(42.0).reshape(7, 6)
    split = SplitTensor(whole.shape, pieces_of(whole, ((3,), ()))[:1])
    split.copy_into(torch.empty(3, 6))
    with raises(CheckpointError, "42", "24"):
        split.whole()


def test_a_scalar_and_an_empty_tensor_are_whole():
    assert as_split(torch.tensor(3.0)).whole().item() == 3.0
    assert as_split(torch.empty(0, 4)).whole().shape == (0, 4)


def test_state_is_laid_out_as_its_parameter(as_rank):
    as_rank(1, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    like = DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0)], run_check=False)
    whole = torch.arange(24.0).reshape(6, 4)
    found = shard_like(like, whole)
    assert torch.equal(local(found), whole[3:])
    assert found.shape == (6, 4)
    # Adafactor's factors: of rows split as the rows are, of columns on every rank.
    assert torch.equal(local(shard_like(like, whole[:, :1])), whole[3:, :1])
    columns = shard_like(like, whole[:1])
    assert (columns.placements, local(columns).shape) == ((Replicate(),), (1, 4))
    # A count of steps is no part of anything.
    for other in (torch.tensor(3.0), torch.zeros(1), torch.zeros(1, 1), torch.zeros(6), 5, None):
        assert shard_like(like, other) is other
    bias = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], run_check=False)
    assert shard_like(bias, one := torch.zeros(1)) is one
    fill(like, whole)
    assert torch.equal(local(like), whole[3:])
    assert layout_of(like).region((6, 4)) == ((3, 0), (3, 4))


def test_a_dtensor_that_is_not_what_it_says_is_rejected(as_rank):
    as_rank(0, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    odd = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
    assert "whose shard is (3,) instead of (2,)" in shard_location_of(odd)
    assert isinstance(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]), DTensor)


def test_tied_tensors_stay_tied():
    one = torch.ones(2)
    found = map_tensors({"a": one, "b": [one, {"c": (one, 1)}]}, lambda tensor, key: tensor + 1)
    assert found["a"] is found["b"][0]
    assert found["a"] is found["b"][1]["c"][0]
    assert found["b"][1]["c"][1] == 1
