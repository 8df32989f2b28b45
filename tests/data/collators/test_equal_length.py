"""Blocks of one length."""

import numpy as np
import pytest
import torch
from tests.messages import raises

from trainwright.data.collators.equal_length import EqualLength
from trainwright.errors import DataError

FORMS = [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint16)]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_tokens_gives_the_same_batch(form):
    batch = EqualLength()([{"input_ids": form([1, 2, 3]), "weight": 0.5}, {"input_ids": form([4, 5, 6]), "weight": 1}])
    assert batch["input_ids"].dtype is torch.int64
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["weight"].tolist() == [0.5, 1.0]


def test_labels_have_their_own_memory_and_given_ones_are_kept():
    batch = EqualLength()([{"input_ids": [1, 2]}])
    batch["labels"].fill_(-100)
    assert batch["input_ids"].tolist() == [[1, 2]]
    assert EqualLength()([{"input_ids": [1, 2], "labels": [-100, 2]}])["labels"].tolist() == [[-100, 2]]
    assert EqualLength()([{"input_ids": [1, 2], "labels": 7}])["labels"].tolist() == [7]
    assert EqualLength(make_labels=False)([{"input_ids": [1, 2]}]).keys() == {"input_ids"}


def test_another_length_is_rejected_with_sample_and_lengths():
    with raises(DataError, "2", "input_ids", "0", "3"):
        EqualLength()([{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3]}, {"input_ids": [1, 2]}])


def test_a_token_outside_the_vocabulary_is_rejected():
    collator = EqualLength(vocab_size=10)
    with raises(DataError, "1", "input_ids", "10"):
        collator([{"input_ids": [1, 9]}, {"input_ids": [10, 1]}])
    with raises(DataError, "0", "labels", "1"):
        collator([{"input_ids": [1, 9], "labels": [-100, -1]}])
    with raises(DataError, "5"):
        EqualLength()([{"input_ids": [1, -5]}])
