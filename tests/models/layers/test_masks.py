"""Masks: who sees whom, and that nobody is left without anything to see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.errors import DataError
from trainwright.models.layers.attention import causal_mask, next_tokens, unpadded_keys, visible_keys

masks = st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=1, max_size=3).map(torch.tensor)


def test_without_a_mask_there_is_none():
    assert unpadded_keys(None) is None
    assert visible_keys(None, None) is None


@settings(max_examples=50, deadline=None)
@given(masks)
def test_an_encoder_sees_what_is_not_padding_and_never_nothing(mask):
    visible = unpadded_keys(mask)
    assert visible.shape == (len(mask), 1, 1, 5)
    for row, seen in zip(mask, visible[:, 0, 0], strict=True):
        assert torch.equal(seen, row.bool() if row.any() else torch.ones(5, dtype=torch.bool))


@settings(max_examples=50, deadline=None)
@given(masks)
def test_a_decoder_sees_itself_and_what_is_before_and_not_padding(mask):
    visible = causal_mask(mask)[:, 0]
    for row, seen in zip(mask, visible, strict=True):
        for query in range(5):
            expected = [key == query or (key < query and bool(row[key])) for key in range(5)]
            assert seen[query].tolist() == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-1, 2), min_size=1, max_size=6))
def test_documents_see_themselves_only(documents):
    visible = visible_keys(None, torch.tensor([documents]))[0, 0]
    for query, own in enumerate(documents):
        expected = [key <= query and other == own for key, other in enumerate(documents)]
        assert visible[query].tolist() == expected


@pytest.mark.parametrize("make", [unpadded_keys, lambda mask: visible_keys(mask, None)])
def test_a_mask_of_four_dims_is_taken_as_it_is_and_must_be_bool(make):
    mask = torch.eye(3, dtype=torch.bool)[None, None]
    assert make(mask) is mask
    with raises(DataError, "1", "3", "torch.int64"):
        make(mask.long())


def test_each_position_is_scored_on_the_token_after_it():
    assert next_tokens(torch.tensor([[4, 5, 6], [7, -100, 8]])).tolist() == [[5, 6, -100], [-100, 8, -100]]
