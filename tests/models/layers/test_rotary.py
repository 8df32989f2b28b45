"""Rotary positions and their scaling: lengths stay, distances decide, and long turns are stretched."""

from __future__ import annotations

import math

import pytest
import torch
from tests.messages import raises

from trainwright.errors import ConfigError
from trainwright.models.layers.rotary import _Turn, checked_scaling, rotary_angles, rotate, scaled_periods

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rotated(heads, first, **options):
    positions = torch.arange(first, first + heads.shape[2], dtype=torch.float32)
    return rotate(heads, rotary_angles(positions, head_size=heads.shape[-1], theta=10000.0, **options))


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_rotation_keeps_lengths_and_only_distances_matter(scaling):
    queries, keys = torch.randn(2, 1, 3, 9, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotated(queries, 5).norm(dim=-1), queries.norm(dim=-1))
    near, far = (
        rotated(queries, start, scaling=scaling) @ rotated(keys, start, scaling=scaling).mT for start in (0, 40)
    )
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-4)


def test_linear_scaling_is_positions_divided():
    positions = torch.arange(0, 64, 4, dtype=torch.float32)
    linear = {"rope_type": "linear", "factor": 4.0}
    stretched = rotary_angles(positions, head_size=8, theta=100.0, scaling=linear)
    plain = rotary_angles(positions / 4, head_size=8, theta=100.0)
    for one, other in zip(stretched, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_llama3_leaves_short_turns_alone_and_stretches_long_ones():
    periods = torch.tensor([1.0, 8192 / 4 / (2 * math.pi) * 0.99, 8192 / (2 * math.pi) * 1.01, 1e6])
    scaled = scaled_periods(periods, LLAMA3)
    torch.testing.assert_close(scaled / periods, torch.tensor([1.0, 1.0, 8.0, 8.0]))
    between = scaled_periods(torch.tensor([8192 / 2 / (2 * math.pi)]), LLAMA3)
    assert 1.0 < (between / (8192 / 2 / (2 * math.pi))).item() < 8.0


def test_no_scaling_has_several_spellings():
    assert [checked_scaling(one) for one in (None, {}, {"rope_type": "default", "rope_theta": 1e4})] == [None] * 3
    assert checked_scaling({"type": "linear", "factor": 2}) == {"rope_type": "linear", "factor": 2}


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, ("dynamic", "rope_type")),
        ({"rope_type": "linear"}, ()),
        ({"rope_type": "linear", "factor": "2"}, ()),
        ({"rope_type": "linear", "factor": 2.0, "beta": 1}, ()),
        ({"rope_type": "linear", "factor": 0}, ("0",)),
        ({"rope_type": "linear", "factor": True}, ("0",)),
        ({**LLAMA3, "high_freq_factor": 1.0}, ("high_freq_factor", "1.0", "low_freq_factor")),
        ({"rope_type": "yarn", "factor": 2.0}, ("yarn", "rope_type")),
        ({"rope_type": ["linear"]}, ("linear", "rope_type")),
        ({"factor": 2.0}, ("rope_type",)),
        ("linear", ("linear", "rope_scaling")),
    ],
)
def test_scaling_that_cannot_be_done_is_rejected(scaling, message):
    with raises(ConfigError, *message):
        checked_scaling(scaling)


def test_on_a_gpu_the_rotation_is_the_same_and_its_gradient_the_rotation_back():
    heads = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    rotations = rotary_angles(torch.arange(5.0), head_size=8, theta=100.0)
    plain, turned = rotate(heads, rotations), _Turn.apply(heads, *rotations)
    torch.testing.assert_close(turned, plain)
    onto = torch.randn_like(plain)
    torch.testing.assert_close(torch.autograd.grad(turned, heads, onto), torch.autograd.grad(plain, heads, onto))
