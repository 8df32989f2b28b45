"""Weights in 16 bits with masters: the masters move as fp32 weights would, and the weights are these, rounded."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.messages import raises
from tests.optim.references import all_equal, drive, make_gradients, make_weights, values

from trainwright.errors import ConfigError
from trainwright.optim import adamw
from trainwright.optim.adamw import AdamW
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon

SHAPES = ((6, 4), (4, 6), (7,), (2, 3, 2))
MAKERS = {
    "adamw": lambda weights, **more: AdamW(weights, lr=0.01, weight_decay=0.1, **more),
    "lion": lambda weights, **more: Lion(weights, lr=0.003, weight_decay=0.1, **more),
    "muon": lambda weights, **more: Muon(weights, lr=0.02, ns_dtype="fp32", **more),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def narrow_weights(*shapes, dtype=torch.bfloat16):
    return make_weights(*(shapes or SHAPES), dtype=dtype)


def in_fp32(tensors):
    return [torch.nn.Parameter(each.detach().float()) for each in tensors]


def masters(optimizer, weights):
    return [optimizer.state[weight]["master"] for weight in weights]


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_move_as_weights_in_fp32_and_the_weights_are_them_rounded(make, dtype):
    weights = narrow_weights(dtype=dtype)
    whole = in_fp32(weights)
    gradients = make_gradients(weights, 5)
    optimizer = make(weights, master_weights=True)
    drive(optimizer, weights, gradients)
    drive(make(whole), whole, [[each.float() for each in step] for step in gradients])
    assert all_equal(masters(optimizer, weights), whole)
    assert all_equal(weights, [each.to(dtype) for each in whole])
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    assert {value.dtype for value in state} == {torch.float32}


@every_optimizer
def test_updates_too_small_for_bf16_add_up(make):
    (weight,) = (torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)) for _ in range(1))
    optimizer = make([weight], master_weights=True)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 1e-4, 0.0
    drive(optimizer, [weight], [[torch.eye(8).bfloat16()]] * 100)
    assert (weight.diagonal() < 1).all()  # one alone would be rounded away: bf16 has nothing between 1 and 0.996


@every_optimizer
def test_saved_state_continues_the_same_course(make):
    straight, weights = narrow_weights(), narrow_weights()
    gradients = make_gradients(straight, 6)
    expected = make(straight, master_weights=True)
    drive(expected, straight, gradients)
    first = make(weights, master_weights=True)
    drive(first, weights, gradients[:3])
    continued = make(weights, master_weights=True)
    continued.load_state_dict(copy.deepcopy(first.state_dict()))
    drive(continued, weights, gradients[3:])
    assert all_equal(straight, weights)
    assert all_equal(masters(expected, straight), masters(continued, weights))


@every_optimizer
def test_an_update_that_is_held_back_changes_neither_weights_nor_state(make):
    weights = narrow_weights()
    optimizer = make(weights, master_weights=True)
    drive(optimizer, weights, make_gradients(weights, 2))
    before, state = values(weights), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.found_inf = torch.ones(())
    drive(optimizer, weights, [[torch.full_like(weight, torch.nan) for weight in weights]])
    assert all_equal(before, weights)
    for number, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(kept[key], state[number][key]) for key in kept)


@every_optimizer
def test_a_first_update_that_is_held_back_leaves_masters_of_the_weights(make):
    weights = narrow_weights()
    before = values(weights)
    optimizer = make(weights, master_weights=True)
    optimizer.found_inf = torch.ones(())
    drive(optimizer, weights, [[torch.full_like(weight, torch.inf) for weight in weights]])
    assert all_equal(before, weights)
    assert all_equal(masters(optimizer, weights), [each.float() for each in before])


@every_optimizer
def test_weights_in_fp32_beside_them_have_no_master_and_move_as_ever(make):
    weights = [*narrow_weights((6, 4)), *make_weights((5,), (4, 6), seed=3)]
    alone = in_fp32(weights[1:])
    gradients = make_gradients(weights, 4)
    optimizer = make(weights, master_weights=True)
    drive(optimizer, weights, gradients)
    drive(make(alone), alone, [step[1:] for step in gradients])
    assert all_equal(weights[1:], alone)
    assert ["master" in optimizer.state[weight] for weight in weights] == [True, False, False]


def test_moments_in_bf16_beside_masters_are_as_with_weights_in_fp32():
    weights = narrow_weights()
    whole = in_fp32(weights)
    gradients = make_gradients(weights, 4)
    optimizer = AdamW(weights, lr=0.01, master_weights=True, state_dtype="bf16")
    drive(optimizer, weights, gradients)
    drive(AdamW(whole, lr=0.01, state_dtype="bf16"), whole, [[each.float() for each in step] for step in gradients])
    assert all_equal(masters(optimizer, weights), whole)


def test_stretches_of_a_large_weight_move_as_the_whole(monkeypatch):
    whole, cut = narrow_weights((40, 3), (5,)), narrow_weights((40, 3), (5,))
    gradients = make_gradients(whole, 2)
    drive(AdamW(whole, lr=0.1, master_weights=True), whole, gradients)
    monkeypatch.setattr(adamw, "CHUNK_ELEMENTS", 16)
    drive(AdamW(cut, lr=0.1, master_weights=True), cut, gradients)
    assert all_equal(whole, cut)


def test_channels_last_weights_move_as_plain_ones():
    weights, others = narrow_weights((6, 4, 3, 3)), narrow_weights((6, 4, 3, 3))
    others[0].data = others[0].data.to(memory_format=torch.channels_last)
    gradients = make_gradients(weights, 3)
    drive(AdamW(weights, master_weights=True), weights, gradients)
    drive(AdamW(others, master_weights=True), others, gradients)
    assert all_equal(weights, others)


def keep_settings(optimizer, state_dict):
    """Loads the state of another run, as one does that begins with it: the settings stay the run's own."""
    return {**copy.deepcopy(state_dict), "param_groups": optimizer.state_dict()["param_groups"]}


@every_optimizer
def test_state_of_a_run_with_other_settings_is_fitted_and_no_old_master_comes_back(make):
    weights = narrow_weights()
    gradients = make_gradients(weights, 3)
    first = make(weights, master_weights=True)
    drive(first, weights, gradients[:1])
    second = make(weights)
    second.load_state_dict(keep_settings(second, first.state_dict()))
    drive(second, weights, gradients[1:2])
    assert not any("master" in state for state in second.state.values())
    between = values(weights)
    third = make(weights, master_weights=True)
    third.load_state_dict(keep_settings(third, second.state_dict()))
    for group in third.param_groups:
        group["lr"] = 0.0
    drive(third, weights, gradients[2:])
    assert all_equal(weights, between)
    assert {value.dtype for state in third.state.values() for value in state.values()} == {torch.float32}


@every_optimizer
def test_masters_without_weights_in_16_bits_are_rejected(make):
    with raises(ConfigError, "16", "model.dtype"):
        make(make_weights((3, 3)), master_weights=True)


@pytest.mark.parametrize(("settings", "problem"), [({"amsgrad": True}, ("master_weights",)), ({"fused": False}, ())])
def test_impossible_settings_are_rejected(settings, problem):
    with raises(ConfigError, *problem):
        AdamW(narrow_weights((2,)), master_weights=True, **settings)


def test_a_group_of_adamw_cannot_have_masters_of_its_own():
    with raises(ConfigError, "master_weights"):
        AdamW([{"params": narrow_weights((2,)), "master_weights": True}])
