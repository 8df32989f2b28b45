"""How wide a batch is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.collators.samples import Width, mark_tokens, pad_rows
from trainwright.errors import ConfigError, DataError

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@settings(max_examples=100)
@given(LENGTHS, st.sets(st.integers(1, 80), min_size=1, max_size=4))
def test_the_bucket_is_the_smallest_that_fits(lengths, buckets):
    fitting = [bucket for bucket in buckets if bucket >= max(lengths)]
    width = Width(buckets=tuple(sorted(buckets)))
    if fitting:
        assert width.of(lengths, "input_ids") == min(fitting)
    else:
        with raises(DataError, lengths.index(max(lengths)), max(lengths), "input_ids", golden=False):
            width.of(lengths, "input_ids")


@settings(max_examples=100)
@given(LENGTHS, st.integers(1, 16), st.none() | st.integers(1, 4))
def test_a_multiple_is_the_smallest_that_fits_and_never_above_the_maximum(lengths, multiple, times):
    longest = None if times is None else times * multiple
    width = Width(longest, multiple).of(lengths, "input_ids")
    needed = max(lengths) if longest is None else min(longest, max(lengths))
    assert width % multiple == 0
    assert needed <= width < needed + multiple
    assert longest is None or width <= longest


@pytest.mark.parametrize(
    ("settings_", "problem"),
    [
        ({"max_length": 0}, ("max_length", "0")),
        ({"max_length": 2.5}, ("max_length", "2.5")),
        ({"multiple": -8}, ("pad_to_multiple_of", "8")),
        ({"buckets": (8, 4)}, ("8", "4")),
        ({"buckets": ("8",)}, ()),
        ({"buckets": (8,), "multiple": 4}, ()),
        ({"buckets": (8,), "max_length": 9}, ("max_length", "9", "8")),
        ({"multiple": 8, "max_length": 20}, ("pad_to_multiple_of", "8", "16")),
        ({"buckets": (8,), "max_length": 9, "of_labels": True}, ("max_label_length", "9", "label_buckets", "8")),
    ],
)
def test_settings_that_contradict_each_other_are_rejected(settings_, problem):
    with raises(ConfigError, *problem):
        Width(**settings_)


def test_a_row_that_is_too_long_loses_its_end_on_either_side():
    rows = [np.arange(5), np.arange(2)]
    assert pad_rows(rows, 3, 9).tolist() == [[0, 1, 2], [0, 1, 9]]
    assert pad_rows(rows, 3, 9, side="left").tolist() == [[0, 1, 2], [9, 0, 1]]


def test_the_mask_follows_the_side():
    assert mark_tokens([1, 3], 3).tolist() == [[1, 0, 0], [1, 1, 1]]
    assert mark_tokens([1, 3], 3, side="left").tolist() == [[0, 0, 1], [1, 1, 1]]
