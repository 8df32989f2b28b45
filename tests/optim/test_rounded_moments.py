"""Moments in another precision: rounding by chance keeps the mean, skips keep the bits, pieces change nothing."""

import copy

import pytest
import torch
from tests.messages import raises
from tests.optim import references
from tests.optim.references import all_equal, drive, make_gradients, make_weights, values

from trainwright.errors import ConfigError
from trainwright.optim import adamw, device_step
from trainwright.optim.adamw import AdamW
from trainwright.optim.rounding import round_to_bf16, salt_of

SHAPES = ((4, 3), (7,), (2, 3, 2))


def test_rounding_goes_to_one_of_the_two_neighbours_and_its_mean_is_right():
    exact = torch.linspace(1.0, 1.25, 64)
    rounded = []
    for step in range(1, 2049):
        result = exact.clone()
        round_to_bf16(result, salt_of(torch.tensor(float(step))))
        assert torch.equal(result, result.bfloat16().float())
        rounded.append(result)
    rounded = torch.stack(rounded)
    assert ((rounded - exact).abs() < 2**-7).all()
    assert (rounded.mean(0) - exact).abs().max() < 2**-7 / 25


def test_what_bf16_holds_stays_as_it_is():
    held = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-130, torch.inf, -torch.inf])
    for step in range(50):
        result = held.clone()
        round_to_bf16(result, salt_of(torch.tensor(float(step))))
        assert torch.equal(result.view(torch.int32), held.view(torch.int32))


def test_a_second_moment_in_bf16_decays_as_in_fp32_where_plain_rounding_would_freeze_it():
    (weight,) = make_weights((1000,))
    optimizer = AdamW([weight], state_dtype="bf16", lr=0.0)
    (first,) = make_gradients([weight], 1)
    drive(optimizer, [weight], [first, *[[torch.zeros_like(weight)]] * 300])
    expected = 0.001 * first[0].double() ** 2 * 0.999**300
    found = optimizer.state[weight]["exp_avg_sq"]
    assert found.dtype == torch.bfloat16
    assert found.double().sum().item() == pytest.approx(expected.sum().item(), rel=0.01)


def test_weights_stay_near_those_of_fp32_moments():
    weights = make_weights((30, 30))
    start, gradients = values(weights), make_gradients(weights, 50)
    drive(AdamW(weights, lr=0.01, state_dtype="bf16"), weights, gradients)
    expected = references.adamw(start[0], [step[0] for step in gradients], lr=0.01)
    moved = (expected - start[0].double()).norm()
    assert (weights[0].detach().double() - expected).norm() < 0.01 * moved


def test_fp32_moments_beside_bf16_weights_follow_the_rule():
    weights = make_weights(*SHAPES, dtype=torch.bfloat16)
    gradients = make_gradients(weights, 5)
    optimizer = AdamW(weights, lr=0.01, state_dtype="fp32")
    drive(optimizer, weights, gradients)
    assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())
    for n, weight in enumerate(weights):
        first = 0.0
        for step in gradients:
            first = 0.9 * first + 0.1 * step[n].double()
        torch.testing.assert_close(optimizer.state[weight]["exp_avg"].double(), first, rtol=1e-5, atol=1e-6)


def test_equal_dtypes_are_left_to_torch_bit_for_bit():
    weights, others = make_weights(*SHAPES), make_weights(*SHAPES)
    gradients = make_gradients(weights, 3)
    drive(AdamW(weights, state_dtype="fp32"), weights, gradients)
    drive(torch.optim.AdamW(others, fused=True), others, gradients)
    assert all_equal(weights, others)


def test_fp32_work_on_fp16_weights_equals_the_fused_kernel_where_both_are_exact():
    weights = make_weights(*SHAPES, dtype=torch.float16)
    gradients = make_gradients(weights, 1)
    expected = [references.adamw(w.detach(), [g], lr=0.01) for w, g in zip(weights, gradients[0], strict=True)]
    drive(AdamW(weights, lr=0.01, state_dtype="fp32"), weights, gradients)
    for weight, reference in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach().double(), reference, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("state_dtype", ["bf16", "fp32"])
def test_saved_state_continues_the_same_course(state_dtype):
    dtype = torch.float32 if state_dtype == "bf16" else torch.bfloat16
    straight = make_weights(*SHAPES, dtype=dtype)
    gradients = make_gradients(straight, 6)
    drive(AdamW(straight, lr=0.05, state_dtype=state_dtype), straight, gradients)
    weights = make_weights(*SHAPES, dtype=dtype)
    first = AdamW(weights, lr=0.05, state_dtype=state_dtype)
    drive(first, weights, gradients[:3])
    continued = AdamW(weights, lr=0.05, state_dtype=state_dtype)
    continued.load_state_dict(copy.deepcopy(first.state_dict()))
    drive(continued, weights, gradients[3:])
    assert all_equal(straight, weights)


def test_an_overflow_changes_neither_weights_nor_state():
    weights = make_weights(*SHAPES)
    optimizer = AdamW(weights, lr=0.1, state_dtype="bf16")
    drive(optimizer, weights, make_gradients(weights, 2))
    before, state = values(weights), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.found_inf = torch.ones(())
    drive(optimizer, weights, [[torch.full_like(weight, torch.inf) for weight in weights]])
    assert all_equal(before, weights)
    for number, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(kept[key], state[number][key]) for key in kept)


def test_stretches_of_a_large_parameter_move_as_the_whole(monkeypatch):
    whole, cut = make_weights((40, 3), (5,)), make_weights((40, 3), (5,))
    gradients = make_gradients(whole, 1)
    drive(AdamW(whole, lr=0.1, state_dtype="bf16"), whole, gradients)
    monkeypatch.setattr(adamw, "CHUNK_ELEMENTS", 16)
    drive(AdamW(cut, lr=0.1, state_dtype="bf16"), cut, gradients)
    assert all_equal(whole, cut)


def test_channels_last_weights_move_as_plain_ones():
    weights, others = make_weights((6, 4, 3, 3)), make_weights((6, 4, 3, 3))
    others[0].data = others[0].data.to(memory_format=torch.channels_last)
    gradients = make_gradients(weights, 3)
    drive(AdamW(weights, state_dtype="bf16"), weights, gradients)
    drive(AdamW(others, state_dtype="bf16"), others, gradients)
    assert all_equal(weights, others)


def test_what_has_no_gradient_is_left_alone():
    weights = make_weights(*SHAPES)
    before = values(weights)
    optimizer = AdamW(weights, lr=0.1, state_dtype="bf16")
    drive(optimizer, weights, [[None, make_gradients(weights, 1)[0][1], None], [None] * 3])
    assert all_equal([before[0], before[2]], [weights[0], weights[2]])
    assert list(optimizer.state) == [weights[1]]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"state_dtype": "fp8"}, ("fp8", "state_dtype")),
        ({"state_dtype": "bf16", "amsgrad": True}, ("state_dtype",)),
        ({"state_dtype": "bf16", "fused": False}, ()),
    ],
)
def test_impossible_settings_are_rejected(settings, problem):
    with raises(ConfigError, *problem):
        AdamW(make_weights((2,)), **settings)


def test_a_group_cannot_have_a_precision_of_its_own():
    with raises(ConfigError, "bf16", "state_dtype"):
        AdamW([{"params": make_weights((2,)), "state_dtype": "bf16"}])


def test_pieces_hold_at_most_so_many_elements_and_every_tensor_once():
    tensors = [torch.zeros(n) for n in (3, 4, 10, 1, 1, 8)]
    chunks = [tensors[chunk] for chunk in device_step.in_chunks(tensors, 8)]
    assert [[len(tensor) for tensor in chunk] for chunk in chunks] == [[3, 4], [10], [1, 1], [8]]
