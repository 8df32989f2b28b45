"""The three settings together, as the model section has them."""

import logging

import pytest
from tests.memory.models import SHIPPED, Stack, assert_same_bits, make, update_of
from tests.messages import raises

from trainwright.errors import ConfigError
from trainwright.memory.rewrite import apply_memory_settings, check_memory_settings


def origin(label):
    return f"run.yaml:7 ({label})"


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_all_three_together_have_the_same_bits(name):
    build, batch, block, stack, tensor = SHIPPED[name]
    model = make(build)
    before = update_of(model, batch)
    names = list(model.state_dict())
    apply_memory_settings(
        model,
        {"compile_repeated_blocks": stack, "activation_checkpointing": [block], "offload": [tensor]},
        origin=origin,
    )
    assert list(model.state_dict()) == names
    assert_same_bits(update_of(model, batch), before)
    model.eval()
    assert_same_bits(update_of(model, batch), update_of(make(build).eval(), batch))


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("activation_checkpointing", ["Layr"]),
        ("compile_repeated_blocks", "layer"),
        ("offload", {"layer": ["layer_input"]}),
    ],
)
@pytest.mark.parametrize("act", [apply_memory_settings, check_memory_settings])
def test_what_matches_nothing_is_rejected_with_its_location(key, setting, act):
    with raises(ConfigError, key, key, at="run.yaml:7"):
        act(Stack(), {key: setting}, origin=origin)


def test_checking_changes_nothing():
    model = Stack()
    check_memory_settings(
        model,
        {"activation_checkpointing": "Layer", "compile_repeated_blocks": "layers", "offload": ["layer_input"]},
        origin=origin,
    )
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_stage_of_a_pipeline_need_not_have_what_is_named():
    reserved = {
        "activation_checkpointing": {"decoder": ["Block"]},
        "compile_repeated_blocks": "decoder.layers",
        "offload": {"decoder": ["x"]},
    }
    model = Stack()
    apply_memory_settings(model, reserved, origin=origin, is_whole=False)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_log_has_the_applied_settings(caplog):
    with caplog.at_level(logging.INFO, logger="trainwright"):
        apply_memory_settings(
            Stack(),
            {"activation_checkpointing": {"layers": "Layer", "budget": 0.5}, "compile_repeated_blocks": "layers"},
            origin=origin,
        )
    assert [record.getMessage() for record in caplog.records] == [
        "model.activation_checkpointing: 2 of 4 Layer are recomputed in the backward pass.",
        "model.compile_repeated_blocks: the 4 blocks of layers are compiled as one graph.",
    ]
