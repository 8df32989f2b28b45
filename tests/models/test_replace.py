"""Replacement: each rule finds its places, rules never fight, and their order is nothing."""

from types import SimpleNamespace

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright.errors import ConfigError
from trainwright.models.from_config import replace_modules
from trainwright.models.llama import Llama


def small_llama():
    torch.manual_seed(0)
    return Llama(vocab_size=17, hidden_size=16, num_layers=2, num_heads=2, max_positions=16)


class Narrow(nn.Module):
    def __init__(self, *, width, replaces):
        super().__init__()
        size = replaces.gate_proj.in_features
        self.inner = nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, size))

    def forward(self, hidden):
        return self.inner(hidden)


def make(component, old):
    return component(old)


NARROW = {"layers.*.mlp": lambda old: Narrow(width=8, replaces=old)}


def test_every_place_that_a_rule_matches_gets_a_module_of_its_own():
    model = small_llama()
    kept = model.model.layers[0].self_attn
    assert replace_modules(model, NARROW, make) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    first, second = (layer.mlp for layer in model.model.layers)
    assert isinstance(first, Narrow)
    assert first is not second
    assert model.model.layers[0].self_attn is kept
    tokens = torch.arange(8).reshape(1, 8)
    model(tokens, labels=tokens)["loss"].backward()
    assert first.inner[0].weight.grad is not None


def test_the_order_of_rules_changes_no_weight():
    rules = {"layers.0.mlp": NARROW["layers.*.mlp"], "q_proj": lambda old: nn.Linear(16, 16)}
    states = []
    for order in (rules, dict(reversed(rules.items()))):
        model = small_llama()
        torch.manual_seed(1)
        replace_modules(model, order, make)
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_two_rules_for_one_place_name_both():
    rules = {"layers.*.mlp": NARROW["layers.*.mlp"], "layers.1.*": lambda old: nn.Identity()}
    with raises(ConfigError, "layers.*.mlp", "layers.1.*", "model.layers.1.mlp"):
        replace_modules(small_llama(), rules, make)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_place_inside_of_another_rule_s_names_both(is_reversed):
    rules = {"layers.*.mlp": NARROW["layers.*.mlp"], "up_proj": lambda old: nn.Identity()}
    model = small_llama()
    rules = dict(reversed(rules.items())) if is_reversed else rules
    with raises(ConfigError, "up_proj"):
        replace_modules(model, rules, make)
    assert model.state_dict().keys() == small_llama().state_dict().keys()


def test_of_a_module_and_one_inside_of_it_a_rule_means_the_outer():
    model = small_llama()
    assert replace_modules(model, {"layers.*": lambda old: old}, make) == ["model.layers.0", "model.layers.1"]


def test_a_rule_that_matches_nothing_is_rejected_with_the_nearest():
    with raises(ConfigError, "layers.*.mlpp"):
        replace_modules(small_llama(), {"layers.*.mlpp": nn.Identity}, make)


def test_what_is_no_module_is_rejected():
    with raises(ConfigError, "lm_head", "SimpleNamespace", "torch.nn.Module"):
        replace_modules(small_llama(), {"lm_head": lambda old: SimpleNamespace()}, make)


def test_a_constructor_that_fails_leaves_the_model_as_it_was():
    model = small_llama()
    before = dict(model.named_modules())

    def fail(old):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        replace_modules(model, {**NARROW, "lm_head": fail}, make)
    assert dict(model.named_modules()) == before


def test_a_module_at_two_places_is_replaced_by_one():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(2, 2)})
    assert replace_modules(model, {"*": lambda old: nn.Identity()}, make) == ["a", "b", "c"]
    assert model["a"] is model["b"]
    assert model["a"] is not model["c"]
    model = nn.ModuleDict({"a": shared, "b": shared})
    with raises(ConfigError, "a", "b"):
        replace_modules(model, {"a": lambda old: nn.Identity(), "b": lambda old: nn.ReLU()}, make)


def test_the_mode_of_the_old_module_is_taken_over():
    model = small_llama().eval()
    replace_modules(model, NARROW, make)
    assert not model.model.layers[0].mlp.training
