"""Whole matrices from parts: each on one rank, the work shared out, the parts back where they came from."""

import pytest
import torch
from tests.parallel.forked_ranks import on_ranks
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainwright.optim.muon import layout_of, map_full_tensors
from trainwright.optim.sharded import shard_like
from trainwright.parallel.mesh import local


def matrices(shape, count=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def square_rows(seen):
    """An act that needs the whole matrix, and notes how many it was given."""

    def act(whole):
        seen.append(len(whole))
        return [matrix * matrix.sum() for matrix in whole]

    return act


SHAPES = {
    "even": ((6, 4), 0),
    "uneven": ((7, 4), 0),
    "fewer_rows": ((2, 5), 0),
    "columns": ((4, 6), 1),
    "4d": ((5, 2, 3, 3), 0),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of three ranks: per shape, how many matrices each worked on, and the whole results."""

    def act(mesh):
        layout = mesh.along("shard")
        results = {}
        for name, (shape, dim) in SHAPES.items():
            parameters = [distribute_tensor(matrix, layout, [Shard(dim)]) for matrix in matrices(shape)]
            seen = []
            parts = map_full_tensors(square_rows(seen), [local(each) for each in parameters], parameters, turn=2)
            expected = [
                local(shard_like(matrix * matrix.sum(), parameter))
                for matrix, parameter in zip(matrices(shape), parameters, strict=True)
            ]
            same_shapes = all(part.shape == local(each).shape for part, each in zip(parts, parameters, strict=True))
            close = all(torch.allclose(part, right) for part, right in zip(parts, expected, strict=True))
            results[name] = seen, same_shapes, close
        copied = [distribute_tensor(matrix, layout, [Replicate()]) for matrix in matrices((3, 3))]
        seen = []
        map_full_tensors(square_rows(seen), [local(each) for each in copied], copied)
        return results, seen, layout_of(copied[0]) == layout_of(copied[1])

    return on_ranks(tmp_path_factory.mktemp("three"), {"fsdp": 3}, act)


@pytest.mark.parametrize("name", SHAPES)
def test_every_rank_gets_back_its_parts_of_what_became_of_the_whole(found, name):
    for results, _, _ in found:
        _, same_shapes, close = results[name]
        assert same_shapes
        assert close


def test_the_ranks_share_the_matrices_and_begin_where_the_turn_says(found):
    for name in SHAPES:
        assert [results[name][0] for results, _, _ in found] == [[1], [1], [2]]  # numbers 0 and 3 are rank 2's


def test_what_every_rank_has_whole_is_not_sent(found):
    for _, seen, alike in found:
        assert seen == [4]
        assert alike


def test_whole_tensors_are_acted_on_where_they_are():
    assert layout_of(torch.ones(2, 2)) is None
    assert map_full_tensors(square_rows([]), [torch.ones(2, 2)], [torch.ones(2, 2)])[0].tolist() == [[4.0, 4.0]] * 2
