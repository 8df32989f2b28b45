"""Mix: several datasets as one by index, and what is rejected."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.mix import Mix, MixedStream, mix
from trainwright.errors import ConfigError, DataError


class Named:
    """Samples (name, index); remembers the calls."""

    draws_nothing = True

    def __init__(self, name, size, tokens=None):
        self.name, self.size, self.calls = name, size, []
        if tokens is not None:
            self.tokens_per_sample = tokens
            self.lengths = np.full(size, tokens)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.name, index

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [(self.name, index) for index in indices]


def three(**options):
    return mix({name: Named(name, size) for name, size in (("a", 3), ("b", 1), ("c", 4))}, **options)


@given(st.lists(st.integers(-8, 7), max_size=30))
def test_a_batch_keeps_its_order_and_asks_each_source_once(indices):
    mixed = three()
    whole = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1), ("c", 2), ("c", 3)]
    assert mixed.__getitems__(indices) == [whole[index] for index in indices]
    assert all(len(source.calls) <= 1 for source in mixed.sources.values())
    assert mixed.source_of(indices) == [whole[index][0] for index in indices]


def test_it_is_as_long_as_all_sources_and_ends_there():
    mixed = three()
    assert len(mixed) == 8
    assert mixed[3] == ("b", 0)
    with pytest.raises(IndexError, match="out of range for the 8 samples of a mix"):
        mixed[8]


class Drawing(list):
    """A dataset that may draw random numbers: a subclass declares that it does not."""


def test_it_offers_what_all_sources_agree_on():
    same = mix({"a": Named("a", 2, tokens=8), "b": Named("b", 3, tokens=8)})
    assert same.draws_nothing
    assert same.tokens_per_sample == 8
    assert same.lengths.tolist() == [8] * 5
    different = mix({"a": Named("a", 2, tokens=8), "b": Named("b", 3, tokens=9), "c": Drawing(range(4))})
    assert not different.draws_nothing
    assert not hasattr(different, "tokens_per_sample")
    assert not hasattr(different, "lengths")


def test_nothing_is_read_before_it_is_needed():
    class Closed(Named):
        def __len__(self):
            raise AssertionError("opened")

    mixed = mix({"a": Closed("a", 1), "b": Closed("b", 1)}, {"a": 1, "b": 2})
    with pytest.raises(AssertionError, match="opened"):
        len(mixed)


def test_orders_follow_the_arguments():
    plain = three().make_order(seed=1, shuffle=True, global_batch_size=1)
    assert sorted(plain.indices(0, 8).tolist()) == list(range(8))
    weights = {"c": 1.0, "a": 1.0, "b": 2.0}
    by_weight = three(weights=weights).make_order(seed=1, shuffle=True, global_batch_size=1)
    assert by_weight.size == 8
    assert by_weight.counts(10_000) == {"a": 2500, "b": 5000, "c": 2500}
    by_size = mix({"a": Named("a", 30), "b": Named("b", 10)}, same_source_batches=True)
    order = by_size.make_order(seed=1, shuffle=True, global_batch_size=5)
    assert order.counts(50_000) == {"a": 37_500, "b": 12_500}
    assert all(len(set(by_size.source_of(order.indices(start, start + 5)))) == 1 for start in range(0, 500, 5))


def test_it_goes_to_a_spawned_worker_with_its_order():
    mixed = three(weights={"a": 1, "b": 1, "c": 1})
    order = mixed.make_order(seed=1, shuffle=True, global_batch_size=2)
    expected = mixed.__getitems__(order.indices(5, 25).tolist())
    there, order_there = pickle.loads(pickle.dumps((mixed, order)))
    assert there.__getitems__(order_there.indices(5, 25).tolist()) == expected


def test_a_stream_among_the_sources_makes_a_stream():
    assert isinstance(mix({"a": Named("a", 3), "b": iter(())}), MixedStream)
    assert isinstance(mix({"a": Named("a", 3)}), Mix)


def test_a_batch_larger_than_a_source_is_rejected_where_it_is_of_one_source():
    with raises(DataError, "2", "1"):
        three(same_source_batches=True).make_order(seed=1, shuffle=True, global_batch_size=2)


def test_an_empty_source_is_named():
    with raises(DataError):
        len(mix({"a": Named("a", 3), "nothing": []}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": {}}, ()),
        ({"sources": {"a": [1], "b": 3}}, ()),
        ({"sources": {"a": [1], "b": [2]}, "weights": {"a": 1.0}}, ()),
        ({"sources": {"a": [1]}, "weights": {"a": 1.0, "x": 1.0}}, ()),
        ({"sources": {"a": [1], "b": [1]}, "weights": {"a": 1.0, "b": 0.0}}, ("0.0",)),
        ({"sources": {"a": iter(()), "b": [1]}, "same_source_batches": True}, ()),
    ],
)
def test_wrong_arguments_are_rejected_by_name(arguments, message):
    with raises(ConfigError, *message):
        mix(**arguments)


def test_weights_of_a_mix_in_a_mix_are_rejected_as_they_would_be_ignored():
    inner = three(weights={"a": 1, "b": 1, "c": 1})
    with raises(ConfigError):
        mix({"inner": inner})
    assert len(mix({"inner": three()})) == 8
