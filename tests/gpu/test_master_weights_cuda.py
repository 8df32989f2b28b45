"""Optimizers on a GPU: masters as weights in fp32, no waits, and steps that are recorded as CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from tests.optim.references import all_equal, drive, make_gradients, make_weights, values

from trainwright.optim import adamw
from trainwright.optim.adamw import AdamW
from trainwright.optim.device_step import prepare_for_capture, set_learning_rate
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda", 0)
SHAPES = ((64, 48), (48, 64), (33,), (5, 7, 2))
RATES = (3e-3, 1.7e-3, 1e-3 / 3, 0.0, 2e-3, 1e-3)
OURS = {
    "adamw": lambda weights, **more: AdamW(weights, lr=0.01, weight_decay=0.1, **more),
    "lion": lambda weights, **more: Lion(weights, lr=0.003, weight_decay=0.1, **more),
    "muon": lambda weights, **more: Muon(weights, lr=0.02, ns_dtype="fp32", **more),
}


def on_device(tensors, dtype=torch.float32):
    return [torch.nn.Parameter(each.detach().to(DEVICE, dtype)) for each in tensors]


def gradients_for(weights, steps):
    return [[each.to(DEVICE) for each in step] for step in make_gradients(make_weights(*SHAPES), steps)]


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_masters_move_as_weights_in_fp32(make):
    weights = on_device(make_weights(*SHAPES), torch.bfloat16)
    whole = on_device(weights)
    gradients = [[each.bfloat16() for each in step] for step in gradients_for(weights, 5)]
    optimizer = make(weights, master_weights=True)
    drive(optimizer, weights, gradients)
    drive(make(whole), whole, [[each.float() for each in step] for step in gradients])
    for weight, expected in zip(weights, whole, strict=True):
        torch.testing.assert_close(optimizer.state[weight]["master"], expected.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(weight, optimizer.state[weight]["master"].bfloat16())


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_no_step_with_masters_waits_for_the_device(make):
    weights = on_device(make_weights(*SHAPES), torch.bfloat16)
    optimizer = make(weights, master_weights=True)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.found_inf = torch.zeros((), device=DEVICE)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode(0)


def test_a_step_without_triton_needs_little_memory_in_addition_to_its_state(monkeypatch):
    monkeypatch.setattr(adamw, "has_triton", lambda: False)
    weight = torch.nn.Parameter(torch.zeros(2**28, dtype=torch.bfloat16, device=DEVICE))
    optimizer = AdamW([weight], master_weights=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    optimizer.step()
    # A gradient in fp32 would have 1 GiB; 2²⁵ elements of it are in memory at a time.
    assert torch.cuda.max_memory_allocated(DEVICE) - before < 300 * 2**20


RECORDED = {
    **OURS,
    "adamw, bf16 moments": lambda weights: AdamW(weights, lr=0.01, state_dtype="bf16"),
    "adamw, foreach": lambda weights: AdamW(weights, lr=0.01, fused=False),
    "adamw, repaired": lambda weights: AdamW(weights, lr=0.01, repair_nan=True, report=True),
    "adamw, masters": lambda weights: AdamW(weights, lr=0.01, master_weights=True),
    "lion, masters": lambda weights: Lion(weights, lr=0.01, master_weights=True),
    "muon, masters": lambda weights: Muon(weights, lr=0.01, ns_dtype="fp32", master_weights=True),
    "torch's adam": lambda weights: torch.optim.Adam(weights, lr=0.01),
    "torch's fused sgd": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9, fused=True),
    "torch's nadam": lambda weights: torch.optim.NAdam(weights, lr=0.01),
    "torch's radam": lambda weights: torch.optim.RAdam(weights, lr=0.01),
    "torch's rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.01),
    "torch's adamax": lambda weights: torch.optim.Adamax(weights, lr=0.01),
    "torch's adadelta": lambda weights: torch.optim.Adadelta(weights, lr=0.01),
}


def make_recorded(name):
    weights = on_device(make_weights(*SHAPES), torch.bfloat16 if "masters" in name else torch.float32)
    return weights, RECORDED[name](weights)


def step_with_numbers(weights, optimizer, gradients, rates):
    for step, rate in zip(gradients, rates, strict=True):
        for group in optimizer.param_groups:
            set_learning_rate(group, rate)
        drive(optimizer, weights, [[each.to(weight.dtype) for each, weight in zip(step, weights, strict=True)]])
    return values(weights)


def step_by_replay(weights, optimizer, gradients, rates, *, skipped=()):
    """Two steps as they are, on a stream beside, the others by a graph that the third has recorded."""
    found_inf = torch.zeros((), device=DEVICE)
    supports_found_inf = all(group.get("fused") for group in optimizer.param_groups)
    if supports_found_inf:
        optimizer.found_inf = found_inf
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for number, (step, rate) in enumerate(zip(gradients, rates, strict=True)):
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad.copy_(gradient)
        found_inf.fill_(float(number in skipped))
        for group in optimizer.param_groups:
            set_learning_rate(group, rate)
        if number < 2:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
            continue
        if number == 2:
            with torch.cuda.graph(graph):
                optimizer.step()
        graph.replay()
    return values(weights)


def assert_near(found, expected, start):
    for one, other, begun in zip(found, expected, start, strict=True):
        moved = (other.float() - begun.float()).norm()
        assert (one.float() - other.float()).norm() <= 1e-3 * moved + 1e-6 * other.float().norm()


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_step_follows_rates_and_gradients(name):
    weights, optimizer = make_recorded(name)
    start, gradients = values(weights), gradients_for(weights, len(RATES))
    expected = step_with_numbers(weights, optimizer, gradients, RATES)
    weights, optimizer = make_recorded(name)
    assert prepare_for_capture(optimizer, DEVICE)
    assert_near(step_by_replay(weights, optimizer, gradients, RATES), expected, start)


@pytest.mark.parametrize("name", ["adamw", "adamw, bf16 moments", "adamw, masters", "lion", "muon", "muon, masters"])
def test_a_recorded_step_is_held_back_by_a_word_on_the_device(name):
    weights, optimizer = make_recorded(name)
    start, gradients = values(weights), gradients_for(weights, len(RATES))
    kept = [number for number in range(len(RATES)) if number != 4]
    expected = step_with_numbers(
        weights, optimizer, [gradients[number] for number in kept], [RATES[number] for number in kept]
    )
    for gradient in gradients[4]:
        gradient.fill_(torch.nan)
    weights, optimizer = make_recorded(name)
    prepare_for_capture(optimizer, DEVICE)
    assert_near(step_by_replay(weights, optimizer, gradients, RATES, skipped={4}), expected, start)


def test_what_is_saved_goes_on_without_capture():
    weights, optimizer = make_recorded("adamw")
    gradients = gradients_for(weights, 3)
    prepare_for_capture(optimizer, DEVICE)
    step_by_replay(weights, optimizer, gradients, RATES[:3])
    saved = optimizer.state_dict()
    assert [(type(group["lr"]), group["capturable"]) for group in saved["param_groups"]] == [(float, False)]
    before = values(weights)
    plain = AdamW(on_device(weights), lr=0.01)
    plain.load_state_dict(saved)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["capturable"] is True
    for weight in plain.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    plain.step()
    assert not all_equal(plain.param_groups[0]["params"], before)


def test_loops_over_single_tensors_cannot_be_recorded():
    assert not prepare_for_capture(torch.optim.RMSprop(on_device(make_weights((3,))), foreach=False), DEVICE)
    assert not prepare_for_capture(torch.optim.SGD(on_device(make_weights((3,)))), DEVICE)
