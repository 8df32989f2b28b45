"""AutoModel picks the shipped class by a folder's config.json."""

from __future__ import annotations

import json

import pytest
import torch
from tests.messages import raises
from tests.models.folders import config_of, our_llama, reference, tokens

from trainwright import AutoModel
from trainwright.errors import ConfigError
from trainwright.models.llama import Llama
from trainwright.models.model import shipped_models


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_a_folder_of_transformers_is_read_by_our_class(tmp_path, kind):
    theirs = reference(kind)
    theirs.save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path)
    assert isinstance(model, Llama)
    torch.testing.assert_close(
        model(tokens(2, 9))["logits"], theirs(input_ids=tokens(2, 9)).logits, atol=1e-5, rtol=1e-5
    )


def test_a_config_makes_a_model_with_fresh_weights():
    config = {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModel.from_config({**config, "num_key_value_heads": 2, "intermediate_size": 64}, vocab_size=11)
    assert isinstance(model, Llama)
    assert model.hugging_face_type == "qwen2"
    assert model.settings["vocab_size"] == 11


def test_an_unknown_type_lists_the_known_ones():
    with raises(ConfigError, "rwkv", "model_type"):
        AutoModel.choose({"model_type": "rwkv"})
    with raises(ConfigError, "model_type"):
        AutoModel.choose({})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model_type", "rwkv", ("rwkv", "config.json", "model_type")),
        ("architectures", 3, ("config.json", "3")),
        ("hidden_size", "many", ("config.json",)),
        ("num_attention_heads", 0, ("config.json",)),
        ("num_hidden_layers", None, ("config.json",)),
    ],
)
def test_bad_values_in_config_json_name_the_file(tmp_path, key, value, said):
    folder = our_llama().save_pretrained(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({**config_of(folder), key: value}))
    with raises(ConfigError, *said, folder):
        AutoModel.from_pretrained(folder)


def test_an_override_that_makes_no_model_is_named_beside_the_file(tmp_path):
    folder = our_llama().save_pretrained(tmp_path / "model")
    with raises(ConfigError, "config.json", "2"):
        AutoModel.from_pretrained(folder, dropout=2)


def test_every_type_has_an_architecture_and_finds_its_class():
    for each in shipped_models().values():
        assert each.hugging_face_architectures.keys() == set(each.hugging_face_types)
        for model_type, architecture in each.hugging_face_architectures.items():
            assert AutoModel.choose({"model_type": model_type, "architectures": [architecture]}) is each


@pytest.mark.parametrize(("model_type", "readers"), [("bert", ("bert", "bert_classifier")), ("rwkv", ())])
def test_a_class_rejects_another_s_folder_and_says_which_type_reads_it(model_type, readers):
    with raises(ConfigError, model_type, "llama", "qwen2", "mistral", *readers, at="config.json"):
        Llama.from_config({"model_type": model_type}, dropout=0.1)


def test_it_makes_no_object_of_its_own():
    with raises(ConfigError, "from_pretrained"):
        AutoModel()


def test_a_name_is_looked_up_in_the_home_path(tmp_path):
    our_llama().save_pretrained(tmp_path / "org" / "small")
    assert isinstance(AutoModel.from_pretrained("org/small", home_path=tmp_path), Llama)
