"""Padding and loss shares of a batch, and which field tells them."""

import pytest
import torch

from trainwright.analysis.data import fraction_in_loss, num_tokens, padding_of

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
def test_padding_is_read_from_the_field_that_tells_most(fields, by):
    assert padding_of({"input_ids": IDS, **fields}) == (0.5, by)
    assert num_tokens({"input_ids": IDS, **fields}) == 4


def test_a_batch_without_such_a_field_tells_no_padding():
    assert padding_of({"pixel_values": torch.ones(2, 3), "labels": torch.tensor([1, 2])}) == (None, None)
    assert padding_of((torch.ones(2), torch.ones(2))) == (None, None)


def test_a_square_mask_is_not_taken_for_padding():
    assert padding_of({"attention_mask": torch.ones(2, 1, 4, 4, dtype=torch.bool)}) == (None, None)


def test_the_share_in_the_loss_counts_labels_of_places_only():
    assert fraction_in_loss({"input_ids": IDS, "labels": LABELS}) == 3 / 8
    assert fraction_in_loss({"x": torch.ones(2), "labels": torch.tensor([1, 2])}) is None
