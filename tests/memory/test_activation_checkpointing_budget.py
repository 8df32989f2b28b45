"""`budget: auto`: what is to be found, which shares there are, and what each layer would hold."""

from __future__ import annotations

import pytest
import torch
from tests.memory.models import POINTS, SHIPPED, Stack, assert_same_bits, make, saved_bytes, update_of
from torch import nn

from trainwright.memory.activation_checkpointing import (
    choose_layers,
    counting_held_bytes,
    has_auto,
    num_recomputed,
    only_auto,
    recompute_layers,
    recomputed_within,
    shares_of,
    with_budget,
    without_auto,
)

AUTO = {"layers": ["Layer"], "budget": "auto"}


@pytest.mark.parametrize(
    ("given", "found", "told"),
    [
        (None, None, None),
        ("Layer", None, "Layer"),
        (["Layer"], None, ["Layer"]),
        ({"layers": "Layer", "budget": 0.5}, None, {"layers": "Layer", "budget": 0.5}),
        (AUTO, AUTO, None),
        ({"encoder": AUTO, "decoder": "Block"}, {"encoder": AUTO}, {"decoder": "Block"}),
        ({"layers": AUTO}, {"layers": AUTO}, None),
    ],
)
def test_a_setting_is_split_into_given_and_automatic_budgets(given, found, told):
    assert has_auto(given) is (found is not None)
    assert only_auto(given) == found
    assert without_auto(given) == told


def test_one_share_replaces_every_auto():
    given = {"encoder": AUTO, "decoder": {"layers": "Block", "budget": 0.25}}
    assert with_budget(given, 0.5) == {"encoder": {**AUTO, "budget": 0.5}, "decoder": given["decoder"]}
    assert given["encoder"]["budget"] == "auto"


@pytest.mark.parametrize("num_layers", [1, 4, 7, 49])
def test_there_is_a_share_for_every_number_of_layers(num_layers):
    model = Stack(num_layers)
    shares = shares_of(model, AUTO)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert [num_recomputed(model, AUTO, share) for share in shares] == list(range(num_layers, -1, -1))


def test_shares_of_several_kinds_of_layers_make_a_difference_each():
    model = nn.ModuleDict({"wide": Stack(4), "plain": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
    given = {"layers": ["Layer", "plain.*"], "budget": "auto"}
    numbers = [num_recomputed(model, given, share) for share in shares_of(model, given)]
    assert numbers == sorted(set(numbers), reverse=True)
    assert (numbers[0], numbers[-1]) == (7, 0)


@pytest.mark.parametrize("how", [{}, {"save": ["addmm", "mm"]}], ids=["all", "some"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_what_layers_would_hold_is_what_recomputing_them_saves(name, how):
    build, batch, block, _, _ = SHIPPED[name]
    given = {"layers": [block], "budget": "auto", **how}
    model = make(build)
    all_held = saved_bytes(model, batch)
    with counting_held_bytes(model, given) as held, recomputed_within(model, with_budget(given, 0.0)):
        model(**batch)["loss"].backward()
    assert list(held) == list(choose_layers(model, {"layers": [block]}))
    recompute_layers(model, {"layers": [block]})
    saved = all_held - saved_bytes(model, batch)
    assert sum(held.values()) == pytest.approx(saved, rel=0.05)  # what two layers hold together is counted twice


def test_counting_and_recomputing_within_leave_the_model_as_it_was():
    model = make(Stack)
    before = update_of(model, POINTS)
    forwards = [vars(each).get("forward") for each in model.modules()]
    with counting_held_bytes(model, AUTO) as held, recomputed_within(model, AUTO):
        update_of(model, POINTS)
    assert all(held.values())
    assert [vars(each).get("forward") for each in model.modules()] == forwards
    assert_same_bits(update_of(model, POINTS), before)


def test_what_is_counted_is_not_held():
    alive = []

    class Wide(nn.Module):
        def forward(self, x):
            for _ in range(10):
                x = x.sin()
                alive.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
                most.append(sum(not each.expired() for each in alive))
            return x

    most = []
    model = nn.Sequential(Wide())
    point = torch.ones(4, requires_grad=True)
    with counting_held_bytes(model, {"layers": ["Wide"], "budget": "auto"}) as held, torch.enable_grad():
        model(point)
    assert held == {"0": 9 * 4 * 4}  # the input of each sine but the first, which is the layer's
    assert max(most[:10]) <= 2
