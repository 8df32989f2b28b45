"""What may stand in a sample, and how the rest is refused."""

import numpy as np
import pytest
import torch

from trainwright.data.collators.samples import columns_of, names_of, require, stack_column, token_rows
from trainwright.errors import ConfigError, DataError


def test_fields_are_collected_without_those_to_drop():
    samples = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert columns_of(samples, drop=("b",)) == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        ([], "holds no samples"),
        ([{"a": 1}, (1, 2)], r"Sample 1 of the batch \(counted from 0\) is a tuple"),
        ([{"a": 1}, {"a": 1}, {"a": 1, "b": 2}], r"sample 0 has a; sample 2 \(counted from 0\) has a, b"),
    ],
)
def test_batches_without_common_fields_are_refused(samples, problem):
    with pytest.raises(DataError, match=problem):
        columns_of(samples)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1, 2.0], r"holds a float, 2\.0, at place 1"),
        ([1, "2"], "holds a str, '2', at place 1"),
        ([[1], [2]], "holds a list"),
        ([1, None], "holds a NoneType"),
        ([2**70], "holds a int"),
        ([], "is empty"),
        (np.array([1.0]), "holds float64 values"),
        (np.array([["1"]]), "holds <U1 values"),
        (np.ones((2, 2), int), r"has the shape \(2, 2\)"),
        (torch.ones(2), "holds float32 values"),
        (torch.ones(0, dtype=torch.int64), "is empty"),
        ("text", "is a text, 'text'.*\"tokenize\""),
        (None, "is a NoneType"),
        (5, "is a int, 5"),
    ],
)
def test_what_is_no_sequence_of_tokens_is_refused_by_field_and_sample(value, problem):
    with pytest.raises(DataError, match=rf'Sample 1 of the batch \(counted from 0\): "input_ids" {problem}'):
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
        (["a", "b"], r'Sample 0 .*"url" is a text, \'a\'.*drop: \[url\]'),
        ([1, "b"], 'Sample 1 .*"url" is a text'),
        ([1, None], "Sample 1 .* is a NoneType"),
        ([[1, 2], [1, "x"]], "Sample 1 .* is a list"),
        ([[1, 2], [1, 2, 3]], r"Sample 1 .* list of shape \(3,\), that of sample 0 is list of shape \(2,\)"),
        ([torch.ones(2), torch.ones(3)], r"Sample 1 .* Tensor of shape \(3,\)"),
        ([torch.ones(2), "b"], "Sample 1 .* is str"),
        ([[[1], [2, 3]]], "Sample 0 .* lists of unequal length"),
    ],
)
def test_what_cannot_be_stacked_is_refused_by_field_and_sample(values, problem):
    with pytest.raises(DataError, match=problem):
        stack_column(values, "url")


def test_a_missing_field_names_those_that_there_are():
    with pytest.raises(DataError, match=r'no "text"; they have a, b\. Do this'):
        require({"a": [], "b": []}, "text", "Do this.")


def test_a_list_of_fields_is_not_one_text():
    with pytest.raises(ConfigError, match=r"drop is 'url'\. Give a list"):
        names_of("drop", "url")
