"""bf16 weights without masters: rounded stochastically they follow fp32, and a resume repeats every bit."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.messages import raises
from tests.optim.references import all_equal, drive, make_gradients, make_weights, values
from tests.optim.replayed_gradients import language_model, language_model_loss

from trainwright.errors import ConfigError
from trainwright.optim import adamw
from trainwright.optim.adamw import AdamW
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon
from trainwright.optim.rounding import noise_of, round_to_bf16, salt_of

SHAPES = ((6, 4), (4, 6), (7,), (32, 300))
MAKERS = {
    "adamw": lambda weights, **more: AdamW(weights, lr=0.01, **more),
    "adamw, bf16 moments": lambda weights, **more: AdamW(weights, lr=0.01, state_dtype="bf16", **more),
    "adamw, 8bit": lambda weights, **more: AdamW(weights, lr=0.01, state="8bit", **more),
    "lion": lambda weights, **more: Lion(weights, lr=0.003, weight_decay=0.1, **more),
    "muon": lambda weights, **more: Muon(weights, lr=0.02, ns_dtype="fp32", **more),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def narrow_weights():
    return make_weights(*SHAPES, dtype=torch.bfloat16)


@every_optimizer
def test_the_mean_of_the_weights_moves_as_in_fp32(make):
    """Updates of a tenth of the distance of two bf16 numbers, which rounding to nearest would drop."""
    weight = torch.nn.Parameter(torch.ones(8, 8192, dtype=torch.bfloat16))
    exact = torch.nn.Parameter(torch.ones(8, 8192))
    gradient = make_gradients([exact], 1)[0][0].abs() + 0.5
    optimizer, reference = make([weight], master_weights="stochastic"), make([exact])
    for group in (*optimizer.param_groups, *reference.param_groups):
        group["lr"], group["weight_decay"] = group["lr"] * 0.02, 0.0
    drive(optimizer, [weight], [[gradient.bfloat16()]] * 4)
    drive(reference, [exact], [[gradient]] * 4)
    moved, expected = (1 - weight.double()).mean().item(), (1 - exact.double()).mean().item()
    assert {1.0} < set(weight.flatten().tolist())
    # Equal elements of a column are rounded alike, so 8,192 draws in each of 4 steps: the standard error is up to 6 %.
    assert moved == pytest.approx(expected, rel=0.1, abs=2**-8 / 80)


@every_optimizer
def test_no_masters_are_kept_and_saved_state_continues_the_same_course(make):
    straight, weights = narrow_weights(), narrow_weights()
    gradients = make_gradients(straight, 6)
    drive(make(straight, master_weights="stochastic"), straight, gradients)
    first = make(weights, master_weights="stochastic")
    drive(first, weights, gradients[:3])
    continued = make(weights, master_weights="stochastic")
    continued.load_state_dict(copy.deepcopy(first.state_dict()))
    drive(continued, weights, gradients[3:])
    assert all_equal(straight, weights)
    assert not any("master" in state for state in continued.state.values())


@every_optimizer
def test_a_skipped_update_changes_neither_weights_nor_state(make):
    weights = narrow_weights()
    optimizer = make(weights, master_weights="stochastic")
    drive(optimizer, weights, make_gradients(weights, 2))
    before, state = values(weights), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.found_inf = torch.ones(())
    drive(optimizer, weights, [[torch.full_like(weight, torch.nan) for weight in weights]])
    assert all_equal(before, weights)
    for number, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(kept[key], state[number][key]) for key in kept)


def test_a_language_model_follows_fp32_at_a_rate_at_which_rounding_to_nearest_stalls():
    losses = {}
    for name, settings in {
        "fp32": {},
        "nearest": {"state_dtype": "fp32"},
        "stochastic": {"master_weights": "stochastic"},
        "stochastic, 8bit": {"master_weights": "stochastic", "state": "8bit"},
    }.items():
        model = language_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        weights = list(model.parameters())
        if name != "fp32":
            weights = [torch.nn.Parameter(each.detach().bfloat16()) for each in model.parameters()]
        optimizer = AdamW(weights, lr=3e-5, weight_decay=0.0, **settings)
        for step in range(40):
            model.zero_grad()
            loss = language_model_loss(model, step % 4)
            loss.backward()
            for weight, parameter in zip(weights, model.parameters(), strict=True):
                weight.grad = parameter.grad.to(weight.dtype)
            optimizer.step()
            with torch.no_grad():  # the forward in fp32: only the rounding of weights differs
                for weight, parameter in zip(weights, model.parameters(), strict=True):
                    parameter.copy_(weight)
        losses[name] = sum(language_model_loss(model, step).item() for step in range(4)) / 4
    start = sum(language_model_loss(language_model(), step).item() for step in range(4)) / 4
    gained = {name: start - loss for name, loss in losses.items()}
    assert gained["nearest"] < 0.8 * gained["fp32"]
    assert gained["stochastic"] == pytest.approx(gained["fp32"], rel=0.03)
    assert gained["stochastic, 8bit"] == pytest.approx(gained["fp32"], rel=0.03)


def test_chunks_of_a_large_weight_move_as_the_whole(monkeypatch):
    whole, cut = (make_weights((40, 3), (5,), dtype=torch.bfloat16) for _ in range(2))
    gradients = make_gradients(whole, 2)
    drive(AdamW(whole, lr=0.1, master_weights="stochastic"), whole, gradients)
    monkeypatch.setattr(adamw, "CHUNK_ELEMENTS", 16)
    drive(AdamW(cut, lr=0.1, master_weights="stochastic"), cut, gradients)
    assert all_equal(whole, cut)


@every_optimizer
def test_weights_in_fp32_next_to_them_are_not_rounded(make):
    weights = [*make_weights((32, 300), (4, 6), dtype=torch.bfloat16), *make_weights((5,), (32, 300), seed=3)]
    alone = [torch.nn.Parameter(each.detach().clone()) for each in weights[2:]]
    gradients = make_gradients(weights, 3)
    drive(make(weights, master_weights="stochastic"), weights, gradients)
    drive(make(alone), alone, [step[2:] for step in gradients])
    assert all_equal(weights[2:], alone)
    assert not torch.equal(alone[1], alone[1].bfloat16().float())


def test_nan_stays_nan():
    patterns = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7FFF8000], dtype=torch.int32)
    for step in range(20):
        result = patterns.clone().view(torch.float32)
        round_to_bf16(result, salt_of(torch.tensor(float(step))))
        assert result.isnan().all()


def test_equal_values_round_independently_of_each_other_where_positions_differ():
    positions = torch.arange(4096, dtype=torch.int32)
    for value in (1.001, 0.3333, 1e-3):
        noise = noise_of(torch.full((8, 4096), value), salt_of(torch.tensor(5.0)), positions).double() / 2**16
        assert noise[0].mean().item() == pytest.approx(0.5, abs=0.03)
        assert noise[0].std().item() == pytest.approx(12**-0.5, rel=0.05)
        together = torch.stack([noise[0, :-1], noise[0, 1:]])
        assert abs(torch.corrcoef(together)[0, 1].item()) < 0.08


@every_optimizer
@pytest.mark.parametrize(("dtype", "problem"), [(torch.float32, ("16 bits",)), (torch.float16, ("float16",))])
def test_weights_that_cannot_be_rounded_so_are_rejected(make, dtype, problem):
    with raises(ConfigError, "master_weights", *problem):
        make(make_weights((32, 300), dtype=dtype), master_weights="stochastic")


@pytest.mark.parametrize("value", ["random", 1, None])
def test_unknown_values_are_rejected(value):
    with raises(ConfigError, "master_weights", repr(value)):
        AdamW(make_weights((2,), dtype=torch.bfloat16), master_weights=value)
