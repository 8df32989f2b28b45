"""Muon: hidden matrices by the rule, all else by AdamW, decided by kind, name and attribute."""

import copy
import pickle

import pytest
import torch
from tests.messages import raises
from tests.optim import references
from tests.optim.references import all_equal, drive, make_gradients, make_weights, values
from torch import nn

from trainwright.errors import ConfigError
from trainwright.optim.muon import Muon
from trainwright.optim.param_groups import classify_parameters

MATRICES = ((4, 6), (6, 4), (3, 3), (4, 6), (5, 2, 3, 3))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_matrices_follow_the_rule(nesterov, adjust):
    weights = make_weights(*MATRICES, dtype=torch.float64)
    gradients = make_gradients(weights, 4)
    settings = {"lr": 0.02, "nesterov": nesterov, "weight_decay": 0.3}
    expected = [
        references.muon(weight.detach(), each, match_rms=adjust != "original", **settings)
        for weight, each in zip(weights, zip(*gradients, strict=True), strict=True)
    ]
    drive(Muon(weights, adjust_lr_fn=adjust, ns_dtype="fp32", **settings), weights, gradients)
    for weight, reference in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_matrices_move_as_torchs_muon_moves_them(adjust):
    ours, theirs = make_weights((24, 16), (16, 40), (24, 16)), make_weights((24, 16), (16, 40), (24, 16))
    gradients = make_gradients(ours, 5)
    drive(Muon(ours, lr=0.02, adjust_lr_fn=adjust), ours, gradients)
    drive(torch.optim.Muon(theirs, lr=0.02, adjust_lr_fn=adjust), theirs, gradients)
    for our, their, start in zip(ours, theirs, make_weights((24, 16), (16, 40), (24, 16)), strict=True):
        # Both iterate in bf16, which rounds by a 256th, five times.
        assert (our - their).norm() < 0.03 * (their - start).norm()


def test_everything_else_follows_adamw():
    weights = make_weights((5,), (1, 4), (2, 3, 4))
    gradients = make_gradients(weights, 5)
    expected = [
        references.adamw(weight.detach(), each, lr=0.01, betas=(0.8, 0.9), weight_decay=0.2)
        for weight, each in zip(weights, zip(*gradients, strict=True), strict=True)
    ]
    drive(Muon(weights, lr=0.5, adamw_lr=0.01, adamw_weight_decay=0.2, adamw_betas=[0.8, 0.9]), weights, gradients)
    for weight, reference in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach().double(), reference, rtol=1e-5, atol=1e-6)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.lm_head = nn.Linear(4, 7, bias=False)


def names_by_half(optimizer):
    halves = {True: [], False: []}
    for group in optimizer.param_groups:
        halves[group["use_muon"]] += group["param_names"]
    return halves[True], halves[False]


def test_embeddings_heads_and_vectors_go_to_adamw_with_the_models_kinds_or_by_name():
    model = Net()
    for kinds in (classify_parameters(model), None):
        by_muon, by_adamw = names_by_half(Muon(model.named_parameters(), kinds=kinds))
        assert by_muon == ["layers.0.weight", "layers.1.weight"]
        assert set(by_adamw) == {"embed.weight", "layers.0.bias", "layers.1.bias", "lm_head.weight"}


def test_the_attribute_no_muon_overrules_the_kind_both_ways():
    model = Net()
    model.layers[0].weight.no_muon = True
    model.lm_head.weight.no_muon = False
    by_muon, _ = names_by_half(Muon(model.named_parameters(), kinds=classify_parameters(model)))
    assert by_muon == ["layers.1.weight", "lm_head.weight"]


def test_excluded_names_go_to_adamw_and_a_glob_that_excludes_nothing_is_rejected():
    model = Net()
    by_muon, _ = names_by_half(Muon(model.named_parameters(), exclude="layers.0.*"))
    assert by_muon == ["layers.1.weight"]
    with raises(ConfigError, "layer.0.*"):
        Muon(model.named_parameters(), exclude=["layer.0.*"])
    with raises(ConfigError):
        Muon(model.parameters(), exclude="x")


def test_a_groups_own_rate_holds_for_both_of_its_halves():
    model = Net()
    first, *rest = dict(model.named_parameters()).items()
    groups = [
        {"params": list(dict(rest).values()), "param_names": list(dict(rest))},
        {"params": [first], "lr": 0.5},
    ]
    optimizer = Muon(groups, lr=0.02, adamw_lr=0.001)
    assert [(group["use_muon"], group["lr"]) for group in optimizer.param_groups] == [
        (True, 0.02),
        (False, 0.001),
        (False, 0.5),
    ]


def make_pair(ns_dtype="fp32", **settings):
    weights = make_weights(*MATRICES, (5,), (3,))
    return weights, Muon(weights, lr=0.02, ns_dtype=ns_dtype, **settings)


@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
def test_saved_state_continues_the_same_course(ns_dtype):
    straight, optimizer = make_pair(ns_dtype)
    gradients = make_gradients(straight, 6)
    drive(optimizer, straight, gradients)
    weights, first = make_pair(ns_dtype)
    drive(first, weights, gradients[:3])
    continued = Muon(weights, lr=0.7, ns_dtype=ns_dtype)
    continued.load_state_dict(copy.deepcopy(first.state_dict()))
    drive(continued, weights, gradients[3:])
    assert all_equal(straight, weights)


def test_an_overflow_changes_neither_weights_nor_state():
    weights, optimizer = make_pair()
    optimizer.found_inf = torch.ones(())
    drive(optimizer, weights, [[torch.full_like(weight, torch.inf) for weight in weights]])  # even the first step
    assert all_equal(make_pair()[0], weights)
    optimizer.found_inf = torch.zeros(())
    drive(optimizer, weights, make_gradients(weights, 2))
    before, state = values(weights), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.found_inf = torch.ones(())
    drive(optimizer, weights, [[torch.full_like(weight, torch.nan) for weight in weights]])
    assert all_equal(before, weights)
    for number, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(kept[key], state[number][key]) for key in kept)


def test_gradients_are_unscaled_as_torchs_scaler_asks():
    (weights, plain), (others, scaled) = make_pair(), make_pair()
    gradients = make_gradients(weights, 3)
    drive(plain, weights, gradients)
    scaled.grad_scale, scaled.found_inf = torch.tensor(64.0), torch.zeros(())
    drive(scaled, others, [[gradient * 64.0 for gradient in step] for step in gradients])
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_has_no_gradient_is_left_alone_state_and_all():
    weights, optimizer = make_pair()
    before = values(weights)
    (gradients,) = make_gradients(weights, 1)
    drive(optimizer, weights, [[gradients[0], *[None] * 5, gradients[6]]])
    assert all_equal(before[1:6], weights[1:6])
    assert set(optimizer.state) == {weights[0], weights[6]}


def test_batches_of_equal_shapes_move_as_single_matrices_do():
    weights, others = make_weights(*[(4, 6)] * 5), make_weights(*[(4, 6)] * 5)
    gradients = make_gradients(weights, 3)
    drive(Muon(weights, lr=0.02, ns_dtype="fp32"), weights, gradients)
    for n, other in enumerate(others):
        drive(Muon([other], lr=0.02, ns_dtype="fp32"), [other], [[step[n]] for step in gradients])
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other)


def test_convolutions_in_channels_last_move_as_plain_ones_do():
    weights, others = make_weights((6, 4, 3, 3)), make_weights((6, 4, 3, 3))
    others[0].data = others[0].data.to(memory_format=torch.channels_last)
    gradients = make_gradients(weights, 3)
    drive(Muon(weights, lr=0.02, ns_dtype="fp32"), weights, gradients)
    drive(Muon(others, lr=0.02, ns_dtype="fp32"), others, gradients)
    torch.testing.assert_close(weights[0].detach(), others[0].detach())


def test_update_norm_is_returned_only_when_asked():
    weights, optimizer = make_pair()
    gradients = make_gradients(weights, 1)
    assert drive(optimizer, weights, gradients) == {}
    weights, optimizer = make_pair(report=True)
    before = values(weights)
    norm = drive(optimizer, weights, gradients)["update_norm"]
    moved = torch.cat([(old - new).flatten() for old, new in zip(before, values(weights), strict=True)])
    torch.testing.assert_close(norm, moved.norm())


def test_a_copy_splits_further_groups_by_the_same_rule():
    model = Net()
    optimizer = pickle.loads(pickle.dumps(Muon(model.named_parameters(), adamw_lr=0.5)))
    optimizer.add_param_group(
        {"params": [("more.weight", nn.Parameter(torch.ones(2, 2))), ("b", nn.Parameter(torch.ones(2)))]}
    )
    assert [(group["use_muon"], group["lr"]) for group in optimizer.param_groups[-2:]] == [(True, 0.001), (False, 0.5)]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lr": -1.0}, ("0", "-1.0")),
        ({"momentum": 1.0}, ("0", "1", "1.0")),
        ({"adjust_lr_fn": "rms"}, ("adjust_lr_fn", "match_rms_adamw")),
        ({"ns_dtype": "fp8"}, ("fp8", "ns_dtype", "fp32", "bf16")),
        ({"ns_coefficients": [1.0]}, ()),
    ],
)
def test_impossible_settings_are_rejected(settings, problem):
    with raises(ConfigError, *problem):
        Muon(make_weights((2, 2)), **settings)
