"""A held step leaves everything as it is, whoever the optimizer is; one that is not held is a plain step."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from trainwright.optim.adamw import AdamW
from trainwright.optim.device_step import divides_gradients, step_unless, supports_found_inf
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon

OPTIMIZERS = {
    "adamw": lambda w: AdamW(w, lr=0.1),
    "adamw unfused": lambda w: AdamW(w, lr=0.1, fused=False),
    "adamw with moments in bf16": lambda w: AdamW(w, lr=0.1, state_dtype="bf16"),
    "lion": lambda w: Lion(w, lr=0.1, weight_decay=0.1),
    "muon": lambda w: Muon(w, lr=0.1, ns_dtype="fp32"),
    "torch's sgd": lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, weight_decay=0.1),
    "torch's fused sgd": lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "torch's fused adagrad": lambda w: torch.optim.Adagrad(w, lr=0.1, fused=True),
    "torch's fused adam": lambda w: torch.optim.Adam(w, lr=0.1, fused=True, amsgrad=True),
    "torch's rmsprop": lambda w: torch.optim.RMSprop(w, lr=0.1, momentum=0.9),
}
HOLD = {"on the device": torch.tensor(True), "known to the host": True}
GO = {"on the device": torch.tensor(False), "known to the host": False}


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3))]


def set_gradients(weights, number):
    torch.manual_seed(number)
    for weight in weights:
        weight.grad = torch.randn_like(weight)


def run(kind, steps, *, where=None, plain=False):
    """The weights after steps, each of which is 'good' or 'bad'; a plain run does not make the bad ones."""
    weights = parameters()
    optimizer = OPTIMIZERS[kind](weights)
    for number, step in enumerate(steps):
        set_gradients(weights, number)
        if step == "bad":
            for weight in weights:
                weight.grad.fill_(float("nan"))
        if not plain:
            step_unless(optimizer, (HOLD if step == "bad" else GO)[where])
        elif step == "good":
            optimizer.step()
    return weights, optimizer


@pytest.mark.parametrize("where", HOLD)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_held_step_moves_neither_weights_nor_state(kind, where):
    for begun in ([], ["good", "good"]):
        weights, optimizer = run(kind, begun, where=where)
        before, state = deepcopy(weights), deepcopy(optimizer.state_dict()["state"])
        for weight in weights:
            weight.grad = torch.full_like(weight, float("nan"))
        step_unless(optimizer, HOLD[where])
        assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))
        for number, values in state.items():
            for name, value in values.items():
                assert torch.equal(optimizer.state_dict()["state"][number][name], value), name
        assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_follows_a_held_step_is_as_if_it_had_not_been(kind):
    for steps in (["bad", "good", "good"], ["good", "bad", "bad", "good"]):
        plain, _ = run(kind, steps, plain=True)
        held, _ = run(kind, steps, where="known to the host")
        assert all(torch.equal(*pair) for pair in zip(held, plain, strict=True))
        on_device, _ = run(kind, steps, where="on the device")
        for pair in zip(on_device, plain, strict=True):
            torch.testing.assert_close(*pair)


def test_those_that_know_the_word_are_not_waited_for(monkeypatch):
    for kind, make in OPTIMIZERS.items():
        weights = parameters()
        optimizer = make(weights)
        is_known = supports_found_inf(optimizer)
        if kind != "torch's fused adagrad":  # which torch 2.11 does not let skip on the device, and 2.13 does
            assert is_known == (kind not in ("adamw unfused", "torch's sgd", "torch's rmsprop"))
        for number in range(2 if is_known else 0):
            set_gradients(weights, number)
            with monkeypatch.context() as patch:
                if number:  # the first step of SGD cannot be held on the device: its momentum is not there yet
                    patch.setattr(torch.Tensor, "item", None)
                step_unless(optimizer, torch.tensor(False))


DIVIDERS = {
    "adamw": lambda w: AdamW(w, lr=0.1),
    "adamw with moments in bf16": lambda w: AdamW(w, lr=0.1, state_dtype="bf16"),
    "torch's fused adam": lambda w: torch.optim.Adam(w, lr=0.1, fused=True),
    "torch's fused adamw": lambda w: torch.optim.AdamW(w, lr=0.1, fused=True),
}


@pytest.mark.parametrize("kind", DIVIDERS)
def test_a_divided_step_is_that_of_gradients_divided_before(kind):
    ways = []
    for divides in (False, True):
        weights = parameters()
        optimizer = DIVIDERS[kind](weights)
        assert divides_gradients(optimizer)
        for number in range(3):
            set_gradients(weights, number)
            scale = torch.tensor(3.0 + number)
            if not divides:
                for weight in weights:
                    weight.grad.div_(scale)
            step_unless(optimizer, torch.tensor(number == 1), grad_scale=scale if divides else None)
        assert not hasattr(optimizer, "grad_scale")
        ways.append(weights)
    for pair in zip(*ways, strict=True):
        torch.testing.assert_close(*pair)


def test_whoever_may_look_at_gradients_gets_them_clipped_before():
    class Own(AdamW):
        """May read the gradients in a step of its own."""

    assert not divides_gradients(Own(parameters(), lr=0.1))
    assert not divides_gradients(AdamW(parameters(), lr=0.1, fused=False))
    assert not divides_gradients(Muon(parameters(), lr=0.1))
    hooked = AdamW(parameters(), lr=0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    assert not divides_gradients(hooked)
