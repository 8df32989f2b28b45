"""Which operations a recomputed layer may keep."""

import pytest
import torch
from tests.messages import raises
from torch.utils.checkpoint import CheckpointPolicy

from trainwright.errors import ConfigError
from trainwright.memory.activation_checkpointing import Policy, read_operations


def test_names_are_operations_of_torch_and_attention_is_all_of_its_kernels():
    assert read_operations("save", ["bmm", "trainwright::rotations"]) == ("aten::bmm", "trainwright::rotations")
    assert read_operations("save", ["mm"]) == ("aten::mm", "aten::_scaled_mm"), "the same product in fp8"
    kernels = read_operations("save", ["scaled_dot_product_attention"])
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in kernels
    assert read_operations("save", kernels) == kernels  # each is an operation that torch has


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("admm", ("admm", "addmm")),
        ("linear", ("linear",)),
        ("native_dropout", ("native_dropout",)),
        ("bernoulli_", ("bernoulli_",)),
    ],
)
def test_what_cannot_be_kept_is_rejected(name, said):
    with raises(ConfigError, *said):
        read_operations("activation_checkpointing.save", [name])


def test_attention_that_draws_random_numbers_is_not_kept():
    # Popped instead of run, it would leave the generator behind, and a later dropout would draw another mask.
    policy = Policy(read_operations("save", ["scaled_dot_product_attention"]))
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    tensors = [torch.zeros(1, 1, 2, 2)] * 3
    assert policy(None, attention, *tensors) == CheckpointPolicy.MUST_SAVE
    assert policy(None, attention, *tensors, 0.0) == CheckpointPolicy.MUST_SAVE
    assert policy(None, attention, *tensors, 0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert policy(None, torch.ops.aten.mm.default, *tensors[:2]) == CheckpointPolicy.PREFER_RECOMPUTE
