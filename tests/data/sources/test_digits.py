"""Digits: three disjoint, fixed parts of real images, read only when asked for."""

from __future__ import annotations

import pickle
import sys

import pytest
import torch
from tests.messages import raises

from trainwright.data.sources.digits import Digits
from trainwright.errors import ConfigError, DataError


def test_the_parts_are_80_10_10_percent_of_1797_images():
    assert [len(Digits(part=part)) for part in ("train", "valid", "test")] == [1438, 179, 180]


def test_the_parts_are_disjoint_and_together_whole():
    from sklearn.datasets import load_digits

    stored = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16
    drawn = torch.cat(
        [sample["pixel_values"][None] for part in ("train", "valid", "test") for sample in Digits(part=part, flat=True)]
    )
    assert torch.equal(torch.unique(drawn, dim=0), torch.unique(stored, dim=0))
    assert len(drawn) == len(stored)
    assert torch.allclose(drawn.sum(0), stored.sum(0))


def test_a_sample_is_an_image_from_0_to_1_and_its_label():
    sample = Digits()[0]
    assert sample["pixel_values"].shape == (1, 8, 8)
    assert sample["pixel_values"].dtype == torch.float32
    assert sample["pixel_values"].min() == 0.0
    assert 0.5 < sample["pixel_values"].max() <= 1.0
    assert sample["labels"].dtype == torch.int64
    assert sample["labels"].shape == ()


def test_flat_images_are_rows_of_64_pixels():
    assert torch.equal(Digits(flat=True)[5]["pixel_values"], Digits()[5]["pixel_values"].flatten())


def test_every_part_holds_every_digit():
    for part in ("train", "valid", "test"):
        assert {int(sample["labels"]) for sample in Digits(part=part)} == set(range(10))


def test_a_batch_holds_the_same_samples_as_single_calls():
    digits = Digits(part="valid")
    for index, sample in zip([3, 170, 3], digits.__getitems__([3, 170, 3]), strict=True):
        assert torch.equal(sample["pixel_values"], digits[index]["pixel_values"])
        assert torch.equal(sample["labels"], digits[index]["labels"])


def test_torchs_loader_and_pickle_take_it():
    digits = pickle.loads(pickle.dumps(Digits(part="test")))
    batch = next(iter(torch.utils.data.DataLoader(digits, batch_size=4)))
    assert batch["pixel_values"].shape == (4, 1, 8, 8)


def test_an_index_beyond_the_end_is_an_index_error():
    with pytest.raises(IndexError):
        Digits()[1438]


def test_an_unknown_part_is_rejected_with_the_known_ones():
    with raises(ConfigError, "dev"):
        Digits(part="dev")


def test_without_scikit_learn_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits = Digits()  # the constructor reads nothing, so it cannot fail
    with raises(DataError):
        len(digits)
