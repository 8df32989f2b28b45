"""Samples of equal shape, stacked."""

from collections import namedtuple

import numpy as np
import torch
from tests.messages import raises

from trainwright.data.collators import Stack
from trainwright.errors import DataError

Point = namedtuple("Point", "x y")


def test_mappings_are_stacked_by_field():
    batch = Stack()([{"x": torch.full((2,), float(n)), "labels": n, "text": f"t{n}"} for n in range(3)])
    assert torch.equal(batch["x"], torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))
    assert torch.equal(batch["labels"], torch.tensor([0, 1, 2]))
    assert batch["text"] == ["t0", "t1", "t2"]


def test_tuples_lists_named_tuples_and_bare_samples_keep_their_form():
    pair = Stack()([(torch.zeros(2), 1), (torch.ones(2), 2)])
    assert isinstance(pair, tuple)
    assert torch.equal(pair[1], torch.tensor([1, 2]))
    assert isinstance(Stack()([[1, 2], [3, 4]]), list)
    assert torch.equal(Stack()([Point(1, 2), Point(3, 4)]).y, torch.tensor([2, 4]))
    assert torch.equal(Stack()([np.float32(1), np.float32(2)]), torch.tensor([1.0, 2.0]))


def test_nests_are_stacked_within():
    batch = Stack()([{"image": {"pixels": torch.ones(2) * n}} for n in range(2)])
    assert torch.equal(batch["image"]["pixels"], torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def test_unequal_samples_are_rejected_by_field_and_shape():
    with raises(DataError, "ids", "3", "5", "data.collator"):
        Stack()([{"ids": torch.zeros(3)}, {"ids": torch.zeros(5)}])
    with raises(DataError, "1", "NoneType"):
        Stack()([(1, None), (2, None)])


def test_samples_with_different_fields_are_rejected():
    with raises(DataError):
        Stack()([{"x": 1, "y": 2}, {"x": 1}])
    with raises(DataError):
        Stack()([{"x": 1}, {"x": 1, "y": 2}])
