"""What may stand in a sample, and how the rest is rejected."""

import numpy as np
import pytest
import torch
from tests.messages import raises

from trainwright.data.collators.samples import columns_of, names_of, require, stack_column, token_rows
from trainwright.errors import ConfigError, DataError


def test_fields_are_collected_without_those_to_drop():
    samples = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert columns_of(samples, drop=("b",)) == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        ([], ()),
        ([{"a": 1}, (1, 2)], ("1", "0")),
        ([{"a": 1}, {"a": 1}, {"a": 1, "b": 2}], ("0", "2")),
    ],
)
def test_batches_without_common_fields_are_rejected(samples, problem):
    with raises(DataError, *problem):
        columns_of(samples)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1, 2.0], ("2.0", "1")),
        ([1, "2"], ("2", "1")),
        ([[1], [2]], ()),
        ([1, None], ("NoneType",)),
        ([2**70], ()),
        ([], ()),
        (np.array([1.0]), ()),
        (np.array([["1"]]), ()),
        (np.ones((2, 2), int), ("2",)),
        (torch.ones(2), ()),
        (torch.ones(0, dtype=torch.int64), ()),
        ("text", ("text", "tokenize")),
        (None, ("NoneType",)),
        (5, ("5",)),
    ],
)
def test_what_is_no_sequence_of_tokens_is_rejected_by_field_and_sample(value, problem):
    with raises(DataError, *problem, "input_ids", "1", "0"):
        token_rows([[1, 2], value], "input_ids")


def test_lists_tuples_arrays_and_tensors_are_token_sequences():
    given = [[1, 2], (1, 2), np.array([1, 2], np.uint16), torch.tensor([1, 2], dtype=torch.int32), [np.int64(1), 2]]
    assert [row.tolist() for row in token_rows(given, "x")] == [[1, 2]] * 5


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], torch.int64),
        ([1.5, 2.5], torch.float32),
        ([1, 2.5], torch.float32),
        ([True, False], torch.bool),
        ([[1.0, 2.0], [3.0, 4.0]], torch.float32),
        ([np.float64(1), np.float64(2)], torch.float64),
        ([np.ones(2, np.float16), np.ones(2, np.float16)], torch.float16),
        ([torch.ones(2, dtype=torch.bfloat16)] * 2, torch.bfloat16),
    ],
)
def test_numbers_vectors_and_tensors_are_stacked(values, dtype):
    stacked = stack_column(values, "x")
    assert stacked.dtype is dtype
    assert stacked.shape == (2, *np.shape(values[0]))


def test_nests_are_kept():
    assert stack_column([{"a": 1}, {"a": 2}], "x")["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (["a", "b"], ("0", "url", "a")),
        ([1, "b"], ("1", "url")),
        ([1, None], ("1", "NoneType")),
        ([[1, 2], [1, "x"]], ("1",)),
        ([[1, 2], [1, 2, 3]], ("1", "3", "0", "2")),
        ([torch.ones(2), torch.ones(3)], ("1", "3")),
        ([torch.ones(2), "b"], ("1",)),
        ([[[1], [2, 3]]], ("0",)),
    ],
)
def test_what_cannot_be_stacked_is_rejected_by_field_and_sample(values, problem):
    with raises(DataError, *problem):
        stack_column(values, "url")


def test_a_missing_field_names_those_that_there_are():
    with raises(DataError, "text"):
        require({"a": [], "b": []}, "text", "Do this.")


def test_a_list_of_fields_is_not_one_text():
    with raises(ConfigError, "url"):
        names_of("drop", "url")
