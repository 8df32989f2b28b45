"""How settings name places of a model."""

import pytest
from tests.memory.models import Stack
from tests.messages import raises
from torch import nn

from trainwright.errors import ConfigError
from trainwright.memory.module_paths import by_path, layers_of, parts_of

WORDS = ("layers", "save", "budget", "every")


class Derived(nn.Linear):
    pass


def nested():
    return nn.ModuleDict({"a": Stack(2), "b": nn.Sequential(nn.Linear(8, 8), Derived(8, 8))})


@pytest.mark.parametrize("given", ["Layer", ["Layer"], {"layers": ["Layer"]}, {"layers": ["Layer"], "save": ["mm"]}])
def test_a_setting_without_a_path_is_for_the_whole_model(given):
    assert by_path("activation_checkpointing", given, WORDS) == {"": given}


def test_a_mapping_without_any_key_of_a_setting_is_by_path():
    assert by_path("activation_checkpointing", {"a": ["Layer"], "b": {"layers": "Linear"}}, WORDS) == {
        "a": ["Layer"],
        "b": {"layers": "Linear"},
    }


def test_a_submodule_named_like_a_key_is_a_path_if_its_setting_is_a_mapping():
    assert by_path("activation_checkpointing", {"layers": {"layers": ["Layer"]}}, WORDS) == {
        "layers": {"layers": ["Layer"]}
    }


def test_keys_and_paths_do_not_mix():
    with raises(ConfigError, "layers"):
        by_path("activation_checkpointing", {"layer": ["Layer"], "save": ["mm"]}, WORDS)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["Layer"], ["a.layers.0", "a.layers.1"]),
        (["layers.*"], ["a.layers.0", "a.layers.1"]),  # and not what is inside of them
        (["a.layers"], ["a.layers.0", "a.layers.1"]),  # a list is never called: its members are
        (["layers.1", "Derived"], ["a.layers.1", "b.1"]),
        (["Stack", "Layer"], ["a"]),
        (["Linear"], ["a.first", "a.layers.0.up", "a.layers.0.down", "a.layers.1.up", "a.layers.1.down", "b.0", "b.1"]),
    ],
)
def test_layers_are_named_by_class_or_glob_and_the_outermost_is_meant(wanted, found):
    assert list(layers_of("activation_checkpointing", nested(), "", wanted)) == found


def test_inside_of_a_path_only_its_layers_are_meant():
    assert list(layers_of("activation_checkpointing", nested(), "b", ["Linear"])) == ["b.0", "b.1"]


def test_a_module_with_two_paths_is_matched_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.append(model[0])
    assert list(layers_of("activation_checkpointing", model, "", ["Linear"])) == ["0"]


@pytest.mark.parametrize(
    ("word", "said"),
    [("Layr", ("Layer",)), ("layers.*.dwon", ())],
)
def test_a_class_or_glob_that_matches_nothing_is_rejected_with_the_nearest(word, said):
    with raises(ConfigError, *said):
        layers_of("activation_checkpointing", Stack(), "", ["Layer", word])


def test_a_path_that_matches_nothing_is_rejected_with_the_nearest():
    with raises(ConfigError, "layers"):
        parts_of("compile_repeated_blocks", Stack(), "layer")


def test_in_a_part_of_a_model_what_is_named_may_be_elsewhere():
    assert layers_of("activation_checkpointing", Stack(), "", ["Block"], is_whole=False) == {}
    assert parts_of("activation_checkpointing", Stack(), "decoder", is_whole=False) == {}
