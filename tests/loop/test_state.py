"""Micro-batches of a rank's batch, and the number of samples of a batch that a trainer returns."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises

from trainwright.data.collators import Stack
from trainwright.errors import DataError
from trainwright.loop.state import Batch, count_samples, split_batch


def micro_batches_of(batch, num_samples, num_micro_batches, collator=None):
    micro_batches = split_batch(Batch(batch, num_samples), num_micro_batches, collator or Stack())
    return [(each.value, each.num_samples) for each in micro_batches]


@pytest.mark.parametrize(("num_samples", "num_micro_batches"), [(8, 2), (7, 3), (5, 5), (4, 1)])
def test_micro_batches_in_order_are_the_batch_again(num_samples, num_micro_batches):
    x = torch.arange(num_samples * 2).reshape(num_samples, 2)
    micro_batches = micro_batches_of({"x": x}, num_samples, num_micro_batches)
    assert len(micro_batches) == num_micro_batches
    assert torch.equal(torch.cat([micro_batch["x"] for micro_batch, _ in micro_batches]), x)
    assert [count for _, count in micro_batches] == [len(micro_batch["x"]) for micro_batch, _ in micro_batches]


def test_nests_are_kept_and_what_has_no_rows_is_passed_whole():
    batch = {"pair": (torch.arange(4), [torch.arange(8).reshape(4, 2)]), "scale": torch.tensor(3.0), "name": "a"}
    batch["table"] = torch.zeros(3, 4)
    (first, _), (second, _) = micro_batches_of(batch, 4, 2)
    assert first["pair"][0].tolist() == [0, 1]
    assert second["pair"][1][0].tolist() == [[4, 5], [6, 7]]
    for micro_batch in (first, second):
        assert isinstance(micro_batch["pair"], tuple)
        assert micro_batch["scale"] is batch["scale"]
        assert micro_batch["table"] is batch["table"]
        assert micro_batch["name"] == "a"


def test_more_micro_batches_than_samples_repeat_a_sample_that_weighs_nothing():
    micro_batches = micro_batches_of({"x": torch.tensor([[1.0], [2.0]])}, 2, 4)
    assert [count for _, count in micro_batches] == [0, 1, 0, 1]
    assert [micro_batch["x"].tolist() for micro_batch, _ in micro_batches] == [[[1.0]], [[1.0]], [[1.0]], [[2.0]]]


def test_a_batch_that_stands_in_gives_micro_batches_without_weight():
    micro_batches = micro_batches_of({"x": torch.ones(1, 3)}, 0, 2)
    assert [(tuple(micro_batch["x"].shape), count) for micro_batch, count in micro_batches] == [
        ((1, 3), 0),
        ((1, 3), 0),
    ]


def test_lists_with_an_entry_a_sample_are_cut_like_rows():
    ragged = [torch.ones(length) for length in (1, 2, 3, 5)]
    boxes = [{"box": torch.ones(each)} for each in (2, 3, 1, 6)]
    batch = {"x": torch.arange(4), "ragged": ragged, "boxes": boxes, "shared": [torch.ones(7), torch.ones(2)]}
    (first, _), (second, _) = micro_batches_of(batch, 4, 2)
    assert [len(each) for each in first["ragged"]] == [1, 2]
    assert [len(each) for each in second["ragged"]] == [3, 5]
    assert [len(each["box"]) for each in second["boxes"]] == [1, 6]
    assert len(first["shared"]) == len(second["shared"]) == 2


def test_a_batch_that_is_a_list_of_as_many_tensors_as_samples_is_no_column():
    x, weights = torch.arange(4).reshape(2, 2), torch.ones(5)
    for batch in ([x, weights], [weights, x]):
        (first, _), (second, _) = micro_batches_of(batch, 2, 2)
        assert len(first) == len(second) == 2
    assert first[1].tolist() == [[0, 1]]


def test_a_collator_may_split_by_itself():
    class Packed:
        def split(self, batch, n):
            return [{"row": number, "of": n} for number in range(n)]

    assert micro_batches_of({"x": torch.zeros(1)}, 5, 2, Packed()) == [
        ({"row": 0, "of": 2}, 2),
        ({"row": 1, "of": 2}, 3),
    ]


def test_a_batch_without_rows_is_rejected_with_its_shapes():
    with raises(DataError, "8", "2", "3"):
        micro_batches_of({"x": torch.zeros(3, 2)}, 8, 2)
    with raises(DataError):
        micro_batches_of({"text": ["a", "b"]}, 2, 2)


def test_texts_and_numbers_of_samples_go_with_their_rows():
    batch = {
        "x": torch.arange(4),
        "ids": ["a", "b", "c", "d"],
        "pair": (torch.arange(4), torch.arange(4)),
        "names": ["x"],
    }
    micro_batches = [micro_batch for micro_batch, _ in micro_batches_of(batch, 4, 2)]
    assert [micro_batch["ids"] for micro_batch in micro_batches] == [["a", "b"], ["c", "d"]]
    assert [micro_batch["pair"][1].tolist() for micro_batch in micro_batches] == [[0, 1], [2, 3]]
    assert [micro_batch["names"] for micro_batch in micro_batches] == [["x"], ["x"]]


def test_a_pair_of_tensors_is_no_column_in_a_batch_of_two():
    [(first, _), (second, _)] = micro_batches_of((torch.arange(2), torch.arange(2)), 2, 2)
    assert [each.tolist() for each in (*first, *second)] == [[0], [0], [1], [1]]


def test_the_loaders_own_batch_has_the_loaders_count():
    value = {"x": torch.zeros(1, 3)}
    assert count_samples(value, Batch(value, 0)) == 0


def test_a_changed_batch_with_as_many_rows_keeps_the_loaders_count():
    fetched = Batch({"x": torch.zeros(1, 3)}, 0)
    assert count_samples({**fetched.value, "noise": torch.zeros(1, 2)}, fetched) == 0


def test_a_batch_of_other_rows_has_as_many_samples_as_rows():
    fetched = Batch({"x": torch.zeros(4, 3)}, 4)
    assert count_samples({"x": torch.zeros(12, 3)}, fetched) == 12
    assert count_samples([torch.zeros(2, 3)], fetched) == 2


def test_a_batch_without_tensors_has_the_loaders_count():
    assert count_samples({"text": ["a"]}, Batch({"text": ["b"]}, 5)) == 5
