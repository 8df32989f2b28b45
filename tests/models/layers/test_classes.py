"""The loss of classifiers, and their classes in config.json."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.models.layers.losses import class_criterion, class_loss, label_names, num_labels_of


def test_classes_have_a_cross_entropy_that_skips_minus_100():
    logits = torch.randn(3, 4)
    loss = class_loss(class_criterion(4), logits, torch.tensor([1, -100, 3]))
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits[[0, 2]], torch.tensor([1, 3])))


@pytest.mark.parametrize("labels", [torch.tensor([1.0, 2.0]), torch.tensor([[1], [2]])])
def test_a_single_output_is_compared_with_numbers(labels):
    loss = class_loss(class_criterion(1), torch.tensor([[0.0], [4.0]]), labels)
    assert loss.item() == (1.0 + 4.0) / 2


def test_without_labels_there_is_no_loss():
    assert class_loss(class_criterion(2), torch.zeros(1, 2), None) is None


def test_the_number_of_classes_is_that_of_their_names():
    assert num_labels_of({"id2label": {"0": "a", "1": "b", "2": "c"}}) == 3
    assert num_labels_of({"num_labels": 4}) == 4
    assert num_labels_of({}) == 2


def test_names_that_were_read_are_kept_while_there_are_as_many():
    assert label_names(2, {"id2label": {"0": "a", "1": "b"}}) == {}
    assert label_names(1, {"id2label": {"0": "a", "1": "b"}}) == {
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
