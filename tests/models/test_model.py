"""What all shipped models share: settings that build a twin, presets, the files' round trip."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.messages import raises
from tests.models.folders import assert_same_tensors, config_of, our_llama, reference, tensors_in

from trainwright.errors import CheckpointError, ConfigError
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
    with raises(ConfigError):
        Llama.from_preset("8b")


def test_a_subclass_has_its_parent_s_presets():
    class Mine(Llama):
        pass

    assert Mine.from_preset("tiny").settings == Llama.from_preset("tiny").settings
    with raises(ConfigError):
        preset_settings(torch.nn.Linear, "tiny")


def test_overrides_change_single_settings_of_a_folder(tmp_path):
    folder = our_llama().save_pretrained(tmp_path / "model")
    model = Llama.from_pretrained(folder, dropout=0.1, max_positions=128)
    assert (model.settings["dropout"], model.max_positions) == (0.1, 128)
    assert config_of(model.save_pretrained(tmp_path / "again"))["max_position_embeddings"] == 128


def test_quantized_weights_are_rejected():
    with raises(ConfigError, "quantization_config"):
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


SMALL = {"vocab_size": 61, "hidden_size": 16, "num_layers": 1, "num_heads": 2}


def test_a_state_has_all_names_of_a_tied_weight_as_torch_s_own():
    tied, untied = Llama(**SMALL, tie_embeddings=True), Llama(**SMALL, tie_embeddings=False)
    state = tied.state_dict()
    assert state.keys() == untied.state_dict().keys()
    untied.load_state_dict(state)
    assert torch.equal(untied.lm_head.weight, tied.lm_head.weight)
    (twin := Llama(**SMALL, tie_embeddings=True)).load_state_dict(state)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    with pytest.warns(FutureWarning, match="Positional"):
        assert tied.state_dict({}, "inner.", False).keys() == {f"inner.{name}" for name in state}


def test_a_state_of_ours_is_one_of_transformers_too():
    theirs = reference(num_key_value_heads=4, tie_word_embeddings=True)
    ours = our_llama(intermediate_size=48, tie_embeddings=True)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.lm_head.weight, ours.model.embed_tokens.weight)
    back = our_llama(intermediate_size=48, tie_embeddings=True)
    back.load_state_dict(theirs.state_dict())
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in back.state_dict().items())


@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_are_assigned_stay_tied(nested):
    given = Llama(**SMALL, tie_embeddings=True)
    with torch.device("meta"):
        model = Llama(**SMALL, tie_embeddings=True)
    model.lm_head.weight.requires_grad_(False)
    outer = torch.nn.Sequential(model) if nested else model
    outer.load_state_dict((torch.nn.Sequential(given) if nested else given).state_dict(), assign=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.requires_grad
    assert torch.equal(model.lm_head.weight, given.lm_head.weight)


class Busy(Llama):
    """A user's subclass whose constructor does more than to make weights."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.rnn = torch.nn.LSTM(4, 4)
        self.scale = float(torch.rand(()))
        self.decayed = [one for one in self.parameters() if one.dim() > 1]
        own = torch.nn.Parameter(torch.ones_like(self.model.norm.weight))
        self.model.norm.weight = own
        own.requires_grad = False
        self.model.embed_tokens.weight.register_hook(lambda gradient: gradient * 0)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_user_s_constructor_is_run_in_full_and_what_it_did_stays(tmp_path, dtype):
    published = our_llama(tie_embeddings=False)
    folder = published.save_pretrained(tmp_path / "model")
    torch.manual_seed(3)
    expected = Busy(**published.settings)
    torch.manual_seed(3)
    model = Busy.from_pretrained(folder, strict=False, dtype=dtype)
    assert model.scale == expected.scale
    assert {id(one) for one in model.decayed} <= {id(one) for one in model.parameters()}
    assert {name for name, one in model.named_parameters() if not one.requires_grad} == {"model.norm.weight"}
    assert torch.equal(model.rnn.weight_ih_l0, expected.rnn.weight_ih_l0.to(model.rnn.weight_ih_l0.dtype))
    model.rnn(torch.ones(1, 1, 4, dtype=model.rnn.weight_ih_l0.dtype))
    model(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1, 4).long())["loss"].backward()
    assert not model.model.embed_tokens.weight.grad.any()
    assert model.lm_head.weight.grad.any()
    assert torch.equal(model.lm_head.weight, Llama.from_pretrained(folder, dtype=dtype).lm_head.weight)


def test_a_trained_head_is_not_lost_where_the_model_is_told_to_tie_it(tmp_path):
    untied = our_llama(tie_embeddings=False)
    folder = untied.save_pretrained(tmp_path / "model")
    with raises(CheckpointError, "1", "lm_head.weight"):
        Llama.from_pretrained(folder, tie_embeddings=True)
    model, report = Llama.load_pretrained(folder, tie_embeddings=True, strict=False)
    assert report.unexpected == ("lm_head.weight",)
    assert torch.equal(model.lm_head.weight, untied.model.embed_tokens.weight)
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.model.embed_tokens.weight)[0, 0] = float("nan")
        untied.model.embed_tokens.weight[0, 0] = float("nan")
    same = untied.save_pretrained(tmp_path / "same")
    assert Llama.load_pretrained(same, tie_embeddings=True)[1].unexpected == ()
