"""MixedStream: each sample once, exact resume after any sample, shards that partition."""

import copy
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.mix import BLOCK, MixedStream, RowStream, mix
from trainwright.errors import DataError


class Numbers:
    """A stream of (name, number) that can do all that a stream may do, and says what was read."""

    def __init__(self, name, numbers, num_shards=3, broken=()):
        self.name, self.numbers, self.num_shards, self.broken = name, list(numbers), num_shards, broken
        self.next_start, self.place, self.read = 0, 0, []

    def shard(self, num_shards, index):
        assert num_shards <= self.num_shards
        return Numbers(self.name, self.numbers[index::num_shards], num_shards=1)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.next_start = state["place"]

    def __iter__(self):
        self.place, self.next_start = self.next_start, 0
        return self

    def __next__(self):
        if self.place == len(self.numbers):
            raise StopIteration
        self.place += 1
        number = self.numbers[self.place - 1]
        self.read.append(number)
        if number in self.broken:
            raise ValueError(f"row {number}")
        return self.name, number


class Indexed:
    draws_nothing = True

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return "rows", index


class Plain:
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def mixture(lengths, weights=None, seed=1):
    sources = {name: Numbers(name, range(length)) for name, length in zip("ab", lengths, strict=False)}
    sources["rows"] = Indexed(lengths[-1])
    return mix(sources, weights and dict(zip(sources, weights, strict=True)), run_seed=seed)


def expected_samples(lengths):
    return sorted(
        (name, number) for name, length in zip(("a", "b", "rows"), lengths, strict=True) for number in range(length)
    )


lengths = st.lists(st.integers(0, 20), min_size=2, max_size=2).flatmap(
    lambda two: st.integers(1, 20).map(lambda last: [*two, last])
)
weights = st.none() | st.lists(st.floats(0.05, 10), min_size=3, max_size=3)


@settings(max_examples=50)
@given(lengths, weights, st.integers(0, 2**63))
def test_each_sample_comes_exactly_once_in_every_pass(sizes, shares, seed):
    stream = mixture(sizes, shares, seed)
    first = []
    for sample in stream:
        first.append(sample)
        assert stream.latest_source == sample[0]
    assert sorted(first) == expected_samples(sizes)
    assert list(stream) == first


@settings(max_examples=8)
@given(lengths, weights, st.integers(0, 3))
def test_going_on_after_any_sample_gives_exactly_the_rest(sizes, shares, epoch):
    stream = mixture(sizes, shares)
    stream.set_epoch(epoch)
    whole = list(stream)
    passing = iter(stream)
    for taken in range(len(whole) + 1):
        other = mixture(sizes, shares)
        other.load_state_dict(copy.deepcopy(stream.state_dict()))
        assert other.state_dict() == stream.state_dict()
        assert list(other) == whole[taken:]
        for name in "ab":  # nothing before the place is read again
            assert other.sources[name].read == [number for source, number in whole[taken:] if source == name]
        assert list(other) == whole  # and the pass after it begins at the start
        assert next(passing, None) == (whole[taken] if taken < len(whole) else None)


@settings(max_examples=30)
@given(lengths, weights, st.integers(1, 3))
def test_shards_partition_the_whole(sizes, shares, parts):
    stream = mixture(sizes, shares)
    assert stream.num_shards == min(3, sizes[-1])
    parts = min(parts, stream.num_shards)
    samples = [sample for index in range(parts) for sample in stream.shard(num_shards=parts, index=index)]
    assert sorted(samples) == expected_samples(sizes)


def test_shares_are_exact_over_a_block_and_go_on_among_those_that_are_left():
    stream = mix({"a": Numbers("a", range(30_000)), "b": Numbers("b", range(3_000))}, {"a": 3, "b": 1})
    names = [name for name, _ in stream]
    assert Counter(names[:BLOCK]) == {"a": 7500, "b": 2500}
    assert len(names) == 33_000
    assert set(names[-15_000:]) == {"a"}


def test_samples_of_a_source_keep_their_order():
    stream = mix({"a": Numbers("a", range(50)), "b": Numbers("b", range(50))})
    samples = list(stream)
    assert [number for name, number in samples if name == "a"] == list(range(50))
    assert samples[:50] != [("a", number) for number in range(50)]


def test_epochs_seeds_and_shards_choose_differently():
    def names(seed=1, epoch=0, shard=None):
        stream = mix({"a": Numbers("a", range(99)), "b": Numbers("b", range(99))}, run_seed=seed)
        stream.set_epoch(epoch)
        part = stream if shard is None else stream.shard(num_shards=3, index=shard)
        return [name for name, _ in part][:33]

    variants = [names(), names(seed=2), names(epoch=1), names(shard=0), names(shard=1)]
    assert len({tuple(variant) for variant in variants}) == len(variants)


def test_a_state_taken_before_a_source_was_opened_begins_at_its_start():
    stream = mix({"a": Numbers("a", range(3)), "b": Numbers("b", range(3))}, {"a": 9999, "b": 1})
    whole = list(stream)  # b's stream now stands at its end
    passing = iter(stream)
    assert next(passing) == whole[0]
    state = stream.state_dict()
    assert "b" not in state["sources"]
    stream.load_state_dict(state)
    assert list(stream) == whole[1:]


def test_two_passes_at_once_do_not_disturb_each_other():
    stream = mixture([9, 9, 9])
    whole = list(stream)
    first = iter(stream)
    taken = [next(first) for _ in range(4)]
    other = copy.copy(stream)
    assert list(other) == whole
    assert stream.state_dict()["taken"] == dict(Counter({"a": 0, "b": 0, "rows": 0}) | Counter(n for n, _ in taken))
    assert taken + list(first) == whole


def test_after_a_broken_row_the_pass_goes_on_and_so_does_a_resumed_one():
    def make():
        return mix({"a": Numbers("a", range(6), broken={2, 5}), "b": Numbers("b", range(6))})

    def read(stream):
        passing, events = iter(stream), []
        while True:
            states.append(copy.deepcopy(stream.state_dict()))
            try:
                events.append(next(passing))
            except StopIteration:
                return events
            except ValueError as error:
                events.append(f"{error} {error.__notes__[0]}")

    states = []
    whole = read(make())
    assert {"row 2 in source a of a mix", "row 5 in source a of a mix"} < set(whole)
    assert len(whole) == 12
    for place, state in enumerate(states[: len(whole) + 1]):
        stream = make()
        stream.load_state_dict(state)
        assert read(stream) == whole[place:]


def test_a_generator_that_raises_is_not_taken_for_one_that_ends():
    class Generated:
        def __iter__(self):
            yield ("g", 0)
            raise ValueError("row 1")

    passing = iter(mix({"g": Generated(), "b": Numbers("b", range(3))}))
    samples = []
    with raises(DataError, "ValueError", "1"):
        samples.extend(sample for sample in passing)
    samples.extend(passing)
    assert sorted(samples) == [("b", 0), ("b", 1), ("b", 2), ("g", 0)]


def test_it_can_do_what_all_sources_can_do():
    able = mixture([3, 3, 3])
    for name in ("num_shards", "shard", "state_dict", "load_state_dict", "set_epoch"):
        assert hasattr(able, name)
    unable = mix({"a": Numbers("a", range(3)), "plain": Plain(4)})
    for name in ("num_shards", "shard", "state_dict", "load_state_dict", "tokens_per_sample"):
        assert not hasattr(unable, name)
    assert len(list(unable)) == 7
    assert unable.source_names == ["a", "plain"]


def test_a_state_of_other_sources_is_rejected():
    stream = mixture([1, 1, 1])
    with raises(DataError):
        stream.load_state_dict({**stream.state_dict(), "taken": {"x": 1, "y": 2}})


def test_it_resumes_streams_of_datasets():
    datasets = pytest.importorskip("datasets")

    def make():
        table = datasets.Dataset.from_dict({"number": list(range(40))})
        return mix({"hf": table.to_iterable_dataset(num_shards=4), "b": Numbers("b", range(10), num_shards=4)})

    stream = make()
    whole = [str(sample) for sample in stream]
    assert len(whole) == 50
    passing = iter(stream)
    for taken in range(0, 50, 7):
        other = make()
        other.load_state_dict(copy.deepcopy(stream.state_dict()))
        assert [str(sample) for sample in other] == whole[taken:]
        for _ in range(7):
            next(passing, None)
    parts = [str(sample) for index in range(4) for sample in make().shard(num_shards=4, index=index)]
    assert sorted(parts) == sorted(whole)


@settings(max_examples=30)
@given(st.integers(1, 3000), st.integers(0, 5), st.integers(1, 5), st.data())
def test_rows_with_an_index_are_read_once_in_an_order_per_epoch(size, epoch, parts, data):
    parts = min(parts, size)
    whole = []
    for index in range(parts):
        stream = RowStream(Indexed(size), seed=7).shard(num_shards=parts, index=index)
        stream.set_epoch(epoch)
        samples = list(stream)
        place = data.draw(st.integers(0, len(samples)))
        passing = iter(stream)
        for _ in range(place):
            next(passing)
        other = RowStream(Indexed(size), seed=7).shard(num_shards=parts, index=index)
        other.load_state_dict(stream.state_dict())
        assert list(other) == samples[place:]
        whole += samples
    assert sorted(index for _, index in whole) == list(range(size))
    if size > 50:
        stream = RowStream(Indexed(size), seed=7)
        stream.set_epoch(epoch + 1)
        assert list(stream) != whole


def test_mixed_streams_nest():
    def make():
        inner = mix({"a": Numbers("a", range(8)), "b": Numbers("b", range(8))})
        return mix({"inner": inner, "rows": Indexed(5)}, {"inner": 2, "rows": 1})

    stream = make()
    whole = list(stream)
    assert isinstance(stream, MixedStream)
    assert len(whole) == 21
    passing = iter(stream)
    for taken in range(21):
        other = make()
        other.load_state_dict(copy.deepcopy(stream.state_dict()))
        assert list(other) == whole[taken:]
        next(passing)
