"""One class a sample."""

import numpy as np
import pytest
import torch
from tests.messages import raises

from trainwright.data.collators.classification import Classification
from trainwright.errors import ConfigError, DataError


def test_features_are_stacked_and_labels_are_whole_numbers():
    batch = Classification()([{"x": torch.ones(3), "labels": 1}, {"x": torch.zeros(3), "labels": 0}])
    assert batch["x"].shape == (2, 3)
    assert batch["labels"].tolist() == [1, 0]
    assert batch["labels"].dtype is torch.int64


@pytest.mark.parametrize("value", [2, np.int32(2), np.array(2), torch.tensor(2, dtype=torch.int32), "c"])
def test_every_form_of_a_class_is_its_number(value):
    batch = Classification(classes=["a", "b", "c"], label="kind")([{"x": 1.0, "kind": value}])
    assert batch["labels"].tolist() == [2]
    assert batch.keys() == {"x", "labels"}


def test_classes_may_be_called_by_numbers():
    batch = Classification(classes=[3, 5])([{"x": 1.0, "label": 5}, {"x": 1.0, "label": 3}])
    assert batch["labels"].tolist() == [1, 0]
    with raises(DataError, "1", "3", "5"):
        Classification(classes=[3, 5])([{"x": 1.0, "label": 1}])


def test_ignored_labels_stay():
    assert Classification(classes=["a"])([{"x": 1.0, "label": -100}])["labels"].tolist() == [-100]


def test_texts_are_tokenized_and_tokens_padded():
    batch = Classification(tokenizer="bytes", max_length=2)([{"text": "abc", "label": 0}, {"text": "d", "label": 1}])
    assert batch["input_ids"].tolist() == [[97, 98], [100, 256]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [0, 1]
    tokens = Classification(pad_token_id=0, buckets=[4])([{"input_ids": [5, 6], "label": 1}])
    assert tokens["input_ids"].tolist() == [[5, 6, 0, 0]]
    assert tokens["labels"].tolist() == [1]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("z", ("z",)),
        (2, ("2",)),
        (-1, ("1",)),
        (1.5, ("1.5",)),
        (None, ("NoneType",)),
        ([1], ()),
    ],
)
def test_an_unknown_class_is_named_with_its_sample(value, problem):
    with raises(DataError, *problem, "label", "1", "0"):
        Classification(classes=["a", "b"])([{"x": 1.0, "label": "a"}, {"x": 1.0, "label": value}])


def test_a_name_without_a_list_of_classes_asks_for_it():
    with raises(DataError, "cat"):
        Classification()([{"x": 1.0, "label": "cat"}])


def test_samples_and_arguments_that_do_not_fit_are_rejected():
    with raises(DataError, "label"):
        Classification()([{"x": 1.0}])
    with raises(DataError, "text"):
        Classification(tokenizer="bytes")([{"body": "a", "label": 1}])
    with raises(DataError):
        Classification()([{"input_ids": [1], "label": 1}])
    with raises(ConfigError):
        Classification(classes=["a", "a"])
    with raises(ConfigError, "pad_token_id"):
        Classification(max_length=8)


def test_the_tokenizer_is_there_for_those_who_look_for_it():
    assert Classification(tokenizer="bytes").tokenizer.name == "bytes"
    assert Classification(pad_token_id=0).tokenizer is None
    assert Classification().tokenizer is None
