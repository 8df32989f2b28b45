"""Sequences of unequal length, and what padding must leave as it is."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.collators.padded import Padded
from trainwright.errors import ConfigError, DataError

PAD = 3
SAMPLES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=6)
FORMS = st.sampled_from([list, np.array, torch.tensor, lambda ids: np.array(ids, np.uint16)])
SIDES = st.sampled_from(["right", "left"])
WIDTHS = st.sampled_from([{}, {"buckets": [8, 16, 32]}, {"pad_to_multiple_of": 8}, {"max_length": 5}])


@settings(max_examples=150)
@given(SAMPLES, FORMS, SIDES, WIDTHS)
def test_unpadding_gives_the_samples_back(rows, form, side, width):
    batch = Padded(pad_token_id=PAD, side=side, **width)([{"input_ids": form(row)} for row in rows])
    kept = [row[: width.get("max_length")] for row in rows]
    mask = batch["attention_mask"]
    assert [ids[real.bool()].tolist() for ids, real in zip(batch["input_ids"], mask, strict=True)] == kept
    # The mask marks exactly the tokens, on their side; labels are −100 exactly where it is 0.
    assert mask.sum(1).tolist() == [len(row) for row in kept]
    ordered = mask if side == "right" else mask.flip(1)
    assert torch.equal(ordered, ordered.sort(1, descending=True).values)
    assert (batch["input_ids"][mask == 0] == PAD).all()
    assert torch.equal(batch["labels"] == -100, mask == 0)
    assert torch.equal(batch["labels"][mask == 1], batch["input_ids"][mask == 1])
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    longest = max(map(len, kept))
    if "buckets" in width:
        assert mask.shape[1] == min(bucket for bucket in width["buckets"] if bucket >= longest)
    elif "pad_to_multiple_of" in width:
        assert 0 <= mask.shape[1] - longest < 8
        assert mask.shape[1] % 8 == 0
    else:
        assert mask.shape[1] == longest


def test_fields_of_tokens_are_padded_and_others_stacked():
    batch = Padded(pad_token_id=0, pad_values={"weights": -1.0})(
        [
            {
                "input_ids": [5, 6],
                "position_ids": [0, 1],
                "weights": [0.5, 1.0],
                "vectors": np.ones((2, 3), np.float32),
                "flags": [True, True],
                "label_of_row": 4,
                "embedding": [0.1, 0.2, 0.3],
            },
            {
                "input_ids": [7],
                "position_ids": [9],
                "weights": [2.0],
                "vectors": np.ones((1, 3), np.float32),
                "flags": [True],
                "label_of_row": 5,
                "embedding": [0.4, 0.5, 0.6],
            },
        ]
    )
    assert batch["position_ids"].tolist() == [[0, 1], [9, 0]]
    assert batch["weights"].tolist() == [[0.5, 1.0], [2.0, -1.0]]
    assert batch["weights"].dtype is torch.float32
    assert batch["vectors"].shape == (2, 2, 3)
    assert batch["vectors"][1, 1].tolist() == [0, 0, 0]
    assert batch["flags"].tolist() == [[True, True], [True, False]]
    assert batch["label_of_row"].tolist() == [4, 5]
    assert batch["embedding"].shape == (2, 3)


def test_a_vector_as_long_as_the_tokens_stays_whole_where_stacked_names_it():
    sample = {"input_ids": [5, 6], "features": [1.0, 2.0]}
    assert Padded(pad_token_id=0, buckets=[4])([sample])["features"].shape == (1, 4)
    assert Padded(pad_token_id=0, buckets=[4], stacked=["features"])([sample])["features"].shape == (1, 2)


def test_given_labels_and_masks_are_kept():
    batch = Padded(pad_token_id=0)(
        [
            {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 0]},
            {"input_ids": [8], "labels": [8], "attention_mask": [1]},
        ]
    )
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert Padded(pad_token_id=0)([{"input_ids": [1, 2], "labels": 1}])["labels"].tolist() == [1]
    assert "labels" not in Padded(pad_token_id=0, make_labels=False)([{"input_ids": [1]}])


def test_max_length_cuts_every_field_of_tokens():
    batch = Padded(pad_token_id=0, max_length=2)([{"input_ids": [5, 6, 7], "labels": [1, 2, 3], "w": [0.1, 0.2, 0.3]}])
    assert {name: tensor.shape[1] for name, tensor in batch.items()} == dict.fromkeys(batch, 2)
    assert batch["labels"].tolist() == [[1, 2]]


def test_the_padding_token_is_the_tokenizer_s():
    batch = Padded(tokenizer="bytes")([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    assert batch["input_ids"].tolist() == [[1, 2], [3, 256]]


def test_the_tokenizer_s_own_tokens_as_padding_are_masked_by_length_not_by_value():
    batch = Padded(pad_token_id=7)([{"input_ids": [7, 7]}, {"input_ids": [7]}])
    assert batch["labels"].tolist() == [[7, 7], [7, -100]]


def test_it_pickles_to_a_worker():
    sample = [{"input_ids": [1, 2]}, {"input_ids": [3]}]
    collator = Padded(tokenizer="bytes", buckets=[4])
    collator(sample)
    assert torch.equal(pickle.loads(pickle.dumps(collator))(sample)["input_ids"], collator(sample)["input_ids"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, ()),
        ({"pad_token_id": -1}, ("1",)),
        ({"pad_token_id": 9, "vocab_size": 9}, ("9", "vocab_size")),
        ({"pad_token_id": 0, "side": "top"}, ("top",)),
    ],
)
def test_arguments_that_cannot_work_are_rejected(arguments, problem):
    with raises(ConfigError, *problem):
        Padded(**arguments)


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, ("labels", "input_ids", "1", "2")),
        ({"input_ids": [1, 2], "position_ids": 3}, ("position_ids",)),
        ({"input_ids": [1.0]}, ("input_ids",)),
        ({"input_ids": []}, ("input_ids",)),
        ({"input_ids": [1, 12]}, ("input_ids", "12", "10")),
        ({"input_ids": [1, -1]}, ("input_ids", "1")),
        ({"input_ids": [1, 2], "labels": [1, 10]}, ("labels", "10")),
        ({"input_ids": [1, 2], "url": "ab"}, ("url",)),
        ({"input_ids": [1, 2], "tags": ["a", "b"]}, ("tags",)),
        ({"input_ids": list(range(9))}, ("input_ids", "9", "4", "max_length")),
    ],
)
def test_what_cannot_be_padded_is_rejected_by_field_and_sample(sample, problem):
    with raises(DataError, *problem, "0"):
        Padded(pad_token_id=0, vocab_size=10, buckets=[2, 4])([sample])


def test_vectors_of_unequal_size_are_rejected():
    samples = [{"input_ids": [1], "v": np.ones((1, n))} for n in (2, 3)]
    with raises(DataError, "1", "v", "3", "0", "2"):
        Padded(pad_token_id=0)(samples)


def test_samples_without_tokens_are_rejected():
    with raises(DataError, "input_ids"):
        Padded(pad_token_id=0)([{"text": "a"}])
