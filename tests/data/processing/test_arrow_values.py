"""Values between Python and Arrow."""

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.data.arrow import make_reader, to_storable


def there_and_back(*values):
    column = pyarrow.array([to_storable(value, "x") for value in values])
    read = make_reader(column, column.type)
    return [read(row) for row in range(len(values))]


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [
        ([1, 2, 3], torch.tensor([1, 2, 3])),
        ([1.5, 2.0], torch.tensor([1.5, 2.0])),
        ([1.5, 2], torch.tensor([1.5, 2.0])),
        ([True, False], torch.tensor([True, False])),
        ([[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]])),
        (np.arange(3, dtype=np.uint16), torch.arange(3)),
        (torch.ones(2, dtype=torch.float64), torch.ones(2)),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2)),
        (torch.arange(24, dtype=torch.uint8).view(2, 3, 4), torch.arange(24, dtype=torch.uint8).view(2, 3, 4)),
        ([], torch.empty(0, dtype=torch.int64)),
    ],
)
def test_a_list_of_numbers_comes_back_as_a_tensor(given_value, expected):
    (found,) = there_and_back(given_value)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("value", [3, 1.5, "text", b"bytes", None, ["a", "b"], [{"role": "user", "text": "hi"}], True])
def test_other_values_come_back_as_they_were(value):
    assert there_and_back(value) == [value]


def test_small_and_large_whole_numbers_stand_in_one_column():
    small, large, nested = there_and_back([1], [2**62], [])
    assert (small.tolist(), large.tolist(), nested.tolist()) == ([1], [2**62], [])
    assert small.dtype == large.dtype == nested.dtype == torch.int64


def test_scalars_of_numpy_and_torch_come_back_as_python_numbers():
    assert there_and_back(np.int32(3)) == [3]
    assert there_and_back(torch.tensor(2.5)) == [2.5]


def test_a_ragged_list_comes_back_as_a_list_of_tensors():
    (ragged, regular) = there_and_back([[1], [2, 3]], [[4, 5]])
    assert [row.tolist() for row in ragged] == [[1], [2, 3]]
    assert regular.tolist() == [[4, 5]]


def test_a_list_with_a_gap_stays_a_list():
    assert there_and_back([1, None])[0] == [1, None]
    missing, there = there_and_back(None, [7])
    assert missing is None
    assert there.tolist() == [7]


def test_numbers_inside_of_dicts_become_tensors_too():
    (found,) = there_and_back({"ids": [1, 2], "name": "a"})
    assert found["ids"].tolist() == [1, 2]
    assert found["name"] == "a"


def test_a_tensor_read_twice_has_memory_of_its_own():
    column = pyarrow.array([np.arange(3)])
    read = make_reader(column, column.type)
    read(0).fill_(-100)
    assert read(0).tolist() == [0, 1, 2]


def test_what_cannot_be_stored_is_named_with_its_place():
    with pytest.raises(TypeError, match=r"x\.inner\[1\] is a object, which cannot be cached"):
        to_storable({"inner": ["a", object()]}, "x")
    with pytest.raises(TypeError, match="does not fit into 64 bits"):
        to_storable([2**70], "x")


@pytest.mark.parametrize(
    "value",
    [
        [1e300],
        [1, -1e300],
        np.array([[1.0], [1e39]]),
        [[1.0], [1e300]],
        [np.float64(1e300)],
        {"y": torch.tensor([1e300], dtype=torch.float64)},
    ],
)
def test_a_number_that_float32_cannot_hold_is_rejected_by_name(value):
    with pytest.raises(TypeError, match=r"^x.*contains 1e\+3.*, which does not fit into float32"):
        to_storable(value, "x")


def test_numbers_without_a_sign_come_back_or_are_rejected():
    (found,) = there_and_back(np.array([2**63 - 1], np.uint64))
    assert found.tolist() == [2**63 - 1]
    with pytest.raises(TypeError, match="x contains 9223372036854775808, which does not fit into int64"):
        to_storable(np.array([2**63], np.uint64), "x")


def test_infinities_and_single_numbers_of_any_size_come_back():
    (found,) = there_and_back([float("inf"), float("-inf")])
    assert found.tolist() == [float("inf"), float("-inf")]
    assert there_and_back(1e300, torch.tensor(0.1, dtype=torch.float64)) == [1e300, 0.1]


numbers = st.integers(min_value=-(2**63), max_value=2**63 - 1)


@settings(max_examples=60)
@given(st.lists(st.lists(st.lists(numbers, max_size=3), max_size=3), min_size=1, max_size=4))
def test_any_nest_of_whole_numbers_comes_back_with_its_numbers(rows):
    def plain(value):
        return value.tolist() if isinstance(value, torch.Tensor) else [plain(item) for item in value]

    assert [plain(value) for value in there_and_back(*rows)] == rows
