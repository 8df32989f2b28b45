"""Batches of about equal lengths, each epoch complete."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.loader import LengthOrder, TrainData, lengths_of
from trainwright.errors import DataError


def order(lengths, *, batch_size=4, seed=1, shuffle=True):
    return LengthOrder(lengths, seed=seed, shuffle=shuffle, global_batch_size=batch_size)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=600), st.integers(1, 9), st.integers(0, 2**40))
def test_every_epoch_holds_each_sample_once(lengths, batch_size, seed):
    size = len(lengths)
    indices = order(lengths, batch_size=batch_size, seed=seed).indices(0, 3 * size).tolist()
    for epoch in range(3):
        assert sorted(indices[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 700), st.integers(1, 9), st.integers(0, 2000), st.lists(st.integers(1, 40), max_size=6))
def test_any_slicing_gives_the_same_order(size, batch_size, start, pieces):
    lengths = np.random.default_rng(size).integers(1, 100, size)
    whole = order(lengths, batch_size=batch_size).indices(start, start + sum(pieces)).tolist()
    cut, place = [], start
    sliced = order(lengths, batch_size=batch_size)
    for piece in pieces:
        cut += sliced.indices(place, place + piece).tolist()
        place += piece
    assert cut == whole


def test_batches_are_more_equal_than_chance_and_in_no_order_of_length():
    lengths = np.random.default_rng(0).integers(1, 1000, 6400)
    batches = lengths[order(lengths, batch_size=32).indices(0, 6400)].reshape(-1, 32)
    widths = batches.max(axis=1)
    assert batches.sum() / (widths * 32).sum() > 0.95  # 0.52 where batches are drawn by chance
    assert abs(np.corrcoef(np.arange(len(widths)), widths)[0, 1]) < 0.2


def test_later_epochs_are_as_equal_though_they_begin_within_a_batch():
    lengths = np.random.default_rng(0).integers(1, 1000, 6403)
    batches = lengths[order(lengths, batch_size=32).indices(0, 3 * 6400)].reshape(3, -1, 32)
    for epoch in batches:
        assert epoch.sum() / (epoch.max(axis=1) * 32).sum() > 0.93


def test_seeds_and_epochs_differ_and_without_shuffling_samples_of_a_window_are_the_dataset_s_own():
    lengths = np.random.default_rng(0).integers(1, 9, 300)
    first, second = order(lengths).indices(0, 600).reshape(2, 300).tolist()
    assert first != second
    assert first != order(lengths, seed=2).indices(0, 300).tolist()
    assert sorted(order(lengths, shuffle=False).indices(0, 256).tolist()) == list(range(256))


class Known(list):
    lengths = np.array([3, 1, 2, 1])


def test_the_loader_uses_the_lengths_that_a_dataset_knows():
    data = TrainData(
        Known([3, 1, 2, 1]), collator=sorted, global_batch_size=2, seed=1, group_by_length=True, num_samples=4
    )
    assert list(data.batches(iter)) == [[1, 1], [2, 3]]
    with raises(DataError, "data.train", "data.process"):
        lengths_of([1, 2], "data.train")
