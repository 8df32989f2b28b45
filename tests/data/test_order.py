"""The order of samples: a pure function of seed and position."""

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.data.order import Order, mix_seed, permute

sizes = st.integers(1, 300)
seeds = st.integers(0, 2**63)


def epoch_of(size, seed, epoch):
    return Order(size, seed=seed).indices(epoch * size, (epoch + 1) * size).tolist()


@settings(deadline=None)
@given(sizes, seeds, st.integers(0, 10**6))
def test_every_epoch_visits_every_sample_exactly_once(size, seed, epoch):
    assert sorted(epoch_of(size, seed, epoch)) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(st.integers(30, 300), seeds, st.integers(0, 1000))
def test_epochs_and_seeds_have_orders_of_their_own(size, seed, epoch):
    own = epoch_of(size, seed, epoch)
    assert own != epoch_of(size, seed, epoch + 1)
    assert own != epoch_of(size, seed + 1, epoch)


@settings(max_examples=50, deadline=None)
@given(sizes, seeds, st.lists(st.integers(1, 40), min_size=1, max_size=10), st.integers(0, 10**9))
def test_any_slicing_gives_the_same_order(size, seed, lengths, start):
    whole = Order(size, seed=seed).indices(start, start + sum(lengths)).tolist()
    order, pieces = Order(size, seed=seed), []
    for length in lengths:
        pieces += order.indices(start + len(pieces), start + len(pieces) + length).tolist()
    assert pieces == whole
    # Backwards too, as after a rollback.
    assert order.indices(start, start + lengths[0]).tolist() == whole[: lengths[0]]


@given(sizes, st.integers(0, 10**6))
def test_without_shuffling_the_order_is_the_datasets_own(size, start):
    indices = Order(size, seed=3, shuffle=False).indices(start, start + 50)
    assert indices.tolist() == [position % size for position in range(start, start + 50)]


@given(st.integers(10**9, 10**12), seeds)
def test_a_trillion_samples_need_no_list_of_them(size, seed):
    indices = Order(size, seed=seed).indices(size - 50, size + 50).tolist()
    assert len(set(indices[:50])) == 50
    assert all(0 <= index < size for index in indices)


def test_all_orders_of_a_few_samples_occur_about_equally_often():
    counts = {}
    for epoch in range(1200):
        order = tuple(permute(np.arange(3), 3, key=mix_seed(5, epoch)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert min(counts.values()) > 140  # 200 expected, deviation 13


def test_places_are_uncorrelated_with_samples():
    size = 4096
    samples = permute(np.arange(size), size, key=11)
    assert abs(np.corrcoef(np.arange(size), samples)[0, 1]) < 0.06
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 0.06


def test_a_tiny_dataset_does_not_wait_for_thousands_of_epochs():
    start = time.perf_counter()
    Order(2, seed=1).indices(0, 8)
    assert time.perf_counter() - start < 0.1  # 0.4 s where a whole chunk is computed


def test_the_order_of_a_seed_never_changes_between_versions():
    # A run that goes on after an upgrade must see the same data.
    assert Order(10, seed=42).indices(0, 20).tolist() == [6, 7, 5, 8, 0, 1, 2, 4, 9, 3, 6, 4, 9, 2, 3, 8, 5, 0, 7, 1]
    assert mix_seed(1, 2, 3) == 2623250113353451629


@given(st.lists(st.integers(-5, 2**40), min_size=2, max_size=4, unique=True))
def test_mixed_seeds_depend_on_every_number_and_their_order(numbers):
    mixed = mix_seed(*numbers)
    assert 0 <= mixed < 2**63
    assert mixed != mix_seed(*reversed(numbers))
    assert mixed != mix_seed(*numbers, 0)
    assert mixed != mix_seed(numbers[0] + 1, *numbers[1:])
