"""The order of a mixture: exact shares per block, exact coverage per source, a pure function of the position."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.mix import BLOCK, ConcatenatedOrder, WeightedOrder, block_shares
from trainwright.data.order import Order
from trainwright.errors import ConfigError

seeds = st.integers(0, 2**63)
sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=4)
weights = st.lists(st.floats(0.01, 10), min_size=4, max_size=4)


def named(values):
    return dict(zip("abcd", values, strict=False))


def weighted(lengths, shares, **options):
    return WeightedOrder(named(lengths), block_shares(named(shares[: len(lengths)])), **options)


def sources(order_indices, lengths):
    return np.searchsorted(np.cumsum(lengths), order_indices, side="right")


@settings(max_examples=15)
@given(sizes, weights, seeds, st.integers(0, 50), st.booleans())
def test_each_block_holds_exactly_the_shares(lengths, shares, seed, block, shuffle):
    order = weighted(lengths, shares, seed=seed, shuffle=shuffle)
    found = sources(order.indices(block * BLOCK, (block + 1) * BLOCK), lengths)
    assert np.bincount(found, minlength=len(lengths)).tolist() == block_shares(named(shares[: len(lengths)])).tolist()


@given(weights)
def test_shares_are_the_weights_rounded_to_whole_places(shares):
    found = block_shares(named(shares))
    assert found.sum() == BLOCK
    assert np.abs(found - np.array(shares) / sum(shares) * BLOCK).max() < 1


def test_round_weights_have_round_shares():
    assert block_shares({"a": 0.7, "b": 0.2, "c": 0.1}).tolist() == [7000, 2000, 1000]
    assert block_shares({"a": 9999, "b": 1}).tolist() == [9999, 1]
    assert block_shares({"a": 1, "b": 1, "c": 1}).tolist() == [3334, 3333, 3333]


@settings(max_examples=15)
@given(sizes, weights, seeds, st.integers(1, 40))
def test_each_source_is_covered_exactly_in_epochs_of_its_own(lengths, shares, seed, unit):
    order = weighted(lengths, shares, seed=seed, unit=unit)
    indices = order.indices(0, 2 * BLOCK)
    starts = np.cumsum([0, *lengths])
    for start, stop in pairwise(starts):
        own = indices[(indices >= start) & (indices < stop)]
        size = stop - start
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(start, stop))
        rest = own[len(own) // size * size :]
        assert len(set(rest.tolist())) == len(rest)


@settings(max_examples=15)
@given(sizes, weights, seeds, st.integers(0, 3 * BLOCK), st.integers(1, 40), st.booleans())
def test_counts_are_the_real_counts(lengths, shares, seed, position, unit, shuffle):
    for order in (
        weighted(lengths, shares, seed=seed, shuffle=shuffle, unit=unit),
        ConcatenatedOrder(named(lengths), seed=seed, shuffle=shuffle),
    ):
        for asked in (position, position // 2, position + 7):  # forwards and, as after a rollback, backwards
            real = np.bincount(sources(order.indices(0, asked), lengths), minlength=len(lengths))
            assert list(order.counts(asked).values()) == real.tolist()


@settings(max_examples=15)
@given(sizes, weights, seeds, st.integers(0, 10**7), st.lists(st.integers(1, 3000), max_size=4), st.integers(1, 40))
def test_any_slicing_gives_the_same_order(lengths, shares, seed, start, cuts, unit):
    whole = weighted(lengths, shares, seed=seed, unit=unit).indices(start, start + sum(cuts) + 5).tolist()
    order, pieces = weighted(lengths, shares, seed=seed, unit=unit), []
    for cut in [*cuts, 5]:
        pieces += order.indices(start + len(pieces), start + len(pieces) + cut).tolist()
    assert pieces == whole
    assert order.indices(start, start + 5).tolist() == whole[:5]


@settings(max_examples=15)
@given(sizes, weights, seeds, st.integers(1, 64), st.integers(0, 10**6))
def test_a_unit_comes_from_one_source(lengths, shares, seed, unit, first):
    order = weighted(lengths, shares, seed=seed, unit=unit)
    found = sources(order.indices(first * unit, (first + 50) * unit), lengths).reshape(50, unit)
    assert (found == found[:, :1]).all()


@given(sizes, seeds, st.integers(0, 10**6), st.booleans())
def test_without_weights_the_order_is_that_of_the_concatenation(lengths, seed, start, shuffle):
    order = ConcatenatedOrder(named(lengths), seed=seed, shuffle=shuffle)
    expected = Order(sum(lengths), seed=seed, shuffle=shuffle)
    assert order.indices(start, start + 100).tolist() == expected.indices(start, start + 100).tolist()


def test_without_shuffling_sources_take_even_turns_in_their_own_order():
    order = weighted([10, 10, 10], [2, 1, 1, 1], seed=1, shuffle=False)
    assert order.indices(0, 12).tolist() == [0, 10, 20, 1, 2, 11, 21, 3, 4, 12, 22, 5]
    assert order.indices(BLOCK, BLOCK + 4).tolist() == [0, 10, 20, 1]  # 5000 and 2500 uses are whole epochs


def test_seeds_choose_differently():
    orders = [weighted([5000, 5000], [1, 1, 1, 1], seed=seed).indices(0, 200).tolist() for seed in (1, 2)]
    assert orders[0] != orders[1]


def test_the_order_of_a_seed_never_changes_between_versions():
    # A run that goes on after an upgrade must see the same data.
    order = weighted([100, 50], [3, 1, 1, 1], seed=42)
    assert order.indices(0, 12).tolist() == [69, 63, 37, 36, 116, 6, 46, 124, 0, 71, 82, 11]
    assert order.counts(12) == {"a": 10, "b": 2}


def test_a_billion_samples_need_no_list_of_them():
    order = weighted([10**12, 10**9], [1, 1, 1, 1], seed=1)
    assert order.size == 10**12 + 10**9
    assert sum(order.counts(10**12 + 7).values()) == 10**12 + 7
    assert (order.indices(10**12, 10**12 + 100) < order.size).all()


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "much", True])
def test_a_weight_that_is_no_share_is_rejected_by_name(weight):
    with raises(ConfigError):
        block_shares({"big": 1.0, "small": weight})


def test_a_share_too_small_for_a_block_is_rejected():
    with raises(ConfigError, "05", "10000"):
        block_shares({"big": 99999, "small": 1})
