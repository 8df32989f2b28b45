"""Packing documents with an index: rows hold each document's tokens, and only those."""

import logging
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import mentions, raises

from trainwright.data.mix import mix
from trainwright.data.pack import PackedDocuments, PackedStream, pack
from trainwright.errors import ConfigError, DataError


class Documents:
    """Documents in which each token is its own: document × 1000 + place + 1."""

    draws_nothing = True

    def __init__(self, sizes):
        self.sizes, self.calls = sizes, []

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return {"input_ids": np.arange(self.sizes[index]) + index * 1000 + 1}

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [self[index] for index in indices]


class MeasuredDocuments(Documents):
    @property
    def lengths(self):
        return np.array(self.sizes)


documents = st.lists(st.integers(0, 50), min_size=1, max_size=25)


@given(documents, st.integers(2, 24), st.integers(0, 2**63))
def test_rows_hold_every_token_once_with_its_border_and_position(sizes, length, seed):
    packed = pack(Documents(sizes), length=length, run_seed=seed)
    seen = []
    for row in packed.__getitems__(range(len(packed))):
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        positions, borders = row["position_ids"].tolist(), row["document_ids"].tolist()
        assert len(ids) == len(labels) == len(positions) == len(borders) == length == packed.tokens_per_sample
        for place, token in enumerate(ids):
            is_first = place == 0 or borders[place] != borders[place - 1]
            if borders[place] < 0:
                assert (token, labels[place], positions[place]) == (0, -100, 0)
                continue
            assert labels[place] == (-100 if is_first else token)
            assert positions[place] == (0 if is_first else positions[place - 1] + 1)
            assert is_first or token == ids[place - 1] + 1
            assert borders[place] == (0 if place == 0 else borders[place - 1] + is_first)
            seen.append(token)
    assert sorted(seen) == [d * 1000 + place + 1 for d, size in enumerate(sizes) for place in range(size)]
    assert packed.fill == sum(sizes) / max(1, len(packed) * length)


@given(documents, st.integers(2, 24))
def test_a_sources_own_lengths_give_the_same_plan_without_reading(sizes, length):
    source = MeasuredDocuments(sizes)
    packed = pack(source, length=length, end_of_document=5)
    read = pack(Documents(sizes), length=length, end_of_document=5)
    assert len(packed) == len(read)
    assert source.calls == []
    for index in range(len(packed)):
        assert packed.plan.row(index) == read.plan.row(index)
        assert all(torch.equal(packed[index][name], read[index][name]) for name in ("input_ids", "labels"))


def test_a_batch_of_rows_is_one_call_to_the_source():
    source = MeasuredDocuments([30, 4, 5, 6])
    packed = pack(source, length=8)
    packed.__getitems__([0, 1, -1])  # the first two are pieces of the same document
    assert len(source.calls) == 1
    assert len(set(source.calls[0])) == len(source.calls[0])


def test_nothing_is_read_before_it_is_needed():
    class Closed(Documents):
        def __len__(self):
            raise AssertionError("opened")

    assert pack(Closed([]), length=8, tokenizer="no-such-tokenizer").tokens_per_sample == 8


def test_rows_end_with_an_index_error():
    packed = pack(Documents([3, 4]), length=8)
    assert len(list(packed)) == len(packed) == 1
    with pytest.raises(IndexError, match="Index 1 is out of range for the 1 packed rows"):
        packed[1]


def test_it_goes_to_a_spawned_worker_with_its_plan():
    packed = pack(Documents([3, 9, 4]), length=8, tokenizer="bytes")
    rows = packed.__getitems__(range(len(packed)))
    there = pickle.loads(pickle.dumps(packed))
    assert "plan" in vars(there)
    assert all(torch.equal(row["input_ids"], there[number]["input_ids"]) for number, row in enumerate(rows))


def test_texts_are_packed_with_a_tokenizer():
    packed = pack([{"text": "ab"}, {"text": "cde"}], length=8, tokenizer="bytes", pad_token_id=256)
    [row] = packed
    end = packed.tokenizer.eos_id
    assert row["input_ids"].tolist() == [99, 100, 101, end, 97, 98, end, 256]


def test_the_plan_says_how_full_the_rows_are(caplog):
    with caplog.at_level(logging.INFO):
        assert pack(Documents([3, 4]), length=8).fill == 7 / 8
    assert mentions(caplog.text, "2", "1", "8", "87.5")


def test_a_document_that_changes_its_length_is_rejected():
    source = Documents([3, 4])
    packed = pack(source, length=8)
    assert len(packed) == 1
    source.sizes = [3, 5]
    with raises(DataError, "1", "4", "5"):
        packed[0]


def test_it_draws_nothing_where_its_source_does_not():
    assert pack(Documents([3]), length=8).draws_nothing
    assert pack([{"input_ids": [1]}], length=8).draws_nothing
    assert not pack(type("Drawing", (list,), {})([{"input_ids": [1]}]), length=8).draws_nothing
    assert not hasattr(pack(Documents([3]), length=8), "tokenizer")


def test_sources_make_documents_or_a_stream():
    assert isinstance(pack(Documents([3]), length=8), PackedDocuments)
    assert isinstance(pack(iter(()), length=8), PackedStream)
    with raises(ConfigError):
        pack(3, length=8)


def test_weights_of_a_mix_are_rejected_as_they_would_be_ignored():
    sources = {"a": Documents([3]), "b": Documents([4])}
    assert len(pack(mix(sources), length=8)) == 1
    with raises(ConfigError):
        pack(mix(sources, {"a": 1, "b": 1}), length=8)


def test_packed_sources_can_be_mixed():
    packed = {name: pack(Documents(sizes), length=8) for name, sizes in (("a", [8] * 5), ("b", [8] * 3))}
    mixed = mix(packed, {"a": 1, "b": 1})
    assert len(mixed) == 8
    assert mixed.tokens_per_sample == 8
    assert mixed.draws_nothing
    assert mixed[5]["input_ids"].tolist()[0] % 1000 == 1
