"""Adapters as files: alone, and in the layout of PEFT."""

import json

import pytest
import torch
from tests.messages import raises

from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.llama import Llama
from trainwright.models.lora import CONFIG_FILE, WEIGHTS_FILE, add_lora, load_lora, lora_layers, save_lora

TOKENS = torch.arange(24).reshape(2, 12) % 17


def small_llama():
    torch.manual_seed(0)
    return Llama(vocab_size=17, hidden_size=16, num_layers=2, num_heads=2, max_positions=16).eval()


@pytest.fixture
def saved(tmp_path):
    """A model with adapters that are not zero and a trained norm, and the folder that they were saved to."""
    model = small_llama()
    add_lora(model, match="*.q_proj", rank=4, alpha=6, train="model.norm.weight")
    with torch.no_grad():
        for _, layer in lora_layers(model):
            layer.lora_b.normal_()
        model.model.norm.weight.add_(0.5)
    return model, save_lora(model, tmp_path / "adapters", base="tiny")


def test_a_plain_model_gets_the_saved_adapters(saved):
    model, folder = saved
    twin = small_llama()
    assert load_lora(twin, folder) == [name for name, _ in lora_layers(model)]
    assert torch.equal(twin(TOKENS)["logits"], model(TOKENS)["logits"])
    assert {name for name, one in twin.named_parameters() if one.requires_grad} == {
        name for name, one in model.named_parameters() if one.requires_grad
    }


def test_the_files_hold_what_was_trained_and_nothing_else(saved):
    _, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert (folder / WEIGHTS_FILE).stat().st_size < 5000
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (4, 6.0, ["model.norm"])


def test_peft_reads_the_folder_and_gives_the_same_answers(tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "base")
    add_lora(model, match=["*.q_proj", "*.down_proj"], rank=4, alpha=6, train="lm_head.*")
    with torch.no_grad():
        for _, layer in lora_layers(model):
            layer.lora_b.normal_()
        model.lm_head.weight.add_(0.1)
    save_lora(model, tmp_path / "adapters")
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    twin = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base").eval()
    load_lora(twin, tmp_path / "theirs")
    torch.testing.assert_close(twin(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_the_folder_is_written_whole_beside_what_is_there(saved, tmp_path):
    model, folder = saved
    (folder / "README.md").write_text("mine")
    for _, layer in lora_layers(model):
        torch.nn.init.ones_(layer.lora_b)
    assert save_lora(model, folder) == folder
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", CONFIG_FILE, WEIGHTS_FILE]
    twin = small_llama()
    load_lora(twin, folder)
    assert torch.equal(twin(TOKENS)["logits"], model(TOKENS)["logits"])
    base = small_llama().save_pretrained(tmp_path / "base")
    save_lora(model, base)  # PEFT's users keep both in one folder
    assert {"config.json", "model.safetensors", CONFIG_FILE, WEIGHTS_FILE} == {path.name for path in base.iterdir()}


def test_a_folder_of_something_else_is_rejected_and_nothing_is_left_when_writing_fails(saved, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with raises(CheckpointError):
        save_lora(saved[0], tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.txt"]
    with torch.device("meta"):
        unmade = small_llama()
    add_lora(unmade, match="*.q_proj")
    with raises(CheckpointError):
        save_lora(unmade, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_model_without_adapters_has_none_to_save(tmp_path):
    with raises(ConfigError):
        save_lora(small_llama(), tmp_path)


def test_a_folder_of_another_model_is_named(saved):
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with raises(ConfigError, "model.layers.0.self_attn.q_proj"):
        load_lora(other, saved[1])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("alora_invocation_tokens", [1, 2]),
        ("trainable_token_indices", [3]),
        ("use_qalora", True),
        ("lora_bias", True),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 2}),
        ("of_tomorrow", "yes"),
    ],
)
def test_what_only_peft_can_do_is_rejected_by_name_and_the_model_stays_as_it_was(saved, key, value):
    file, model = saved[1] / CONFIG_FILE, small_llama()
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with raises(ConfigError, key):
        load_lora(model, saved[1])
    assert_untouched(model)


def test_what_decides_nothing_is_accepted(saved):
    file = saved[1] / CONFIG_FILE
    more = {"init_lora_weights": "gaussian", "megatron_core": "megatron.core", "loftq_config": {}, "use_qalora": False}
    more |= {"qalora_group_size": 16, "peft_version": "0.18.0", "lora_bias": False, "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    twin = small_llama()
    load_lora(twin, saved[1])
    assert torch.equal(twin(TOKENS)["logits"], saved[0](TOKENS)["logits"])


@pytest.mark.parametrize(
    "change", [{"r": 2}, {"r": "4", "use_rslora": True}, {"lora_alpha": None}, {"lora_dropout": 2}]
)
def test_a_load_that_is_rejected_leaves_the_model_as_it_was(saved, change):
    model = small_llama()
    file = saved[1] / CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with raises(ConfigError):
        load_lora(model, saved[1])
    assert_untouched(model)


def test_a_wider_model_is_rejected_and_stays_as_it_was(saved):
    model = Llama(vocab_size=17, hidden_size=32, num_layers=2, num_heads=2, max_positions=16)
    with raises(ConfigError, "lora_a", "4", "16", "32"):
        load_lora(model, saved[1])
    assert_untouched(model)


def assert_untouched(model):
    assert not dict(lora_layers(model))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_damaged_or_missing_file_is_named(saved, tmp_path):
    (saved[1] / WEIGHTS_FILE).write_bytes(b"not safetensors")
    with raises(CheckpointError, "adapter_model.safetensors"):
        load_lora(small_llama(), saved[1])
    (saved[1] / CONFIG_FILE).write_text("{}")
    with raises(CheckpointError, "LoRA"):
        load_lora(small_llama(), saved[1])
    with raises(CheckpointError, "adapter_config.json"):
        load_lora(small_llama(), tmp_path)
