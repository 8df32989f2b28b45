"""Hidden tokens."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.collators.masked_language_model import MaskedLanguageModel
from trainwright.errors import ConfigError, DataError
from trainwright.events.mean import IGNORED_LABEL

MASK, PAD, SIZE = 98, 99, 100
OWN = {"mask_token_id": MASK, "pad_token_id": PAD, "vocab_size": SIZE}


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 97), min_size=1, max_size=30), min_size=1, max_size=5),
    st.integers(0, 10_000),
    st.floats(0.01, 1.0),
)
def test_labels_hold_exactly_what_was_hidden(rows, seed, probability):
    torch.manual_seed(seed)
    collator = MaskedLanguageModel(**OWN, mask_probability=probability, special_token_ids=[0, 1])
    batch = collator([{"input_ids": row} for row in rows])
    ids, labels, mask = batch["input_ids"], batch["labels"], batch["attention_mask"]
    whole = torch.where(labels == IGNORED_LABEL, ids, labels)
    assert [row[real.bool()].tolist() for row, real in zip(whole, mask, strict=True)] == rows
    assert not torch.isin(labels, torch.tensor([0, 1, PAD])).any()
    assert (labels[mask == 0] == IGNORED_LABEL).all()
    # What replaced a token is the mask or a token that is not special.
    assert not torch.isin(ids[whole != ids], torch.tensor([0, 1, PAD])).any()


def test_the_shares_are_those_that_were_asked_for():
    torch.manual_seed(0)
    tokens = torch.randint(0, 98, (64, 512))
    batch = MaskedLanguageModel(**OWN)([{"input_ids": row} for row in tokens])
    hidden = batch["labels"] != IGNORED_LABEL
    assert hidden.float().mean().item() == pytest.approx(0.15, abs=0.01)
    found = batch["input_ids"][hidden]
    assert (found == MASK).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (found == tokens[hidden]).float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_a_batch_is_the_same_for_the_same_seed():
    collator = MaskedLanguageModel(**OWN)
    samples = [{"input_ids": list(range(50))}, {"input_ids": list(range(30))}]
    batches = []
    for seed, one in ((1, collator), (1, pickle.loads(pickle.dumps(collator))), (2, collator)):
        torch.manual_seed(seed)
        batches.append(one(samples))
    assert torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])
    assert not torch.equal(batches[0]["input_ids"], batches[2]["input_ids"])
    assert not getattr(collator, "draws_nothing", False)


def test_texts_are_tokenized():
    torch.manual_seed(0)
    batch = MaskedLanguageModel(tokenizer="bytes", mask_probability=1.0, mask_fraction=1.0, random_fraction=0.0)(
        [{"text": "abc"}, {"text": "d"}]
    )
    assert batch["input_ids"].tolist() == [[259, 259, 259], [259, 256, 256]]
    assert batch["labels"].tolist() == [[97, 98, 99], [100, -100, -100]]


def test_a_sample_may_say_itself_which_of_its_tokens_are_special():
    collator = MaskedLanguageModel(**OWN, mask_probability=1.0)
    batch = collator([{"input_ids": [5, 6, 7], "special_tokens_mask": [1, 0, 1]}])
    assert batch["labels"].tolist() == [[-100, 6, -100]]
    assert "special_tokens_mask" not in batch


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"tokenizer": "bytes", "mask_probability": 0.0}, ("mask_probability", "0.0")),
        ({"tokenizer": "bytes", "mask_fraction": 0.9, "random_fraction": 0.2}, ("1",)),
        ({"mask_token_id": 3}, ("mask_token_id", "vocab_size")),
        ({"mask_token_id": 3, "vocab_size": 10}, ()),
    ],
)
def test_arguments_that_cannot_work_are_rejected(arguments, problem):
    with raises(ConfigError, *problem):
        MaskedLanguageModel(**arguments)


def test_samples_that_do_not_fit_are_rejected():
    with raises(DataError):
        MaskedLanguageModel(**OWN)([{"input_ids": [1], "labels": [1]}])
    with raises(DataError):
        MaskedLanguageModel(**OWN)([{"text": "a"}])
    with raises(DataError, "100"):
        MaskedLanguageModel(**OWN)([{"input_ids": [100]}])
    with raises(DataError, "300", "260"):
        MaskedLanguageModel(tokenizer="bytes")([{"input_ids": [300]}])
