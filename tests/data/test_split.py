"""Cutting one dataset into parts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises
from torch.utils.data import Dataset, TensorDataset

from trainwright.data.collators import Stack
from trainwright.data.fetch import SampleFetcher, Span
from trainwright.data.order import Order
from trainwright.data.split import sizes_by_ratio, split
from trainwright.errors import DataError

ratios = st.lists(st.floats(0.05, 100), min_size=2, max_size=4)


class Words(Dataset):
    """Has more to offer than samples."""

    tokens_per_sample = 7

    @property
    def lengths(self):
        return np.array([len(self[index]) for index in range(40)])

    def make_order(self):
        """Says in which order all words are read."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return f"word {index}"


def whole(part):
    return part.__getitems__(range(len(part)))


def by_ratio(dataset, ratios, seed):
    return split(dataset, sizes_by_ratio(len(dataset), ratios), seed=seed)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2000), ratios, st.integers(0, 2**40))
def test_parts_are_disjoint_and_cover_the_whole(size, ratios, seed):
    parts = by_ratio(range(size), ratios, seed)
    samples = [sample for part in parts for sample in whole(part)]
    assert sorted(samples) == list(range(size))
    assert len(parts[0]) >= 1  # what is trained on is never empty, even of one sample
    for part, ratio in zip(parts, ratios, strict=True):
        assert abs(len(part) - size * ratio / sum(ratios)) < 2  # rounded, and the first may have one too many


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**40))
def test_a_split_is_a_function_of_seed_and_ratios_alone(seed):
    first, again = (by_ratio(range(100), [90, 10], seed) for _ in range(2))
    assert whole(first[1]) == whole(again[1])
    assert whole(first[1]) != whole(by_ratio(range(100), [90, 10], seed + 1)[1])
    assert whole(first[1]) == whole(by_ratio(range(100), [0.9, 0.1], seed)[1])


def test_a_billion_samples_are_split_without_a_list():
    train, valid = split(range(10**9), [10**9 - 1000, 1000], seed=1)
    assert len(set(whole(valid))) == 1000
    assert train[0] not in whole(valid)


def test_parts_are_drawn_from_everywhere():
    valid = whole(by_ratio(range(1000), [80, 20], 1)[1])
    assert min(valid) < 100
    assert max(valid) > 900


def test_a_part_reads_like_a_sequence_and_never_reaches_into_another():
    train, valid = split(range(50), [40, 10], seed=3)
    assert list(train) == whole(train)
    assert valid[-1] == valid[9] == whole(valid)[9]
    assert valid.__getitems__([0, -1, 3]) == [valid[0], valid[9], valid[3]]
    for index in (10, -11):
        with pytest.raises(IndexError, match="out of range for the 10 samples of a split"):
            valid[index]


def test_a_part_offers_what_its_dataset_offers():
    part = split(Words(), [30, 10], seed=0)[0]
    assert part.tokens_per_sample == 7
    assert not part.draws_nothing
    assert part.lengths.tolist() == [len(word) for word in whole(part)]
    for name in ("missing", "make_order"):
        assert not hasattr(part, name)
    assert not hasattr(split(range(9), [6, 3], seed=0)[0], "lengths")
    assert split(TensorDataset(torch.arange(9)), [6, 3], seed=0)[0].draws_nothing


def test_a_part_of_a_dataset_that_draws_is_located_once_a_batch_and_gives_the_same():
    class Jitter(Words):
        def __getitem__(self, index):
            return torch.tensor([index, torch.rand(())])

    part = split(Jitter(), [30, 10], seed=0)[0]
    calls = []

    class Watched(type(part)):
        def indices_in_whole(self, indices):
            calls.append(len(indices))
            return super().indices_in_whole(indices)

    part.__class__ = Watched
    batch = SampleFetcher(part, Order(30, seed=1, shuffle=False), Stack(), 1).fetch(Span(0, 8)).batch
    assert set(calls) == {8}  # all samples at once, never one by one
    assert batch[:, 0].tolist() == part.indices_in_whole(range(8))


def test_sizes_that_do_not_make_the_whole_are_rejected_with_the_arithmetic():
    with raises(DataError, "data.split", "8", "1", "10"):
        split(range(10), [8, 1], seed=0)
