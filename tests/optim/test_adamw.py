"""AdamW: torch's mathematics, fused where torch can, metrics as a dict, hooks run once."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.optim import references

from trainwright.optim.adamw import AdamW


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(5, 3, generator=generator).to(dtype)) for _ in range(2)]


def descend(optimizer, weights, steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        sum((weight**2).sum() for weight in weights).backward()
        optimizer.step()
    return weights


def test_updates_are_those_of_torch():
    ours, theirs = parameters(), parameters()
    descend(AdamW(ours, lr=0.05), ours)
    descend(torch.optim.AdamW(theirs, lr=0.05, fused=True), theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our, their)


def test_defaults_are_those_of_torch_but_fused():
    ours, theirs = AdamW(parameters()).defaults, torch.optim.AdamW(parameters()).defaults
    assert {name for name in theirs if ours[name] != theirs[name]} == {"fused"}
    assert ours["fused"] is True


def test_a_device_without_the_kernel_leaves_the_choice_to_torch():
    assert AdamW([torch.nn.Parameter(torch.zeros(2, device="meta"))]).defaults["fused"] is None


def test_fused_can_be_rejected():
    assert AdamW(parameters(), fused=False).defaults["fused"] is False


def test_step_returns_a_dict_of_metrics():
    weights = parameters()
    optimizer = AdamW(weights)
    weights[0].sum().backward()
    assert optimizer.step() == {}


@pytest.mark.parametrize(
    "entries",
    [
        lambda weights: iter(weights),
        lambda weights: [("first", weights[0]), ("second", weights[1])],
        lambda weights: [{"params": iter(weights[:1]), "weight_decay": 0.0}, {"params": weights[1]}],
    ],
    ids=["generator", "named", "groups"],
)
def test_all_of_torchs_ways_to_give_parameters_are_taken(entries):
    weights = parameters()
    before = [weight.detach().clone() for weight in weights]
    optimizer = AdamW(entries(weights), lr=0.1)
    assert optimizer.defaults["fused"] is True
    descend(optimizer, weights, steps=1)
    assert not any(torch.equal(old, weight) for old, weight in zip(before, weights, strict=True))


def test_one_bare_tensor_is_rejected():
    with pytest.raises(TypeError, match=r"model\.parameters\(\)"):
        AdamW(parameters()[0])


def test_step_hooks_run_once_even_beside_a_plain_torch_adamw():
    torch.optim.AdamW(parameters())  # from now on torch's own step runs hooks too
    weights, calls = parameters(), []
    optimizer = AdamW(weights)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    descend(optimizer, weights, steps=1)
    assert calls == ["pre", "post"]


def test_infinite_gradients_skip_the_update_without_a_look_from_the_host():
    weights = parameters()
    before = [weight.detach().clone() for weight in weights]
    optimizer = AdamW(weights)
    for weight in weights:
        weight.grad = torch.full_like(weight, torch.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(old, weight) for old, weight in zip(before, weights, strict=True))


def test_saved_state_continues_the_same_course():
    straight = descend(AdamW(once := parameters(), lr=0.05), once, steps=6)
    weights = parameters()
    optimizer = AdamW(weights, lr=0.05)
    descend(optimizer, weights, steps=3)
    continued = AdamW(weights, lr=0.05)
    continued.load_state_dict(optimizer.state_dict())
    descend(continued, weights, steps=3)
    assert all(torch.equal(one, other) for one, other in zip(straight, weights, strict=True))


def test_betas_may_be_a_list_as_yaml_gives_it():
    assert AdamW(parameters(), betas=[0.9, 0.95]).param_groups[0]["betas"] == (0.9, 0.95)


def test_updates_are_those_of_the_rule():
    weights = references.make_weights((4, 3), (5,))
    gradients = references.make_gradients(weights, 6)
    expected = [
        references.adamw(weight.detach(), each, lr=0.02)
        for weight, each in zip(weights, zip(*gradients, strict=True), strict=True)
    ]
    references.drive(AdamW(weights, lr=0.02), weights, gradients)
    for weight, reference in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach().double(), reference, rtol=1e-5, atol=1e-6)


def test_repair_counts_what_is_not_finite_and_treats_it_as_zero():
    weights, others = parameters(), parameters()
    bad = torch.randn(5, 3)
    bad[0] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    bad[1, 0] = 1e30  # its square is infinite
    metrics = references.drive(AdamW(weights, lr=0.1, repair_nan=True), weights, [[bad, bad * 1.0]])
    assert metrics["nan_gradients"].item() == 8
    repaired = bad.clone()
    repaired[0] = repaired[1, 0] = 0.0
    references.drive(AdamW(others, lr=0.1), others, [[repaired, repaired]])
    assert references.all_equal(weights, others)


def test_repair_leaves_state_finite_and_counts_each_step_anew():
    weights = parameters()
    optimizer = AdamW(weights, repair_nan=True)
    for gradient, count in ((torch.nan, 30), (1.0, 0)):
        metrics = references.drive(optimizer, weights, [[torch.full_like(w, gradient) for w in weights]])
        assert metrics["nan_gradients"].item() == count
    assert all(value.isfinite().all() for state in optimizer.state.values() for value in state.values())


def test_repair_after_a_step_that_was_held_back_is_done_anew():
    weights = parameters()
    optimizer = AdamW(weights, repair_nan=True, fused=False)
    for _ in range(2):  # of the first, the step is never taken
        for weight in weights:
            weight.grad = torch.full_like(weight, torch.nan)
        optimizer.repair_gradients()
        assert all(weight.grad.isfinite().all() for weight in weights)
    assert optimizer.step()["nan_gradients"].item() == 30
    assert all(weight.isfinite().all() for weight in weights)


def test_repair_may_be_for_one_group_only():
    weights = parameters()
    optimizer = AdamW([{"params": weights[:1], "repair_nan": True}, {"params": weights[1:]}])
    metrics = references.drive(optimizer, weights, [[torch.full_like(w, torch.nan) for w in weights]])
    assert metrics["nan_gradients"].item() == 15
    assert weights[0].isfinite().all()
    assert weights[1].isnan().all()


def test_update_norm_is_what_the_step_changed():
    weights = parameters()
    before = references.values(weights)
    gradients = references.make_gradients(weights, 1)
    norm = references.drive(AdamW(weights, lr=0.1, report=True), weights, gradients)["update_norm"]
    moved = torch.cat([(old - new).flatten() for old, new in zip(before, references.values(weights), strict=True)])
    torch.testing.assert_close(norm, moved.norm())


def test_a_copy_and_a_state_saved_before_these_options_existed_still_step():
    weights = parameters()
    optimizer = AdamW(weights, repair_nan=True)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for key in ("repair_nan", "report", "state_dtype"):
            del group[key]
    optimizer.load_state_dict(state)
    assert "nan_gradients" in references.drive(optimizer, weights, references.make_gradients(weights, 1))
    copied = copy.deepcopy(optimizer)
    assert "nan_gradients" in references.drive(
        copied, copied.param_groups[0]["params"], references.make_gradients(weights, 1)
    )
