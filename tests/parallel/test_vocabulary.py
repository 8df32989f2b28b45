"""Table and loss of a split vocabulary give what torch gives on the whole, on real ranks."""

import pytest
import torch
import torch.nn.functional as F
from tests.parallel.forked_ranks import on_ranks
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainwright.parallel.tensor import first_row, look_up, split_cross_entropy

SIZES = (6, 7, 2)
"""Divides over the three ranks, does not, and leaves one rank without any row."""


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def ids_below(size, count=12):
    return torch.randint(0, size, (2, count // 2), generator=torch.Generator().manual_seed(4))


def apart(first, second):
    return float((first - second).abs().max())


def table_apart(mesh, size, padding_idx):
    ids, weights = ids_below(size), random(2, 6, 5)
    whole = random(size, 5).requires_grad_()
    split = distribute_tensor(random(size, 5), mesh, [Shard(0)]).requires_grad_()
    expected = F.embedding(ids, whole, padding_idx=padding_idx)
    found = look_up(split, ids, padding_idx=padding_idx).redistribute(placements=[Replicate()]).to_local()
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    return max(apart(expected, found), apart(whole.grad, split.grad.full_tensor()))


def loss_apart(mesh, size, reduction, *, offset=0.0):
    targets = ids_below(size).flatten()
    targets[2] = targets[5] = -100
    whole = (random(12, size) * 3 + offset).requires_grad_()
    split = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction=reduction)
    found = split_cross_entropy(split, targets, ignore_index=-100, reduction=reduction)
    weights = random(*expected.shape)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    return max(apart(expected, found), apart(whole.grad, split.grad.full_tensor()))


def rejection(mesh, ids):
    split = distribute_tensor(random(7, 5), mesh, [Shard(0)])
    with pytest.raises(IndexError) as caught:
        look_up(split, torch.tensor([ids]))
    return str(caught.value)


def everything(mesh):
    ranks = mesh.along("tensor")
    logits = distribute_tensor(random(4, 6), ranks, [Shard(1)])
    ignored = split_cross_entropy(logits, torch.full((4,), -100), ignore_index=-100, reduction="mean")
    return {
        "first_rows": [first_row(size, ranks) for size in SIZES],
        "tables": [table_apart(ranks, size, padding_idx) for size in SIZES for padding_idx in (None, 1)],
        "losses": [loss_apart(ranks, size, how) for size in SIZES for how in ("mean", "sum", "none")],
        "large": loss_apart(ranks, 7, "mean", offset=1e4),
        "rejections": [rejection(ranks, [0, 7]), rejection(ranks, [-1, 3])],
        "all_ignored": float(ignored),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_ranks(tmp_path_factory.mktemp("ranks"), {"tensor": 3}, everything)


def test_ranks_begin_where_the_one_before_ends(found):
    assert [each["first_rows"] for each in found] == [[0, 0, 0], [2, 3, 1], [4, 6, 2]]


def test_rows_and_their_gradients_are_those_of_the_whole_table_and_padding_does_not_learn(found):
    assert all(max(each["tables"]) < 1e-12 for each in found), found


def test_losses_and_gradients_are_those_of_the_whole_logits(found):
    assert all(max(each["losses"]) < 1e-12 for each in found), found


def test_large_logits_do_not_overflow(found):
    assert all(each["large"] < 1e-9 for each in found), found


def test_ids_outside_of_the_table_are_rejected_on_every_rank(found):
    for each in found:
        assert each["rejections"] == ["ids from 0 to 7 in a table of 7 rows", "ids from -1 to 3 in a table of 7 rows"]


def test_where_all_targets_are_ignored_the_mean_is_nan_as_torch_has_it(found):
    assert all(each["all_ignored"] != each["all_ignored"] for each in found)
