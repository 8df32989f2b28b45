"""Pairs and single answers as tensors, with the answers of other prompts for KTO."""

import pytest
import torch
from tests.messages import raises

from trainwright.data.collators.preferences import Preferences
from trainwright.errors import DataError

PAIRS = [
    {"prompt": [5, 6], "chosen": [7, 8, 9], "rejected": [10]},
    {"prompt": [11], "chosen": [12], "rejected": [13, 14]},
]
SINGLES = [
    {"prompt": [5, 6], "completion": [7, 8, 9], "label": True, "max_length": 4},
    {"prompt": [11], "completion": [12], "label": False, "max_length": 4},
    {"prompt": [3, 3, 3], "completion": [4], "label": True, "max_length": 4},
]


def test_a_pair_is_two_rows_of_one_sample():
    batch = Preferences(pad_token_id=0)(PAIRS)
    assert batch["input_ids"].tolist() == [
        [[5, 6, 7, 8, 9], [5, 6, 10, 0, 0]],
        [[11, 12, 0, 0, 0], [11, 13, 14, 0, 0]],
    ]
    assert torch.equal(batch["attention_mask"], (batch["input_ids"] != 0).long())
    assert batch["labels"].tolist() == [
        [[-100, -100, 7, 8, 9], [-100, -100, 10, -100, -100]],
        [[-100, 12, -100, -100, -100], [-100, 13, 14, -100, -100]],
    ]
    assert batch["row_id"].shape == (2,)


def test_equal_pairs_have_equal_ids_whatever_the_batch_is():
    collator = Preferences(pad_token_id=0)
    together = collator(PAIRS)["row_id"].tolist()
    assert together == [collator([pair])["row_id"].item() for pair in PAIRS]
    moved = {"prompt": [5], "chosen": [6, 7, 8, 9], "rejected": [10]}
    swapped = {"prompt": [5, 6], "chosen": [10], "rejected": [7, 8, 9]}
    assert len({*together, *collator([moved, swapped])["row_id"].tolist()}) == 4


def test_each_prompt_also_has_the_answer_of_the_sample_before_within_its_limit():
    batch = Preferences(pad_token_id=0)(SINGLES)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [11, 12, 0, 0], [3, 3, 3, 4]]
    assert batch["label"].tolist() == [True, False, True]
    assert batch["kl_input_ids"].tolist() == [[5, 6, 4, 0], [11, 7, 8, 9], [3, 3, 3, 12]]
    assert batch["kl_labels"].tolist() == [[-100, -100, 4, -100], [-100, 7, 8, 9], [-100, -100, -100, 12]]
    assert batch["kl_attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_the_width_may_be_a_multiple():
    batch = Preferences(pad_token_id=0, pad_to_multiple_of=8)(PAIRS)
    assert batch["input_ids"].shape == (2, 2, 8)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([{"input_ids": [1]}], ["prompt", "input_ids", "preferences"]),
        ([{"prompt": [1], "chosen": [2]}], ["rejected"]),
        ([{"prompt": [1], "completion": [2]}], ["label"]),
        ([PAIRS[0], SINGLES[0]], ["sample 0", "different fields"]),
    ],
)
def test_other_samples_are_rejected(samples, words):
    with raises(DataError, *words):
        Preferences(pad_token_id=0)(samples)
