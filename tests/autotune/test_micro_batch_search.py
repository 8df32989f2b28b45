"""The search for a micro-batch, without a model."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.autotune.micro_batch import Growth, largest_that_fits, micro_batch_sizes
from trainwright.backends import Backend


@given(st.integers(1, 3000))
def test_the_sizes_are_the_divisors_in_ascending_order(number):
    assert micro_batch_sizes(number) == [size for size in range(1, number + 1) if number % size == 0]


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_the_largest_that_fits_is_found_in_few_trials(number, limit):
    sizes, tried = micro_batch_sizes(number), []

    def fits(size):
        tried.append(size)
        return size <= limit

    found = largest_that_fits(sizes, fits)
    assert found == max((size for size in sizes if size <= limit), default=None)
    assert len(tried) == len(set(tried)) <= 2 * len(sizes).bit_length()


def test_nothing_is_found_among_nothing():
    assert largest_that_fits([], lambda size: True) is None


def test_the_search_begins_with_the_smallest_and_tries_the_largest_of_a_power_of_two_fourth():
    tried = []
    assert largest_that_fits(micro_batch_sizes(512), lambda size: not tried.append(size)) == 512
    assert tried == [1, 4, 64, 512]


class SmallMachine(Backend):
    """A machine with so much room, in which a step takes a given number of bytes."""

    def __init__(self, room, takes):
        super().__init__(torch.device("cpu"))
        self.room, self.takes = room, takes

    def memory_room(self):
        return self.room

    def memory(self):
        return replace(super().memory(), in_use=1000, peak=1000 + self.takes)


def test_a_size_that_would_end_the_process_is_not_tried():
    growth = Growth(SmallMachine(room=10_000, takes=1000))
    assert growth.leaves_room(10**9)  # nothing is known yet
    with growth.measuring(1):
        pass
    assert growth.leaves_room(9)
    assert not growth.leaves_room(10)  # which would leave nothing free


def test_what_does_not_grow_is_not_counted_for_each_sample_and_memory_is_shared_by_ranks():
    growth = Growth(SmallMachine(room=10_000, takes=1000), num_fixed_bytes=900, num_sharing=2)
    with growth.measuring(2):
        pass
    assert growth.leaves_room(77)  # 900 + 77 × 50 bytes of 0.95 × 5000
    assert not growth.leaves_room(78)


@pytest.mark.parametrize("room", [None])
def test_where_nobody_knows_the_room_everything_is_tried(room):
    growth = Growth(SmallMachine(room=room, takes=1000))
    with growth.measuring(1):
        pass
    assert growth.leaves_room(10**12)
