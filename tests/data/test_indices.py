"""The indices that a dataset is asked for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.data.fetch import positive_indices


@settings(max_examples=50)
@given(st.integers(1, 50).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(-size, size - 1)))))
def test_indices_mean_what_they_mean_in_a_list(case):
    size, indices = case
    found = positive_indices(indices, size=size, of="rows")
    assert found.dtype == np.int64
    assert found.tolist() == [list(range(size))[index] for index in indices]


@pytest.mark.parametrize("index", [10, -11, 2**40])
def test_an_index_outside_is_named(index):
    with pytest.raises(IndexError, match=rf"^Index {index} is out of range for the 10 rows of a\.txt\.$"):
        positive_indices([3, index, 12], size=10, of="rows of a.txt")
    with pytest.raises(IndexError, match="out of range for the 0 rows"):
        positive_indices([0], size=0, of="rows")


def test_numbers_of_numpy_and_torch_are_indices_and_fractions_are_none():
    assert positive_indices([np.int32(2), torch.tensor(1)], size=3, of="rows").tolist() == [2, 1]
    assert positive_indices(range(3), size=3, of="rows").tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="must be integers"):
        positive_indices([1.5], size=3, of="rows")
