"""A loss is worked out in at least 32 bits, and in 64 where the model is."""

import pytest
import torch

from trainwright.models.layers.losses import at_least_float32
from trainwright.models.llama import Llama


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_shorter_becomes_float32(dtype):
    assert at_least_float32(torch.ones(2, dtype=dtype)).dtype == torch.float32


def test_float64_stays():
    tensor = torch.ones(2, dtype=torch.float64)
    assert at_least_float32(tensor) is tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_has_its_loss_in_that_precision(dtype):
    model = Llama(vocab_size=11, hidden_size=8, num_heads=2, num_layers=1).to(dtype)
    ids = torch.arange(6)[None]
    assert model(input_ids=ids, labels=ids)["loss"].dtype == torch.promote_types(dtype, torch.float32)
