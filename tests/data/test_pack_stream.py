"""Packing a stream: rows strung together are the documents strung together, and resume is exact after every row."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.mix import mix
from trainwright.data.pack import pack
from trainwright.errors import DataError


class Documents:
    """A stream of documents of given sizes that says what was read."""

    draws_nothing = True

    def __init__(self, sizes, first=0, num_shards=2, broken=()):
        self.sizes, self.first, self.num_shards, self.broken = sizes, first, num_shards, broken
        self.next_start, self.place, self.read = 0, 0, []

    def shard(self, num_shards, index):
        edges = [len(self.sizes) * number // num_shards for number in (index, index + 1)]
        return Documents(self.sizes[edges[0] : edges[1]], first=self.first + edges[0], num_shards=1)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.next_start = state["place"]

    def __iter__(self):
        self.place, self.next_start = self.next_start, 0
        return self

    def __next__(self):
        if self.place == len(self.sizes):
            raise StopIteration
        number, self.place = self.first + self.place, self.place + 1
        self.read.append(number)
        if number in self.broken:
            raise ValueError(f"document {number}")
        return {"input_ids": [number * 1000 + token + 1 for token in range(self.sizes[number - self.first])]}


class Plain:
    def __iter__(self):
        return iter([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])


sizes = st.lists(st.integers(0, 30), max_size=15)


def tokens_of(documents, end=None):
    ending = [] if end is None else [end]
    return [
        token
        for number, size in enumerate(documents)
        for token in [*range(number * 1000 + 1, number * 1000 + 1 + size), *ending]
    ]


def real_tokens(rows):
    return [token for row in rows for token in row["input_ids"][row["document_ids"] >= 0].tolist()]


def as_lists(rows):
    return [{name: values.tolist() for name, values in row.items()} for row in rows]


@given(sizes, st.integers(2, 12), st.sampled_from([None, 7]))
def test_rows_strung_together_are_the_documents_strung_together(documents, length, end):
    stream = pack(Documents(documents), length=length, end_of_document=end)
    rows = list(stream)
    expected = tokens_of(documents, end)
    assert real_tokens(rows) == expected
    assert len(rows) == -(-len(expected) // length)
    assert all((row["document_ids"] >= 0).all() for row in rows[:-1])
    assert as_lists(stream) == as_lists(rows)


@given(sizes, st.integers(2, 12))
def test_pieces_begin_at_position_0_without_a_label(documents, length):
    for row in pack(Documents(documents), length=length):
        ids, borders = row["input_ids"], row["document_ids"]
        first = torch.cat((torch.ones(1, dtype=torch.bool), borders[1:] != borders[:-1]))
        assert torch.equal(row["labels"], torch.where(first | (borders < 0), -100, ids))
        assert torch.equal(row["position_ids"] == 0, first | (borders < 0))
        continues = ~first & (borders >= 0)
        assert (ids[1:] - ids[:-1])[continues[1:]].eq(1).all()


@settings(max_examples=30)
@given(sizes, st.integers(2, 12), st.sampled_from([None, 7]))
def test_going_on_after_any_row_gives_exactly_the_rest_and_reads_nothing_that_is_done(documents, length, end):
    stream = pack(Documents(documents), length=length, end_of_document=end)
    whole = as_lists(stream)
    ends = np.cumsum([size + (end is not None) for size in documents])
    passing = iter(stream)
    for taken in range(len(whole) + 1):
        source = Documents(documents)
        other = pack(source, length=length, end_of_document=end)
        other.load_state_dict(copy.deepcopy(stream.state_dict()))
        assert other.state_dict() == stream.state_dict()
        assert as_lists(other) == whole[taken:]
        # Not a document is read that ended in the rows before.
        assert all(ends[number] > taken * length or documents[number] == 0 for number in source.read)
        assert as_lists(other) == whole  # and the pass after it begins at the start
        next(passing, None)


@given(sizes, st.integers(2, 12))
def test_shards_partition_the_documents(documents, length):
    stream = pack(Documents(documents), length=length)
    assert stream.num_shards == 2
    rows = [row for index in range(2) for row in stream.shard(num_shards=2, index=index)]
    assert real_tokens(rows) == tokens_of(documents)


def read_with_errors(stream, states):
    passing, events = iter(stream), []
    while True:
        states.append(copy.deepcopy(stream.state_dict()))
        try:
            events.append(next(passing)["input_ids"].tolist())
        except StopIteration:
            return events
        except ValueError as error:
            events.append(str(error))


@settings(max_examples=30)
@given(sizes, st.integers(2, 12), st.sets(st.integers(0, 14), max_size=4))
def test_a_broken_document_is_left_out_once_and_a_resumed_run_does_the_same(documents, length, broken):
    states = []
    whole = read_with_errors(pack(Documents(documents, broken=broken), length=length), states)
    assert sum(isinstance(event, str) for event in whole) == len([one for one in broken if one < len(documents)])
    kept = [size for number, size in enumerate(documents) if number not in broken]
    assert sum(isinstance(event, list) for event in whole) == -(-sum(kept) // length)
    for place, state in enumerate(states):
        stream = pack(Documents(documents, broken=broken), length=length)
        stream.load_state_dict(state)
        assert read_with_errors(stream, []) == whole[place:]


def test_a_generator_that_raises_is_not_taken_for_one_that_ends():
    class Generated:
        def __iter__(self):
            yield {"input_ids": [1, 2, 3]}
            raise ValueError("document 1")

    passing = iter(pack(Generated(), length=8))
    with raises(DataError, "ValueError", "1"):
        next(passing)
    assert [row["input_ids"].tolist() for row in passing] == [[1, 2, 3, 0, 0, 0, 0, 0]]


def test_it_can_do_what_its_source_can_do():
    able, unable = pack(Documents([3]), length=4), pack(Plain(), length=4)
    for name in ("num_shards", "shard", "state_dict", "load_state_dict"):
        assert hasattr(able, name)
        assert not hasattr(unable, name)
    assert able.draws_nothing
    assert not unable.draws_nothing
    assert able.tokens_per_sample == unable.tokens_per_sample == 4
    assert [row["input_ids"].tolist() for row in unable] == [[1, 2, 3, 4], [5, 0, 0, 0]]


def test_its_source_is_told_the_epoch():
    class Told(Documents):
        def set_epoch(self, epoch):
            self.sizes = [epoch]

    stream = pack(Told([1]), length=4, pad_token_id=9)
    stream.set_epoch(3)
    assert [row["input_ids"].tolist() for row in stream] == [[1, 2, 3, 9]]


def test_a_document_that_became_shorter_is_rejected():
    stream = pack(Documents([9]), length=4)
    next(iter(stream))
    other = pack(Documents([3]), length=4)
    other.load_state_dict(stream.state_dict())
    with raises(DataError, "4", "3"):
        next(iter(other))


def test_mixed_streams_and_streams_of_datasets_are_packed_and_resumed():
    datasets = pytest.importorskip("datasets")

    def make():
        table = datasets.Dataset.from_dict({"input_ids": [[number] * (number % 7) for number in range(30)]})
        return pack(mix({"hf": table.to_iterable_dataset(num_shards=2), "own": Documents([5] * 9)}), length=8)

    stream = make()
    whole = as_lists(stream)
    passing = iter(stream)
    for taken in range(len(whole) + 1):
        other = make()
        other.load_state_dict(copy.deepcopy(stream.state_dict()))
        assert as_lists(other) == whole[taken:]
        next(passing, None)


def test_the_weights_of_a_mixture_of_streams_hold_in_packed_rows():
    first, second = Documents([5] * 3000), Documents([5] * 3000, first=5000)
    rows = iter(pack(mix({"first": first, "second": second}, {"first": 3, "second": 1}), length=50))
    tokens = torch.cat([torch.as_tensor(next(rows)["input_ids"]) for _ in range(300)])
    share = float((tokens < 5000 * 1000).double().mean())
    assert share == pytest.approx(0.75, abs=0.01)
