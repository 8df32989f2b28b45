"""Inputs and targets of their own lengths."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.collators.sequence_to_sequence import SequenceToSequence
from trainwright.errors import ConfigError, DataError

TOKENS = st.lists(st.integers(2, 9), min_size=1, max_size=12)


@settings(max_examples=60)
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5))
def test_each_side_is_padded_by_itself_and_the_decoder_sees_the_label_before(pairs):
    collator = SequenceToSequence(pad_token_id=0, decoder_start_token_id=1, buckets=[16], label_buckets=[8, 12])
    batch = collator([{"input_ids": source, "labels": target} for source, target in pairs])
    width = 8 if max(len(target) for _, target in pairs) <= 8 else 12
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (len(pairs), 16)
    assert batch["labels"].shape == batch["decoder_input_ids"].shape == (len(pairs), width)
    for row, (source, target) in enumerate(pairs):
        assert batch["input_ids"][row].tolist() == source + [0] * (16 - len(source))
        assert batch["labels"][row].tolist() == target + [-100] * (width - len(target))
        assert batch["decoder_input_ids"][row].tolist() == ([1, *target] + [0] * width)[:width]


def test_ignored_labels_are_padding_to_the_decoder():
    batch = SequenceToSequence(pad_token_id=0, decoder_start_token_id=1)([{"input_ids": [5], "labels": [-100, 6]}])
    assert batch["decoder_input_ids"].tolist() == [[1, 0]]


def test_without_a_start_token_the_model_makes_the_decoder_s_input():
    batch = SequenceToSequence(pad_token_id=0)([{"input_ids": [5], "labels": [6]}])
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}


def test_each_side_is_cut_by_itself():
    collator = SequenceToSequence(pad_token_id=0, max_length=2, max_label_length=3)
    batch = collator([{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}])
    assert batch["input_ids"].tolist() == [[5, 6]]
    assert batch["labels"].tolist() == [[5, 6, 7]]


def test_wrong_samples_and_arguments_are_rejected():
    collator = SequenceToSequence(pad_token_id=0, label_buckets=[2], vocab_size=10)
    with raises(DataError, "labels"):
        collator([{"input_ids": [5]}])
    with raises(DataError, "0", "labels", "3", "label_buckets", "2", "max_label_length"):
        collator([{"input_ids": [5], "labels": [1, 2, 3]}])
    with raises(DataError, "0", "labels", "10"):
        collator([{"input_ids": [5], "labels": [10]}])
    with raises(ConfigError, "decoder_start_token_id", "10"):
        SequenceToSequence(pad_token_id=0, decoder_start_token_id=10, vocab_size=10)
