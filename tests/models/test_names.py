"""Globs that name places inside a model."""

import pytest
from tests.messages import raises
from torch import nn

from trainwright.config.frozen import Frozen
from trainwright.errors import ConfigError
from trainwright.models.from_config import freeze
from trainwright.models.names import as_globs, matched_parameters, names_module, unmatched


@pytest.mark.parametrize(
    ("glob", "name", "is_meant"),
    [
        ("*.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("layers.*.mlp", "model.layers.0.mlp", True),
        ("model.layers.0.mlp", "model.layers.0.mlp", True),
        ("mlp", "model.layers.0.mlp.up_proj", False),
        ("proj", "model.q_proj", False),
        ("*.head", "head", False),
    ],
)
def test_a_glob_names_a_module_by_its_whole_name_or_by_the_end_of_it(glob, name, is_meant):
    assert names_module(glob, name) is is_meant


def test_what_is_said_where_nothing_matches_shows_a_stack_s_layers_once():
    names = [f"layers.{number}.q_proj" for number in range(40)]
    told = unmatched("*.q_prj", names, "linear layer")
    assert told == ("no linear layer matches '*.q_prj'. Did you mean \"*.q_proj\"? There are: layers.*.q_proj.")


@pytest.mark.parametrize("given", [3, [1], "", [""], {"a": 1}])
def test_what_is_no_glob_is_rejected(given):
    with raises(ConfigError):
        as_globs("freeze", given)


def test_a_mapping_of_a_run_file_is_described_and_not_shown_as_an_object():
    with raises(ConfigError):
        as_globs("freeze", Frozen({"a": 1}))


def test_a_glob_of_parameters_is_compared_with_the_whole_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert matched_parameters("freeze", "0.*", model) == ["0.weight", "0.bias"]


def test_freezing_one_name_of_a_tied_parameter_freezes_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert freeze(model, "1.weight") == ["1.weight"]
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
