"""Recorded steps: rates as tensors, nothing read on the host, equal bits to plain numbers, plain numbers when saved."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.optim.references import all_equal, make_gradients, make_weights, values
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright.optim.adamw import AdamW
from trainwright.optim.device_step import can_be_captured, prepare_for_capture, set_learning_rate
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon

CPU = torch.device("cpu")
SHAPES = ((6, 4), (4, 6), (5,))
RATES = (3e-3, 1.7e-3, 1e-3 / 3, 0.0, 2e-3)


def in_bf16(weights):
    for weight in weights:
        weight.data = weight.data.bfloat16()
    return weights


MAKERS = {
    "adamw": lambda weights: AdamW(weights, lr=0.01, weight_decay=0.1),
    "adamw, bf16 moments": lambda weights: AdamW(weights, lr=0.01, state_dtype="bf16"),
    "adamw, repaired": lambda weights: AdamW(weights, lr=0.01, repair_nan=True, report=True),
    "adamw, masters": lambda weights: AdamW(in_bf16(weights), lr=0.01, master_weights=True),
    "lion": lambda weights: Lion(weights, lr=0.01, weight_decay=0.1, report=True),
    "lion, masters": lambda weights: Lion(in_bf16(weights), lr=0.01, master_weights=True),
    "muon": lambda weights: Muon(weights, lr=0.01, ns_dtype="fp32"),
    "muon, masters": lambda weights: Muon(in_bf16(weights), lr=0.01, ns_dtype="fp32", master_weights=True),
    "torch's adam": lambda weights: torch.optim.Adam(weights, lr=0.01, fused=True),
    "torch's sgd": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9, nesterov=True, fused=True),
}


class Recording(TorchDispatchMode):
    """Notes every operation on tensors; one that a number came out of cannot be repeated."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        self.calls.append((function, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        """Does everything again, in the tensors of the first time."""
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def write_gradients(weights, gradients):
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad.copy_(gradient)


def step_with_numbers(optimizer, weights, gradients, rates):
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    for own, rate in zip(gradients, rates, strict=True):
        write_gradients(weights, own)
        for group in optimizer.param_groups:
            set_learning_rate(group, rate)
        optimizer.step()
    return values(weights)


def step_by_replay(optimizer, weights, gradients, rates, *, skipped=()):
    """Steps once, records the second step and replays it for the others."""
    found_inf = torch.zeros(())
    optimizer.found_inf = found_inf
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    recording = Recording()
    for number, (own, rate) in enumerate(zip(gradients, rates, strict=True)):
        write_gradients(weights, own)
        found_inf.fill_(float(number in skipped))
        for group in optimizer.param_groups:
            set_learning_rate(group, rate)
        if number == 0:
            optimizer.step()
        elif number == 1:
            with recording:
                optimizer.step()
        else:
            recording.replay()
    return values(weights)


@pytest.mark.parametrize("name", MAKERS)
def test_a_replayed_step_has_the_bits_of_one_with_plain_numbers(name):
    plain, replayed = make_weights(*SHAPES), make_weights(*SHAPES)
    gradients = make_gradients(plain, steps=len(RATES))
    expected = step_with_numbers(MAKERS[name](plain), plain, gradients, RATES)
    optimizer = MAKERS[name](replayed)
    assert prepare_for_capture(optimizer, CPU)
    assert all_equal(step_by_replay(optimizer, replayed, gradients, RATES), expected)


@pytest.mark.parametrize("name", [name for name in MAKERS if "repaired" not in name])
def test_a_replayed_step_is_held_back_by_a_word_on_the_device(name):
    plain, replayed = make_weights(*SHAPES), make_weights(*SHAPES)
    gradients = make_gradients(plain, steps=len(RATES))
    kept = [number for number in range(len(RATES)) if number != 2]
    expected = step_with_numbers(
        MAKERS[name](plain), plain, [gradients[number] for number in kept], [RATES[number] for number in kept]
    )
    for gradient in gradients[2]:
        gradient.fill_(float("nan"))
    optimizer = MAKERS[name](replayed)
    prepare_for_capture(optimizer, CPU)
    assert all_equal(step_by_replay(optimizer, replayed, gradients, RATES, skipped={2}), expected)


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_saved_are_plain_numbers_as_without_capture(name):
    plain, captured = make_weights(*SHAPES), make_weights(*SHAPES)
    first, second = MAKERS[name](plain), MAKERS[name](captured)
    prepare_for_capture(second, CPU)
    gradients = make_gradients(plain, steps=2)
    step_with_numbers(first, plain, gradients, RATES[:2])
    step_with_numbers(second, captured, gradients, RATES[:2])
    assert second.state_dict()["param_groups"] == first.state_dict()["param_groups"]
    assert all(type(group["lr"]) is float for group in second.state_dict()["param_groups"])


def test_loading_fills_the_same_tensors():
    weights = make_weights(*SHAPES)
    optimizer = AdamW([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}], lr=0.25)
    prepare_for_capture(optimizer, CPU)
    rates = [group["lr"] for group in optimizer.param_groups]
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.125
    optimizer.load_state_dict(saved)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
    assert [float(rate) for rate in rates] == [0.125, 0.5]


def test_a_second_preparation_changes_nothing():
    optimizer = AdamW(make_weights(*SHAPES))
    prepare_for_capture(optimizer, CPU)
    rate = optimizer.param_groups[0]["lr"]
    assert prepare_for_capture(optimizer, CPU)
    assert optimizer.param_groups[0]["lr"] is rate
    assert len(optimizer._optimizer_state_dict_post_hooks) == 1


class OwnRule(torch.optim.SGD):
    """A user's optimizer, of which nobody knows what its step reads."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: AdamW(weights, lr=0.5, fused=False),
        lambda weights: torch.optim.SGD(weights, lr=0.5),
        lambda weights: torch.optim.Adafactor(weights, lr=0.5),
        lambda weights: OwnRule(weights, lr=0.5, fused=True),
    ],
    ids=["a loop over tensors", "no fused form asked for", "no fused form known", "a user's"],
)
def test_what_cannot_be_captured_is_left_as_it_was(make):
    optimizer = make(make_weights(*SHAPES))
    assert not prepare_for_capture(optimizer, CPU)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


def test_parameters_elsewhere_cannot_be_captured():
    assert not can_be_captured(AdamW(make_weights(*SHAPES)), torch.device("meta"))
