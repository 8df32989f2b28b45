"""Descriptions of fields, batches and lengths: decoded tokens, drawn images, padding, histograms."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.analysis.data import (
    MAX_BARS,
    describe_fields,
    describe_sample,
    draw,
    fields_of,
    fraction_in_loss,
    length_of,
    num_tokens,
    padding_of,
    summarize_lengths,
    unit_of,
)


def nothing(ids):
    return None


def spelled(ids):
    return bytes(ids).decode()


def test_nested_mappings_have_dotted_names_and_named_tuples_their_fields():
    assert [name for name, _ in fields_of({"a": {"b": 1, "c": (2, "x")}})] == ["a.b", "a.c.0", "a.c.1"]
    assert [name for name, _ in fields_of(torch.ones(2))] == ["value"]


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_tokens_are_decoded_from_tensors_arrays_and_lists(kind):
    [field] = describe_sample({"input_ids": kind([72, 105])}, spelled)
    assert (field.text, field.shape, field.minimum, field.maximum, field.ids) == ("Hi", (2,), 72, 105, None)


def test_tokens_that_nothing_decodes_show_their_first_ids():
    [field] = describe_sample({"input_ids": list(range(100))}, nothing)
    assert field.ids.startswith("0 1 2 ")
    assert field.ids.endswith("63 …")


def test_labels_show_how_many_are_ignored_and_the_text_of_the_others():
    _, field = describe_sample({"input_ids": [72, 105, 33], "labels": [-100, 105, 33]}, spelled)
    assert (field.num_ignored, field.is_as_input_ids, field.text) == (1, True, "i!")
    _, field = describe_sample({"input_ids": [72, 105, 33], "labels": [72, 72, 72]}, spelled)
    assert (field.num_ignored, field.is_as_input_ids, field.text) == (0, False, None)


def test_the_tokens_that_are_labels_are_told_from_the_others():
    tokens, _ = describe_sample({"input_ids": [72, 105, 33, 63], "labels": [-100, 105, 33, -100]}, spelled)
    assert tokens.runs == (("H", False), ("i!", True), ("?", False))
    for labels in ([72, 105, 33, 63], [-100] * 4, [1]):
        assert describe_sample({"input_ids": [72, 105, 33, 63], "labels": labels}, spelled)[0].runs == ()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int32, torch.complex64]
)
def test_tensors_of_every_type_are_described(dtype):
    [field] = describe_sample({"x": torch.ones(2, 3).to(dtype)}, nothing)
    assert (field.type, field.shape) == (str(dtype).removeprefix("torch."), (2, 3))
    assert field.mean == (None if dtype == torch.complex64 else 1.0)


def test_empty_ragged_and_odd_values_are_described_too():
    sample = {
        "none": None,
        "empty": torch.ones(0),
        "ragged": [[1], [2, 3]],
        "bytes": b"abc",
        "chat": [{"role": "user"}],
    }
    texts = {field.name: field.text for field in describe_sample(sample, nothing)}
    assert texts == {
        "none": "None",
        "empty": None,
        "ragged": "[[1], [2, 3]]",
        "bytes": "3 bytes",
        "chat": '[{"role": "user"}]',
    }


def test_a_batch_s_lists_of_texts_are_counted():
    [field] = describe_fields({"text": ["a", "b"]})
    assert (field.type, field.text, field.shape) == ("list", "2 values", None)


def test_small_grey_images_are_drawn_and_nothing_else():
    assert draw(torch.eye(4)) == ("██      ", "  ██    ", "    ██  ", "      ██")
    assert len(draw(torch.eye(28).unsqueeze(0))) == 14
    assert draw(torch.rand(3, 8, 8)) == draw(torch.zeros(8, 8)) == draw(torch.rand(224, 224)) == ()


# batches

IDS = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
LABELS = torch.tensor([[-100, 6, 7, -100], [8, -100, -100, -100]])


@pytest.mark.parametrize(
    ("fields", "by"),
    [
        ({"attention_mask": MASK, "labels": LABELS}, "attention_mask"),
        ({"document_ids": MASK - 1, "labels": LABELS}, "document_ids"),
        ({"labels": LABELS}, "labels"),
    ],
)
def test_padding_is_read_from_the_most_precise_field(fields, by):
    assert padding_of({"input_ids": IDS, **fields}) == (0.5, by)
    assert num_tokens({"input_ids": IDS, **fields}) == 4


def test_a_batch_without_such_a_field_has_no_padding():
    assert padding_of({"pixel_values": torch.ones(2, 3), "labels": torch.tensor([1, 2])}) == (None, None)
    assert padding_of((torch.ones(2), torch.ones(2))) == (None, None)


def test_a_square_mask_is_not_taken_for_padding():
    assert padding_of({"attention_mask": torch.ones(2, 1, 4, 4, dtype=torch.bool)}) == (None, None)


def test_the_fraction_in_the_loss_counts_labels_of_tokens_only():
    assert fraction_in_loss({"input_ids": IDS, "labels": LABELS}) == 3 / 8
    assert fraction_in_loss({"x": torch.ones(2), "labels": torch.tensor([1, 2])}) is None


# lengths


def test_tokens_are_counted_before_characters_and_text_before_other_texts():
    assert unit_of({"text": "ab", "input_ids": [1]}) == "tokens of input_ids"
    assert unit_of({"url": "x", "text": "ab"}) == "characters of text"
    assert unit_of({"ask": "x", "say": "ab"}) == "characters of ask, say"
    assert unit_of({"x": 1.0}) is None
    assert length_of({"ask": "x", "say": "ab"}, "characters of ask, say") == 3
    assert length_of({"say": 1}, "characters of ask") is None


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60))
def test_bars_are_few_and_adjacent_and_count_every_sample_once(counted):
    found = summarize_lengths(counted, "tokens", is_whole=True)
    assert (found.minimum, found.maximum) == (min(counted), max(counted))
    assert found.minimum <= found.median <= found.p95 <= found.maximum
    if len(set(counted)) == 1:
        assert found.bars == ()
        return
    assert len(found.bars) <= MAX_BARS
    assert sum(bar.samples for bar in found.bars) == len(counted)
    assert all(one.last + 1 == other.first for one, other in zip(found.bars, found.bars[1:], strict=False))
