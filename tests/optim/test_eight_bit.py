"""AdamW with moments in 8 bits: near fp32, the same bits after a resume, in chunks and for any layout."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.messages import raises
from tests.optim.references import all_equal, drive, make_gradients, make_weights, values
from tests.optim.replayed_gradients import PROBLEMS, SETTINGS, replayed_error

from trainwright.errors import ConfigError
from trainwright.optim import eight_bit
from trainwright.optim.adamw import AdamW
from trainwright.optim.device_step import prepare_for_capture, set_learning_rate
from trainwright.optim.eight_bit import decode_first, decode_second, encode_first, encode_second
from trainwright.optim.rounding import salt_of

SHAPES = ((24, 300), (16, 512), (7,), (20, 3, 100))
"""Rows that end within a block, rows of whole blocks, a vector that stays in fp32, three dims."""
TORCHAO_ERRORS = {"language model": 0.0348, "quadratic": 0.0531}
"""Of torchao 0.18's AdamW8bit: what tests/optim/replayed_gradients.py prints."""
ROUNDINGS = {
    "fp32 weights": (torch.float32, False),
    "bf16 weights": (torch.bfloat16, False),
    "masters": (torch.bfloat16, True),
    "stochastic": (torch.bfloat16, "stochastic"),
}
every_rounding = pytest.mark.parametrize(("dtype", "master_weights"), ROUNDINGS.values(), ids=ROUNDINGS)


def make(weights, **more):
    return AdamW(weights, lr=0.01, weight_decay=0.1, state="8bit", **more)


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for number, kept in one.items():
        assert kept.keys() == other[number].keys()
        assert all(torch.equal(kept[key], other[number][key]) for key in kept), number


def block_of(values):
    return torch.nn.functional.pad(torch.tensor(values), (0, 256 - len(values))).view(1, 1, 256)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_error_is_not_larger_than_that_of_torchao(problem):
    error = replayed_error(problem, lambda weights: AdamW(weights, state="8bit", **SETTINGS))
    assert error < TORCHAO_ERRORS[problem]


@pytest.mark.slow
@pytest.mark.skipif(not (Path(sys.prefix) / "integrations" / "torchao").is_dir(), reason="torchao is not installed")
def test_the_recorded_errors_are_those_of_torchao():
    paths = [str(Path(sys.prefix) / "integrations"), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "tests.optim.replayed_gradients"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    printed = [line.rpartition(" ") for line in done.stdout.splitlines()]
    found = {name: float(error) for name, _, error in printed if name in PROBLEMS}
    assert found == {name: pytest.approx(error, rel=0.05) for name, error in TORCHAO_ERRORS.items()}


def test_a_first_moment_is_coded_within_half_a_code():
    exact = torch.randn(40, 3, 256, generator=torch.Generator().manual_seed(0))
    codes, scales = encode_first(exact.clone())
    assert (codes.dtype, codes.abs().amax().item()) == (torch.int8, 127)
    roots = (exact.abs() / scales.unsqueeze(-1)).sqrt() * 127
    assert (codes.abs() - roots).abs().max() <= 0.501
    decoded = decode_first(codes, scales)
    assert (decoded.sign() * exact.sign() >= 0).all()
    assert torch.equal(decoded.abs().amax(-1), scales)  # the largest element is exact
    again, same_scales = encode_first(decoded.clone())
    assert torch.equal(again, codes)
    assert torch.equal(same_scales, scales)


def test_a_second_moment_is_coded_by_one_of_two_neighbours_and_its_mean_is_right():
    exact = block_of([1.0, 0.5, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6])
    total, num_steps = torch.zeros(8), 1024
    for step in range(num_steps):
        codes, scales = encode_second(exact, salt_of(torch.tensor(float(step))))
        total += decode_second(codes, scales).flatten()[:8]
    found, expected = total / num_steps, exact.flatten()[:8]
    # The distance of two codes is 1.6 % at 1 and 52 % at 1e-6; the mean of 1,024 is 32 times as exact.
    torch.testing.assert_close(found, expected, rtol=0.04, atol=0)
    assert found[0] == 1.0


def test_zeros_stay_zeros_and_positive_second_moments_stay_positive():
    exact = block_of([1.0, 1e-20, 0.0])
    for step in range(20):
        codes, scales = encode_second(exact, salt_of(torch.tensor(float(step))))
        assert codes.flatten()[1:4].tolist() == [1, 0, 0]
    codes, scales = encode_first(block_of([0.0]))
    assert not codes.any()
    assert not decode_first(codes, scales).any()


@pytest.mark.parametrize("size", [1e-36, 1e-30, 1e-20, 1e20, 1e38])
def test_moments_of_any_size_are_coded_alike(size):
    exact = block_of([1.0, 0.5, 0.1, 0.01]) * size
    for encode, decode in ((encode_first, decode_first), (lambda each: encode_second(each, None), decode_second)):
        found = decode(*encode(exact.clone()))
        torch.testing.assert_close(found / size, exact / size, rtol=0.1, atol=1e-6)


def test_a_second_moment_without_gradients_decays_as_in_fp32():
    (weight,) = make_weights((40, 256))
    optimizer = AdamW([weight], state="8bit", lr=0.0)
    (first,) = make_gradients([weight], 1)
    constant, start = torch.zeros_like(weight), first[0].clone()
    constant[:, 0] = start[:, 0] = 3.0  # the first column alone determines the scale of each block, which grows
    drive(optimizer, [weight], [[start], *[[constant]] * 200])
    state = optimizer.state[weight]
    found = decode_second(state["exp_avg_sq"].view(40, 1, 256), state["exp_avg_sq_scale"])[:, 0, 1:].double().sum()
    expected = (0.001 * first[0][:, 1:].double() ** 2 * 0.999**200).sum()
    assert found.item() == pytest.approx(expected.item(), rel=0.05)


def test_the_state_has_two_bytes_per_element_and_small_parameters_keep_fp32():
    weights = make_weights(*SHAPES, (2000, 3), dtype=torch.bfloat16)
    optimizer = make(weights)
    drive(optimizer, weights, make_gradients(weights, 1))
    dtypes = [[optimizer.state[each][key].dtype for key in ("exp_avg", "exp_avg_sq")] for each in weights]
    coded, plain = [torch.int8, torch.uint8], [torch.float32, torch.float32]
    assert dtypes == [coded, coded, plain, coded, plain]
    assert optimizer.state[weights[0]]["exp_avg_scale"].shape == (24, 2)
    assert optimizer.state[weights[3]]["exp_avg_sq_scale"].shape == (20, 2)
    size = sum(value.numel() * value.element_size() for value in optimizer.state[weights[1]].values())
    assert size == 16 * 512 * 2 + 2 * 16 * 2 * 4 + 4


@every_rounding
def test_saved_state_continues_the_same_course(dtype, master_weights):
    straight, weights = make_weights(*SHAPES, dtype=dtype), make_weights(*SHAPES, dtype=dtype)
    gradients = make_gradients(straight, 6)
    whole = make(straight, master_weights=master_weights)
    drive(whole, straight, gradients)
    first = make(weights, master_weights=master_weights)
    drive(first, weights, gradients[:3])
    continued = make(weights, master_weights=master_weights)
    continued.load_state_dict(state := copy.deepcopy(first.state_dict()))
    drive(continued, weights, gradients[3:])
    assert all_equal(straight, weights)
    assert_same_state(state_of(whole), state_of(continued))
    assert state["state"][0]["exp_avg"].dtype == torch.int8


@every_rounding
def test_a_skipped_update_changes_neither_weights_nor_state(dtype, master_weights):
    weights = make_weights(*SHAPES, dtype=dtype)
    optimizer = make(weights, master_weights=master_weights)
    drive(optimizer, weights, make_gradients(weights, 2))
    before, state = values(weights), state_of(optimizer)
    optimizer.found_inf = torch.ones(())
    drive(optimizer, weights, [[torch.full_like(weight, torch.nan) for weight in weights]])
    assert all_equal(before, weights)
    assert_same_state(state, state_of(optimizer))
    optimizer.found_inf = torch.zeros(())
    drive(optimizer, weights, make_gradients(weights, 1))
    assert not any(torch.equal(one, other) for one, other in zip(before, weights, strict=True))


def test_a_first_update_that_is_skipped_leaves_zeros():
    weights = make_weights(*SHAPES)
    before = values(weights)
    optimizer = make(weights)
    optimizer.found_inf = torch.ones(())
    drive(optimizer, weights, [[torch.full_like(weight, torch.inf) for weight in weights]])
    assert all_equal(before, weights)
    assert not any(value.any() for state in state_of(optimizer).values() for value in state.values())


def test_gradients_are_divided_by_the_scale_of_the_loss():
    weights, others = make_weights(*SHAPES), make_weights(*SHAPES)
    gradients = make_gradients(weights, 3)
    optimizer = make(weights)
    optimizer.grad_scale = torch.tensor(4.0)
    drive(optimizer, weights, [[4.0 * each for each in step] for step in gradients])
    other = make(others)
    drive(other, others, gradients)
    assert all_equal(weights, others)
    assert_same_state(state_of(optimizer), state_of(other))


def test_settings_of_groups_apply():
    weights, others = make_weights((16, 512), (16, 512)), make_weights((16, 512), (16, 512))
    gradients = make_gradients(weights, 2)
    groups = [{"params": weights[:1], "lr": 0.0}, {"params": weights[1:], "weight_decay": 0.0}]
    before = values(weights)
    drive(make(groups), weights, gradients)
    drive(AdamW(others, lr=0.01, weight_decay=0.0, state="8bit"), others, gradients)
    assert torch.equal(weights[0], before[0])
    assert torch.equal(weights[1], others[1])


def test_masters_move_as_weights_in_fp32_and_the_weights_are_them_rounded():
    weights = make_weights(*SHAPES, dtype=torch.bfloat16)
    whole = [torch.nn.Parameter(each.detach().float()) for each in weights]
    gradients = make_gradients(weights, 4)
    optimizer = make(weights, master_weights=True)
    drive(optimizer, weights, gradients)
    drive(make(whole), whole, [[each.float() for each in step] for step in gradients])
    assert all_equal([optimizer.state[each]["master"] for each in weights], whole)
    assert all_equal(weights, [each.bfloat16() for each in whole])


@every_rounding
def test_chunks_of_a_large_parameter_move_as_the_whole(monkeypatch, dtype, master_weights):
    whole, cut = make_weights((40, 300), dtype=dtype), make_weights((40, 300), dtype=dtype)
    gradients = make_gradients(whole, 2)
    drive(make(whole, master_weights=master_weights), whole, gradients)
    monkeypatch.setattr(eight_bit, "CHUNK_ELEMENTS", 1000)
    drive(make(cut, master_weights=master_weights), cut, gradients)
    assert all_equal(whole, cut)


@every_rounding
def test_channels_last_weights_move_as_plain_ones(dtype, master_weights):
    weights, others = (make_weights((16, 40, 3, 3), dtype=dtype) for _ in range(2))
    others[0].data = others[0].data.to(memory_format=torch.channels_last)
    gradients = make_gradients(weights, 3)
    drive(make(weights, master_weights=master_weights), weights, gradients)
    drive(make(others, master_weights=master_weights), others, gradients)
    assert all_equal(weights, others)


def test_a_rate_on_the_device_is_read_in_every_step():
    weights, others = make_weights(*SHAPES), make_weights(*SHAPES)
    gradients = make_gradients(weights, 3)
    prepared, plain = make(weights), make(others)
    assert prepare_for_capture(prepared, torch.device("cpu"))
    for step, rate in zip(gradients, (1e-2, 3e-3, 0.0), strict=True):
        for optimizer, mine in ((prepared, weights), (plain, others)):
            set_learning_rate(optimizer.param_groups[0], rate)
            drive(optimizer, mine, [step])
    assert all_equal(weights, others)


def test_repaired_gradients_and_reports_work_as_with_fp32_moments():
    weights = make_weights((16, 512), (7,))
    gradients = make_gradients(weights, 1)
    gradients[0][0][3, 5] = torch.nan
    before = values(weights)
    metrics = drive(make(weights, repair_nan=True, report=True), weights, gradients)
    moved = sum((one - other).square().sum() for one, other in zip(before, values(weights), strict=True)).sqrt()
    assert metrics["nan_gradients"] == 1
    torch.testing.assert_close(metrics["update_norm"], moved)


def test_nan_in_a_gradient_is_seen_in_the_weight():
    for dtype, master_weights in ROUNDINGS.values():
        weights = make_weights((16, 512), dtype=dtype)
        gradients = make_gradients(weights, 1)
        gradients[0][0][3, 5] = torch.nan
        drive(make(weights, master_weights=master_weights), weights, gradients)
        assert weights[0].isnan().sum() == 1


def keep_settings(optimizer, state_dict):
    return {**copy.deepcopy(state_dict), "param_groups": optimizer.state_dict()["param_groups"]}


def test_state_of_a_run_with_other_settings_is_converted():
    weights = make_weights(*SHAPES)
    gradients = make_gradients(weights, 1)
    exact = AdamW(weights, lr=0.0)
    drive(exact, weights, gradients)
    coded = AdamW(weights, lr=0.0, state="8bit")
    coded.load_state_dict(keep_settings(coded, exact.state_dict()))
    drive(coded, weights, [[torch.zeros_like(each) for each in weights]])
    assert coded.state[weights[0]]["exp_avg"].dtype == torch.int8
    back = AdamW(weights, lr=0.0)
    back.load_state_dict(keep_settings(back, coded.state_dict()))
    drive(back, weights, [[torch.zeros_like(each) for each in weights]])
    for weight, gradient in zip(weights, gradients[0], strict=True):
        state = back.state[weight]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].dtype == torch.float32
        expected = 0.1 * gradient * 0.9**2
        assert (state["exp_avg"] - expected).norm() < 0.02 * expected.norm()


def test_what_has_no_gradient_is_left_alone():
    weights = make_weights(*SHAPES)
    before = values(weights)
    optimizer = make(weights)
    gradients = make_gradients(weights, 1)[0]
    drive(optimizer, weights, [[None, gradients[1], None, None], [None] * 4])
    assert all_equal([before[0], *before[2:]], [weights[0], *weights[2:]])
    assert list(optimizer.state) == [weights[1]]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"state": "4bit"}, ("4bit", "state")),
        ({"state": "8bit", "state_dtype": "bf16"}, ("state_dtype",)),
        ({"state": "8bit", "amsgrad": True}, ("amsgrad",)),
        ({"state": "8bit", "fused": False}, ("state",)),
    ],
)
def test_impossible_settings_are_rejected(settings, problem):
    with raises(ConfigError, *problem):
        AdamW(make_weights((64, 64)), **settings)


def test_state_without_a_parameter_that_it_applies_to_is_rejected():
    with raises(ConfigError, "state", "4,096"):
        make(make_weights((64, 8), (5000,)))


def test_a_group_cannot_have_a_state_of_its_own():
    with raises(ConfigError, "8bit", "state"):
        AdamW([{"params": make_weights((64, 64)), "state": "8bit"}])
