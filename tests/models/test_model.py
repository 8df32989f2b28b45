"""What all shipped models share: settings that build a twin, presets, the files' round trip."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models.folders import assert_same_tensors, config_of, our_llama, reference, tensors_in

from trainwright.errors import ConfigError
from trainwright.models.llama import Llama
from trainwright.models.model import preset_settings, shipped_models


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "tie_word_embeddings": False}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": None, "head_dim": 12}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_of_transformers_comes_back_bit_equal_and_of_its_type(tmp_path, kind, changes, dtype):
    theirs = reference(kind, **changes).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    Llama.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    assert_same_tensors(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    before, after = config_of(tmp_path / "theirs"), config_of(tmp_path / "ours")
    assert after["model_type"] == kind.lower() == before["model_type"]
    assert after["architectures"] == before["architectures"]
    same = set(before) - {"transformers_version"}
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    again = type(theirs).from_pretrained(tmp_path / "ours")
    assert_same_tensors(again.state_dict(), theirs.state_dict())


def test_a_model_that_was_read_can_be_copied(tmp_path):
    folder = our_llama().save_pretrained(tmp_path / "model")
    copied = copy.deepcopy(Llama.from_pretrained(folder))
    assert copied.hugging_face_config["model_type"] == "llama"


def test_settings_build_a_twin():
    model = our_llama(num_kv_heads=2, attention_bias="qkv", rope_scaling={"rope_type": "linear", "factor": 2.0})
    twin = Llama(**model.settings)
    assert twin.settings == model.settings
    twin.load_state_dict(model.state_dict())


@pytest.mark.parametrize("model_class", shipped_models().values())
def test_every_model_has_a_tiny_preset_that_builds(model_class):
    model = model_class.from_preset("tiny")
    assert sum(each.numel() for each in model.parameters()) < 2_000_000
    assert type(model)(**model.settings).state_dict().keys() == model.state_dict().keys()


def test_overrides_change_single_settings_of_a_preset():
    assert Llama.from_preset("tiny", num_layers=1, max_positions=99).settings["max_positions"] == 99


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"llama has no preset .8b.. Known: tiny, 125m, .*llama3-70b"):
        Llama.from_preset("8b")


def test_a_subclass_has_its_parent_s_presets():
    class Mine(Llama):
        pass

    assert Mine.from_preset("tiny").settings == Llama.from_preset("tiny").settings
    with pytest.raises(ConfigError, match="Linear has no presets"):
        preset_settings(torch.nn.Linear, "tiny")


def test_overrides_change_single_settings_of_a_folder(tmp_path):
    folder = our_llama().save_pretrained(tmp_path / "model")
    model = Llama.from_pretrained(folder, dropout=0.1, max_positions=128)
    assert (model.settings["dropout"], model.max_positions) == (0.1, 128)
    assert config_of(model.save_pretrained(tmp_path / "again"))["max_position_embeddings"] == 128


def test_quantized_weights_are_refused():
    with pytest.raises(ConfigError, match="quantization_config"):
        Llama.from_config({"model_type": "llama", "quantization_config": {"bits": 4}})


def test_a_model_with_computed_buffers_is_whole_after_loading(tmp_path):
    class WithBuffer(Llama):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.register_buffer("places", torch.arange(4), persistent=False)

    folder = our_llama().save_pretrained(tmp_path / "model")
    model = WithBuffer.from_pretrained(folder)
    assert model.places.tolist() == [0, 1, 2, 3]
    assert torch.equal(model.lm_head.weight, our_llama().lm_head.weight)


def test_what_did_not_fit_can_be_had_with_the_model(tmp_path):
    folder = our_llama().save_pretrained(tmp_path / "model")
    model, report = Llama.load_pretrained(folder, strict=False, tie_embeddings=False)
    assert report.missing == ("lm_head.weight",)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_tied_weights_are_in_the_state_once_and_load_from_one_name_or_all():
    model, twin = (Llama.from_preset("tiny", tie_embeddings=True) for _ in range(2))
    state = model.state_dict()
    assert "lm_head.weight" not in state
    assert "lm_head.weight" in model.state_dict(keep_vars=True)
    assert "0.lm_head.weight" not in torch.nn.Sequential(model).state_dict()
    for given in (state, dict(model.state_dict(keep_vars=True)), _renamed(state)):
        torch.nn.init.zeros_(twin.lm_head.weight)
        twin.load_state_dict(given)
        assert torch.equal(twin.lm_head.weight, model.lm_head.weight)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    nested = torch.nn.Sequential(twin)
    nested.load_state_dict({f"0.{name}": value for name, value in state.items()})


def _renamed(state):
    """The same weights, the tied one under its other name."""
    return {name.replace("model.embed_tokens", "lm_head"): value for name, value in state.items()}
