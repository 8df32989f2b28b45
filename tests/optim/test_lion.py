"""Lion: the rule of its paper, on lists of tensors, without a look from the host."""

import copy

import pytest
import torch
from tests.messages import raises
from tests.optim import references
from tests.optim.references import all_equal, drive, make_gradients, make_weights, values

from trainwright.errors import ConfigError
from trainwright.optim.lion import Lion

SHAPES = ((4, 3), (5,), (2, 3, 2))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_updates_are_those_of_the_rule(weight_decay):
    weights = make_weights(*SHAPES)
    gradients = make_gradients(weights, 6)
    expected = [
        references.lion(weight.detach(), each, lr=0.02, weight_decay=weight_decay)
        for weight, each in zip(weights, zip(*gradients, strict=True), strict=True)
    ]
    drive(Lion(weights, lr=0.02, weight_decay=weight_decay), weights, gradients)
    for weight, reference in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach().double(), reference, rtol=1e-5, atol=1e-6)


def test_a_rate_on_the_device_gives_the_same_course():
    weights, others = make_weights(*SHAPES), make_weights(*SHAPES)
    gradients = make_gradients(weights, 4)
    drive(Lion(weights, lr=0.02, weight_decay=0.1), weights, gradients)
    drive(Lion(others, lr=torch.tensor(0.02), weight_decay=0.1), others, gradients)
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_state_continues_the_same_course(dtype):
    straight = make_weights(*SHAPES, dtype=dtype)
    gradients = make_gradients(straight, 6)
    drive(Lion(straight, lr=0.02), straight, gradients)
    weights = make_weights(*SHAPES, dtype=dtype)
    first = Lion(weights, lr=0.02)
    drive(first, weights, gradients[:3])
    continued = Lion(weights, lr=0.02)
    continued.load_state_dict(copy.deepcopy(first.state_dict()))
    drive(continued, weights, gradients[3:])
    assert all_equal(straight, weights)


def test_what_has_no_gradient_is_left_alone_state_and_all():
    weights = make_weights(*SHAPES)
    before = values(weights)
    optimizer = Lion(weights, lr=0.1, weight_decay=0.5)
    (gradients,) = make_gradients(weights, 1)
    drive(optimizer, weights, [[gradients[0], None, None]])
    assert all_equal(before[1:], weights[1:])
    assert list(optimizer.state) == [weights[0]]


def test_an_overflow_changes_neither_weights_nor_state():
    weights = make_weights(*SHAPES)
    optimizer = Lion(weights, lr=0.1, weight_decay=0.5)
    drive(optimizer, weights, make_gradients(weights, 2))
    before, state = values(weights), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.found_inf = torch.ones(())
    drive(optimizer, weights, [[torch.full_like(weight, torch.nan) for weight in weights]])
    assert all_equal(before, weights)
    assert all(torch.equal(state[n]["momentum"], optimizer.state[w]["momentum"]) for n, w in enumerate(weights))


def test_gradients_are_unscaled_as_torchs_scaler_asks():
    weights, others = make_weights(*SHAPES), make_weights(*SHAPES)
    gradients = make_gradients(weights, 3)
    drive(Lion(weights, lr=0.02), weights, gradients)
    optimizer = Lion(others, lr=0.02)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.zeros(())
    drive(optimizer, others, [[gradient * 64.0 for gradient in step] for step in gradients])
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other)


def test_update_norm_is_returned_only_when_asked():
    weights = make_weights(*SHAPES)
    gradients = make_gradients(weights, 1)
    assert drive(Lion(weights), weights, gradients) == {}
    before = values(weights)
    norm = drive(Lion(weights, lr=0.1, report=True), weights, gradients)["update_norm"]
    moved = torch.cat([(old - new).flatten() for old, new in zip(before, values(weights), strict=True)])
    torch.testing.assert_close(norm, moved.norm())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lr": -1.0}, ("-1.0",)),
        ({"betas": [0.9, 1.0]}, ()),
        ({"weight_decay": -0.1}, ("weight_decay",)),
    ],
)
def test_impossible_settings_are_rejected(settings, problem):
    with raises(ConfigError, *problem):
        Lion(make_weights((2,)), **settings)
