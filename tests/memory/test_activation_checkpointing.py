"""Recomputed layers: the same bits, with less held between forward and backward."""

import copy
import inspect

import pytest
import torch
from tests.memory.models import POINTS, SHIPPED, Stack, assert_same_bits, make, saved_bytes, update_of
from tests.messages import raises
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.errors import ConfigError
from trainwright.events.storage import EventStorage, get_event_storage
from trainwright.memory.activation_checkpointing import choose_layers, recompute_layers
from trainwright.models.saving import changes_of

ATTENTION = "scaled_dot_product_attention"


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("how", [{}, {"save": ["mm", "addmm", ATTENTION]}, {"every": 2}, {"budget": 0.5}])
def test_a_shipped_model_has_the_same_bits_and_holds_less(name, how):
    build, batch, block, _, _ = SHIPPED[name]
    model = make(build)
    before, held = update_of(model, batch), saved_bytes(model, batch)
    recompute_layers(model, {"layers": [block], **how})
    assert_same_bits(update_of(model, batch), before)
    assert saved_bytes(model, batch) < held


def test_names_signature_and_what_is_shipped_stay_as_they_are():
    model = make(SHIPPED["llama"][0])
    names, signature = list(model.state_dict()), inspect.signature(model.model.layers[0].forward)
    recompute_layers(model, "DecoderLayer")
    assert list(model.state_dict()) == names
    assert inspect.signature(model.model.layers[0].forward) == signature
    assert changes_of(model) == changes_of(make(SHIPPED["llama"][0]))


def test_a_copy_of_the_model_runs_its_own_weights():
    model = make(Stack)
    recompute_layers(model, {"layers": ["Layer"], "save": ["mm"]})
    twin = copy.deepcopy(model)
    for weight in twin.parameters():
        weight.data.mul_(2)
    alone = make(Stack)
    for weight in alone.parameters():
        weight.data.mul_(2)
    assert_same_bits(update_of(twin, POINTS), update_of(alone, POINTS))
    assert_same_bits(update_of(model, POINTS), update_of(make(Stack), POINTS))


@pytest.mark.parametrize(
    ("setting", "recomputed"),
    [
        ("layers.*", [0, 1, 2, 3, 4]),
        ({"layers": "Layer", "every": 2}, [0, 2, 4]),
        ({"layers": "Layer", "every": 9}, [0]),
        ({"layers": "Layer", "budget": 0.4}, [0, 1, 2]),
        ({"layers": "Layer", "budget": 0.39}, [0, 1, 2, 3]),
        ({"layers": "Layer", "budget": 0}, [0, 1, 2, 3, 4]),
        ({"layers": "Layer", "budget": 1}, []),
        ({"layers": "Layer", "budget": "auto"}, [0, 1, 2, 3, 4]),  # until a run has found it
        ({"layers.1": "Layer", "layers.3": "Layer"}, [1, 3]),
        ({"layers": {"layers": "Layer", "every": 3}}, [0, 3]),
    ],
)
def test_which_layers_are_recomputed(setting, recomputed):
    assert list(choose_layers(Stack(5), setting)) == [f"layers.{number}" for number in recomputed]


def test_a_budget_is_kept_in_bytes():
    model = make(lambda: Stack(8))
    all_held = saved_bytes(model, POINTS)
    bare = copy.deepcopy(model)
    recompute_layers(bare, "Layer")
    least = saved_bytes(bare, POINTS)
    for budget in (0.25, 0.5, 0.9):
        partly = copy.deepcopy(model)
        recompute_layers(partly, {"layers": "Layer", "budget": budget})
        assert saved_bytes(partly, POINTS) - least <= budget * (all_held - least)
        assert saved_bytes(partly, POINTS) > least


def test_each_kind_of_layer_has_its_own_budget():
    model = nn.ModuleDict({"wide": Stack(4), "plain": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})
    chosen = choose_layers(model, {"layers": ["Layer", "plain.*"], "budget": 0.5})
    assert list(chosen) == ["wide.layers.0", "wide.layers.1", "plain.0"]


class CountProducts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def products_in_backward(setting):
    model = make(lambda: Stack(3))
    if setting:
        recompute_layers(model, setting)
    loss = model(**POINTS)["loss"]
    with CountProducts() as counter:
        loss.backward()
    return counter.count


def test_what_is_saved_is_not_computed_again():
    assert products_in_backward(None) == 0
    assert products_in_backward("Layer") == 6  # two linear layers in each of three
    assert products_in_backward({"layers": "Layer", "save": ["addmm"]}) == 0


def test_nothing_is_recomputed_where_there_are_no_gradients():
    model = make(Stack).eval()
    plain = model(**POINTS)["loss"]
    recompute_layers(model, "Layer")
    with torch.no_grad():
        assert torch.equal(model(**POINTS)["loss"], plain)


class Putting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        get_event_storage().put_scalar("seen", x.mean())
        get_event_storage().put_scalar("forwards", 1.0)
        return {"loss": self.linear(x).square().mean()}


def test_what_a_recomputed_layer_puts_is_put_once():
    model = nn.Sequential(Putting())
    recompute_layers(model, "Putting")
    with EventStorage() as storage:
        storage.step = 1
        model(POINTS["x"])["loss"].backward()
        assert len(storage._pending) == 2
        assert storage.history("forwards") == [(1, 1.0)]


def test_autocast_holds_in_the_recomputation():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = update_of(make(Stack), POINTS)
    model = make(Stack)
    recompute_layers(model, "Layer")
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**POINTS)["loss"]
    loss.backward()  # outside, as the loop does it
    assert_same_bits({"loss": loss.detach(), **{name: each.grad for name, each in model.named_parameters()}}, before)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (3, ("3",)),
        ([], ()),
        ({"save": ["mm"]}, ()),
        ({"layers.0": {"save": ["mm"]}}, ("layers.0",)),
        ({"layers.0": {"layers": "Linear", "svae": []}}, ("layers.0",)),
        ({"layers": "Layer", "budget": 1.1}, ("activation_checkpointing.budget", "0", "1", "1.1")),
        ({"layers": "Layer", "budget": "all"}, ("activation_checkpointing.budget", "0", "1")),
        ({"layers": "Layer", "budget": True}, ("activation_checkpointing.budget",)),
        ({"layers": "Layer", "every": 0}, ("activation_checkpointing.every", "1")),
        ({"layers": "Layer", "every": 2, "budget": 0.5}, ()),
        ({"layers": "Layer", "save": "mmm"}, ("mmm", "activation_checkpointing.save")),
        ({"layers.0": "Layer", "*.0": "Layer"}, ("*.0", "layers.0")),
        ({"layers.0": "Layer", "first": "Layer"}, ("first",)),
    ],
)
def test_a_setting_that_cannot_be_is_rejected(setting, said):
    with raises(ConfigError, *said):
        choose_layers(Stack(), setting)
