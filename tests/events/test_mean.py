"""A mean with its weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.events import Mean


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-100, 100), max_size=5), min_size=1, max_size=6))
def test_means_of_unequal_batches_add_up_to_the_mean_of_all(batches):
    means = [Mean(float(sum(batch)), len(batch)) for batch in batches]
    everything = [number for batch in batches for number in batch]
    expected = sum(everything) / len(everything) if everything else 0.0
    assert sum(means[1:], means[0]).value == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_an_empty_mean_is_zero_in_every_dtype(dtype):
    assert Mean(torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)).value == 0.0
    assert Mean(0.0, 0).value == 0.0


def test_the_value_of_tensors_stays_a_tensor_and_keeps_its_gradient():
    total = torch.tensor(6.0, requires_grad=True)
    value = Mean(total, torch.tensor(3)).value
    value.backward()
    assert value == 2.0
    assert total.grad == pytest.approx(1 / 3)


def test_a_detached_mean_keeps_no_graph_and_does_not_follow_later_changes():
    total, count = torch.tensor(6.0, requires_grad=True), torch.tensor(3.0)
    detached = Mean(total * 1.0, count).detach()
    count += 3
    assert not detached.total.requires_grad
    assert detached.value == 2.0
