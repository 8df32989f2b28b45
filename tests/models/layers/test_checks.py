"""Sizes that cannot make a model are refused by name, value and remedy."""

from __future__ import annotations

import pytest

from trainwright.errors import ConfigError, DataError
from trainwright.models.layers.checks import check_counts, check_dropouts, check_heads, check_length


def test_what_fits_passes():
    check_counts(num_layers=1, num_heads=8)
    check_heads(12, 4)
    check_dropouts(dropout=0.0, attention_dropout=0.99)
    check_length(8, 8)


def test_a_count_below_one_is_refused_by_name():
    with pytest.raises(ConfigError, match="num_heads is 0"):
        check_counts(num_layers=1, num_heads=0)


def test_a_width_that_does_not_split_is_refused():
    with pytest.raises(ConfigError, match="hidden_size 10 does not split into 4 heads"):
        check_heads(10, 4)


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_what_is_no_probability_is_refused(value):
    with pytest.raises(ConfigError, match=f"attention_dropout is {value}"):
        check_dropouts(dropout=0.1, attention_dropout=value)


def test_too_many_tokens_are_refused_with_both_numbers():
    with pytest.raises(DataError, match=r"8 positions .* 9 tokens"):
        check_length(9, 8)
