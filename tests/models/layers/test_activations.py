"""Activations have transformers' names and values."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises

from trainwright.errors import ConfigError
from trainwright.models.layers.settings import ACTIVATIONS, activation


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_is_transformers_function_of_that_name(name):
    theirs = pytest.importorskip("transformers.activations").ACT2FN[name]
    numbers = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(activation(name)(numbers), theirs(numbers), atol=1e-6, rtol=1e-5)


def test_an_unknown_name_is_rejected_with_the_known_ones():
    with raises(ConfigError, "wavy", "gelu_new"):
        activation("wavy")
