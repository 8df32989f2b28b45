"""Parameter groups: each parameter in exactly one, the first match wins, silence is rejected."""

from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import mentions, raises
from tests.optim.references import all_equal, drive, make_gradients
from torch import nn

from trainwright.errors import ConfigError
from trainwright.loop.update import ScheduledOptimizer
from trainwright.models.from_config import disable_untrainable_params
from trainwright.optim.adamw import AdamW
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon
from trainwright.optim.param_groups import (
    GroupRule,
    describe_unowned,
    make_groups,
    make_optimizer,
)

NAMES = [f"{module}.{leaf}" for module in ("norm", "layers.0.q", "layers.1.q", "head") for leaf in ("weight", "bias")]


def parameters(names=NAMES):
    generator = torch.Generator().manual_seed(0)
    shape = {"weight": (3, 2), "bias": (3,)}
    return {name: nn.Parameter(torch.randn(shape[name.rpartition(".")[2]], generator=generator)) for name in names}


def build(groups=(), optimizer=AdamW, named=None, **arguments):
    return make_optimizer(lambda params: optimizer(params, **arguments), named or parameters(), groups)


def settings_of(optimizer, *keys):
    return {
        name: tuple(group[key] for key in keys) for group in optimizer.param_groups for name in group["param_names"]
    }


def test_the_first_match_wins_and_the_rest_keeps_the_optimizers_settings():
    rules = [{"match": "*.bias", "weight_decay": 0}, {"match": ["*norm*", "head.*"], "lr": 1e-4}]
    found = settings_of(build(rules, lr=1e-3), "lr", "weight_decay")
    assert found["layers.0.q.weight"] == (1e-3, 0.01)
    assert found["norm.weight"] == found["head.weight"] == (1e-4, 0.01)
    assert found["norm.bias"] == found["layers.1.q.bias"] == (1e-3, 0)


def test_without_rules_there_is_one_group_in_the_models_order():
    (group,) = build().param_groups
    assert group["param_names"] == NAMES


def test_what_no_rule_matches_comes_first_because_its_rate_is_logged():
    optimizer = build([{"match": "norm.*", "lr": 1.0}], lr=1e-3)
    assert ScheduledOptimizer(optimizer, lambda step, max_steps: 0.5).set_rate(0, 10) == 5e-4


globs = st.sampled_from(["*", "*.bias", "*.weight", "layers.*", "*norm*", "head.?ias", "layers.0.*", "*.q.*", "no.*"])


@settings(deadline=None, max_examples=80)
@given(
    names=st.lists(st.sampled_from(NAMES), unique=True, min_size=1),
    rules=st.lists(st.lists(globs, min_size=1, max_size=2), max_size=4),
    scales=st.lists(st.sampled_from([None, 1.0, 0.1, 0.0]), min_size=8, max_size=8),
    undecayed=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_every_parameter_is_in_exactly_one_group_that_of_its_first_match(names, rules, scales, undecayed):
    named = parameters(names)
    for parameter, scale, no_weight_decay in zip(named.values(), scales, undecayed, strict=False):
        if scale is not None:
            parameter.lr_scale = scale
        if no_weight_decay:
            parameter.no_weight_decay = True
    owner = {
        name: next((n for n, globs in enumerate(rules) if any(fnmatchcase(name, glob) for glob in globs)), None)
        for name in names
    }
    made_of = [GroupRule(tuple(globs), {"lr": 10.0 + n}) for n, globs in enumerate(rules)]
    is_idle = set(range(len(rules))) - set(owner.values())
    has_unmatched = any(not any(fnmatchcase(name, glob) for name in names) for globs in rules for glob in globs)
    if is_idle or has_unmatched:
        with raises(ConfigError, golden=False):
            make_groups(named, made_of)
        return
    groups = make_groups(named, made_of)
    assert sorted(name for group in groups for name in group["param_names"]) == sorted(names)
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            assert parameter is named[name]
            assert group.get("lr") == (None if owner[name] is None else 10.0 + owner[name])
            assert group.get("lr_scale", 1.0) == getattr(parameter, "lr_scale", 1.0)
            assert group.get("no_weight_decay", False) == hasattr(parameter, "no_weight_decay")


def test_attributes_scale_the_scheduled_rate_and_drop_the_decay():
    named = parameters()
    named["head.weight"].lr_scale = 0.1
    named["head.bias"].no_weight_decay = True
    optimizer = build([{"match": "norm.*", "lr": 0.5}], named=named, lr=0.2)
    ScheduledOptimizer(optimizer, lambda step, max_steps: 0.5).set_rate(0, 10)
    found = settings_of(optimizer, "lr", "weight_decay")
    assert found["layers.0.q.weight"] == (0.1, 0.01)
    assert found["head.weight"] == (pytest.approx(0.01), 0.01)
    assert found["head.bias"] == (0.1, 0.0)
    assert found["norm.bias"] == (0.25, 0.01)
    assert not any({"lr_scale", "no_weight_decay"} & group.keys() for group in optimizer.param_groups)


def test_a_scaled_parameter_moves_as_under_its_own_optimizer():
    named = parameters()
    named["head.weight"].lr_scale = 0.1
    gradients = make_gradients(list(named.values()), 3)
    drive(build(named=named, lr=0.1), list(named.values()), gradients)
    other = parameters()["head.weight"]
    drive(AdamW([other], lr=0.1 * 0.1), [other], [[step[NAMES.index("head.weight")]] for step in gradients])
    assert torch.equal(other, named["head.weight"])


@pytest.mark.parametrize(
    "optimizer",
    [AdamW, Lion, partial(Muon, ns_dtype="fp32"), torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop],
    ids=["adamw", "lion", "muon", "sgd", "adam", "rmsprop"],
)
def test_groups_work_with_any_optimizer_and_leave_the_mathematics_alone(optimizer):
    grouped, plain = parameters(), parameters()
    gradients = make_gradients(list(grouped.values()), 3)
    rules = [{"match": "*.bias", "lr": 1e-2}, {"match": "norm.*", "weight_decay": 0.1}]
    drive(build(rules, optimizer, grouped, lr=1e-2, weight_decay=0.1), list(grouped.values()), gradients)
    drive(build((), optimizer, plain, lr=1e-2, weight_decay=0.1), list(plain.values()), gradients)
    assert all_equal(grouped.values(), plain.values())


def test_lists_from_yaml_become_the_tuples_that_torch_has():
    optimizer = build([{"match": "*.bias", "betas": [0.5, 0.6]}])
    assert settings_of(optimizer, "betas")["norm.bias"] == ((0.5, 0.6),)


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        (
            [{"match": "*.biass", "lr": 1}],
            ("*.biass", "groups.0.match"),
        ),
        ([{"match": "*", "lr": 1}, {"match": "norm.*", "lr": 2}], ("groups.1",)),
        (
            [{"match": "*.bias", "weight_decy": 0}],
            ("weight_decy", "weight_decay"),
        ),
        ([{"match": "*.bias", "lr": "fast"}], ("fast", "groups.0.lr")),
        ([{"match": "*.bias", "lr": -1}], ("0", "1")),
        ([{"match": "*.bias", "eps": "small"}], ("small", "groups.0.eps")),
        ([{"match": "*.bias", "amsgrad": 1}], ("1",)),
        ([{"match": "*.bias", "betas": [0.9]}], ("2",)),
        ([{"match": "*.bias"}], ("groups.0",)),
        ([{"lr": 1}], ("groups.0",)),
        ([{"match": 3, "lr": 1}], ("groups.0.match",)),
        ({"match": "*", "lr": 1}, ()),
        ([{"match": "*", "params": []}], ("groups.0.params",)),
    ],
)
def test_what_has_no_effect_or_no_sense_is_rejected_by_name(groups, problem):
    with raises(ConfigError, *problem) as caught:
        make_optimizer(AdamW, parameters(), groups, origin=lambda setting: f"run.yaml at {setting}")
    assert str(caught.value).startswith("run.yaml at trainer.optimizer.groups")


def test_a_glob_that_matches_only_what_is_frozen_tied_or_another_s_says_so():
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("body", "head", "rest")})
    model["head"].weight = model["body"].weight
    model["body"].bias.requires_grad_(False)
    names = ("body.weight", "rest.bias")
    owned = {name: parameter for name, parameter in model.named_parameters() if name in names}
    others = describe_unowned(model, owned)

    def problem(glob):
        with pytest.raises(ConfigError) as caught:
            make_optimizer(AdamW, owned, [{"match": glob, "lr": 1}], others=others)
        return str(caught.value)

    tied = "trainer.optimizer.groups.0.match: 'head.w*' matches no parameter of this optimizer: head.weight is tied to "
    assert problem("head.w*").startswith(tied + "body.weight and listed under that name. Change the glob")
    assert "body.bias is frozen" in problem("body.b*")
    assert mentions(problem("head.b*"), "head.bias")
    assert mentions(problem("nothing"), "nothing")


def test_a_scale_that_is_no_number_names_the_parameter():
    named = parameters()
    named["head.weight"].lr_scale = "slow"
    with raises(ConfigError, "slow", "head.weight.lr_scale"):
        build(named=named)


def test_untrainable_parameters_are_frozen_by_glob_and_by_the_models_own_method():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
            self.body.bias.requires_grad_(False)

        def disable_untrainable_params(self):
            self.head.bias.requires_grad_(False)

    model = Net()
    assert disable_untrainable_params(model, "body.*") == ["body.weight", "head.bias"]
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["head.weight"]
