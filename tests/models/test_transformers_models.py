"""Models of transformers: from keywords or a folder, clear about mistakes, and trained as any other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.messages import raises

from trainwright import RunConfig, build_trainer
from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.llama import Llama
from trainwright.models.transformers_models import build_transformers, is_transformers_class

transformers = pytest.importorskip("transformers")

PROJECT = Path(__file__).parents[1] / "project"

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 61, "n_positions": 32}
LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 61,
}
TOKENS = torch.arange(24).reshape(2, 12)


def build(target, arguments=None, **options):
    return build_transformers(target, arguments or {}, **options)[0]


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    build(transformers.LlamaForCausalLM, LLAMA).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_classes_of_transformers_and_subclasses_of_them_are_told_apart():
    class Own(transformers.BertModel):
        pass

    assert all(map(is_transformers_class, [transformers.AutoModel, transformers.LlamaForCausalLM, Own]))
    assert not any(map(is_transformers_class, [torch.nn.Linear, torch.nn.ReLU(), "transformers:AutoModel", dict]))


def test_an_auto_class_is_built_from_a_model_type_and_keywords():
    model = build(transformers.AutoModelForCausalLM, GPT2)
    assert type(model) is transformers.GPT2LMHeadModel
    assert model.config.n_layer == 1
    assert model.training


def test_a_concrete_class_takes_the_keywords_of_its_config_and_their_other_names():
    assert build(transformers.LlamaForCausalLM, LLAMA).config.hidden_size == 16
    renamed = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert build(transformers.GPT2LMHeadModel, renamed).config.n_embd == 32
    sizes = {**LLAMA, "num_labels": 3, "pad_token_id": 0}
    assert build(transformers.LlamaForSequenceClassification, sizes).score.out_features == 3


def test_the_weights_are_float32_unless_a_dtype_is_named(llama_folder):
    assert json.loads((llama_folder / "config.json").read_text())["dtype"] == "bfloat16"
    for target, folder in ((transformers.LlamaForCausalLM, llama_folder), (transformers.AutoModel, llama_folder)):
        assert build(target, pretrained=folder).dtype == torch.float32
        assert build(target, {"dtype": "bf16"}, pretrained=folder).dtype == torch.bfloat16
    assert build(transformers.LlamaForCausalLM, {**LLAMA, "torch_dtype": "bfloat16"}).dtype == torch.bfloat16


def test_the_kind_of_attention_is_chosen():
    model = build(transformers.LlamaForCausalLM, {**LLAMA, "attn_implementation": "eager"})
    assert model.config._attn_implementation == "eager"
    with raises(ConfigError, "LlamaForCausalLM", "eagr", golden=False):  # transformers' text differs between versions
        build(transformers.LlamaForCausalLM, {**LLAMA, "attn_implementation": "eagr"})


def test_a_folder_gives_its_weights_and_keywords_change_its_config(llama_folder):
    reference = transformers.LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    for target in (transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM):
        model = build(target, {"attention_dropout": 0.5}, pretrained=llama_folder)
        assert model.training
        assert model.config.attention_dropout == 0.5
        assert torch.equal(model.eval()(TOKENS).logits, reference(TOKENS).logits)


def test_another_head_is_drawn_anew_and_reported(llama_folder):
    settings = {"num_labels": 3, "pad_token_id": 0}
    model, report = build_transformers(
        transformers.AutoModelForSequenceClassification, settings, pretrained=llama_folder
    )
    assert (report.missing, report.unexpected) == (("score.weight",), ("lm_head.weight",))
    assert model.score.weight.std() > 0


def test_missing_weights_of_the_same_class_are_rejected_unless_not_strict(llama_folder):
    two = {"num_hidden_layers": 2}
    with raises(CheckpointError, "model.layers.1.input_layernorm.weight"):
        build(transformers.LlamaForCausalLM, two, pretrained=llama_folder)
    _, report = build_transformers(transformers.LlamaForCausalLM, two, pretrained=llama_folder, strict=False)
    assert len(report.missing) == 9


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    settings = {**LLAMA, "num_labels": 2, "pad_token_id": 0}
    build(transformers.LlamaForSequenceClassification, settings).save_pretrained(folder)
    return folder


def test_a_head_for_other_labels_is_rejected_with_both_shapes_unless_not_strict(classifier_folder):
    target, three = transformers.LlamaForSequenceClassification, {"num_labels": 3}
    with raises(CheckpointError, "score.weight", "2", "16", "3"):
        build(target, three, pretrained=classifier_folder)
    torch.manual_seed(5)
    model, report = build_transformers(target, three, pretrained=classifier_folder, strict=False)
    assert report.missing == ("score.weight",)
    assert model.score.weight.shape == (3, 16)
    assert 0.005 < model.score.weight.std() < 0.05
    same = transformers.LlamaForSequenceClassification.from_pretrained(classifier_folder).model.state_dict()
    assert all(torch.equal(value, same[name]) for name, value in model.model.state_dict().items())


def test_a_body_of_other_shapes_is_rejected_also_when_not_strict(classifier_folder):
    for target in (transformers.LlamaForSequenceClassification, transformers.LlamaModel):
        with raises(CheckpointError):
            build(target, {"intermediate_size": 8}, pretrained=classifier_folder, strict=False)


@pytest.fixture
def heard(caplog, monkeypatch):
    """Their warnings: those that come once only, too, however often they came before."""
    their_logging = transformers.utils.logging
    their_logging.warning_once.cache_clear()
    monkeypatch.setattr(their_logging.get_logger(), "propagate", True)
    return lambda: [each.message for each in caplog.records if each.name.startswith("transformers")]


def test_a_small_model_of_theirs_is_built_and_trained_without_a_warning(heard):
    model = build(transformers.AutoModelForCausalLM, GPT2)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert (model.config.bos_token_id, model.config.eos_token_id) == (None, None)
    assert heard() == []
    build(transformers.AutoModelForCausalLM, {**GPT2, "bos_token_id": 99})
    assert "bos_token_id must be" in heard()[0]


def test_another_number_of_labels_leaves_their_names_behind(tmp_path, heard):
    names = {0: "no", 1: "yes", 2: "perhaps"}
    settings = {**LLAMA, "id2label": names, "label2id": {name: n for n, name in names.items()}, "pad_token_id": 0}
    target = transformers.LlamaForSequenceClassification
    build(target, settings).save_pretrained(tmp_path)
    assert build(target, {"num_labels": 3}, pretrained=tmp_path).config.id2label == names
    assert build(target, {"num_labels": 4}, pretrained=tmp_path, strict=False).config.id2label[3] == "LABEL_3"
    assert heard() == []


@pytest.mark.parametrize("sharded", [False, True])
def test_a_truncated_file_is_named(tmp_path, sharded):
    model = build(transformers.LlamaForCausalLM, LLAMA)
    model.save_pretrained(tmp_path, max_shard_size="4KB" if sharded else "1GB")
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-10])
    with raises(CheckpointError, path.name):
        build(transformers.LlamaForCausalLM, pretrained=tmp_path)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "many"), ("num_attention_heads", 3), ("vocab_size", [])])
def test_bad_values_in_config_json_name_the_file(tmp_path, llama_folder, key, value):
    config = json.loads((llama_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with raises(ConfigError, tmp_path, "config.json", "LlamaConfig"):
        build(transformers.AutoModelForCausalLM, pretrained=tmp_path)


def test_a_setting_that_the_model_reads_though_its_config_does_not_list_it_is_taken():
    sizes = {**LLAMA, "num_key_value_heads": 2, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    for target, extra in (
        (transformers.Qwen3MoeForCausalLM, {}),
        (transformers.AutoModelForCausalLM, {"model_type": "qwen3_moe"}),
    ):
        model = build(target, {**sizes, **extra, "head_dim": 4})
        assert model.model.layers[0].self_attn.q_proj.out_features == 8
        # The text lists the settings that the installed version of transformers has.
        with raises(ConfigError, "head_dimm", "Qwen3MoeConfig", golden=False):
            build(target, {**sizes, **extra, "head_dimm": 4})


def test_the_config_s_content_is_enough_to_build_a_folder_s_model(llama_folder):
    told = json.loads((llama_folder / "config.json").read_text())
    model, report = build_transformers(transformers.AutoModelForCausalLM, {"attention_dropout": 0.5}, told=told)
    assert (model.config.hidden_size, model.config.attention_dropout) == (16, 0.5)
    assert (report.missing, report.unexpected) == ((), ())


def test_a_saved_model_s_config_is_as_it_was_read_and_names_no_place(llama_folder, tmp_path):
    assert json.loads((llama_folder / "config.json").read_text())["use_cache"] is True
    model = build(transformers.LlamaForCausalLM, pretrained=llama_folder)
    assert model(input_ids=TOKENS, labels=TOKENS).past_key_values is None
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert json.loads(text)["use_cache"] is True
    assert str(llama_folder) not in text


def test_wrong_shapes_name_the_key_and_both_shapes(llama_folder):
    with raises(CheckpointError, "lm_head.weight", "61", "16", "32"):
        build(transformers.LlamaForCausalLM, {"hidden_size": 32}, pretrained=llama_folder)


@pytest.mark.parametrize(
    ("target", "arguments", "said"),
    [
        ("AutoModelForCausalLM", {**GPT2, "n_layr": 2}, ("n_layr", "n_layer")),
        (
            "LlamaForCausalLM",
            {"hiden_size": 2},
            ("hiden_size", "hidden_size", "LlamaConfig"),
        ),
        ("AutoModelForCausalLM", {}, ("AutoModelForCausalLM", "model_type")),
        ("AutoModelForCausalLM", {"model_type": "lama"}, ("llama", "model_type")),
        ("AutoModelForCausalLM", {"model_type": "vit"}, ("vit", "model_type")),
        ("GPT2LMHeadModel", {"vocab_size": "many"}, ("vocab_size",)),
        ("LlamaForCausalLM", {"dtype": "int3"}, ()),
        ("LlamaForCausalLM", {"dtype": "bf16", "torch_dtype": "bf16"}, ()),
    ],
)
def test_mistakes_are_rejected_with_the_nearest_name(target, arguments, said):
    with raises(ConfigError, *said):
        build(getattr(transformers, target), arguments)


def test_a_folder_of_another_model_type_is_rejected(llama_folder, tmp_path):
    with raises(ConfigError, "llama", "gpt2"):
        build(transformers.GPT2LMHeadModel, pretrained=llama_folder)
    with raises(ConfigError, "llama", "gpt2"):
        build(transformers.AutoModel, {"model_type": "gpt2"}, pretrained=llama_folder)
    (tmp_path / "config.json").write_text('{"model_type": "fantasy"}')
    with raises(ConfigError, "fantasy"):
        build(transformers.AutoModel, pretrained=tmp_path)


def test_a_folder_with_pickles_alone_is_rejected(tmp_path, llama_folder):
    (tmp_path / "config.json").write_bytes((llama_folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with raises(CheckpointError, "pytorch_model.bin"):
        build(transformers.LlamaForCausalLM, pretrained=tmp_path)


def packed_run(tmp_path, name, *overrides):
    packed = "{type: pack, length: 32, source: {type: parts.py:Documents}}"
    return RunConfig.load(
        PROJECT / "run.yaml",
        [
            f"name={name}",
            f"output_dir={tmp_path}",
            "model={type: transformers:AutoModelForCausalLM, model_type: gpt2, n_layer: 1, n_embd: 16, n_head: 2, "
            "vocab_size: 50, n_positions: 32, bos_token_id: 0, eos_token_id: 0}",
            "trainer.type=language_model",
            f"data.train={packed}",
            f"data.eval={{valid: {packed}}}",
            "evaluation={every_steps: 5, max_batches: 3}",
            "trainer.max_steps=8",
            *overrides,
        ],
    )


def test_a_run_is_evaluated_checkpointed_and_resumed_to_the_bit(tmp_path):
    whole = build_trainer(packed_run(tmp_path, "whole"))
    logs = whole.train()
    assert logs["valid/loss"] < 4.5
    assert "valid/perplexity" in logs
    build_trainer(packed_run(tmp_path, "resumed", "trainer.max_steps=4", "trainer.schedule=null")).train()
    part = build_trainer(packed_run(tmp_path, "resumed", "trainer.schedule=null"), accept_changes=True)
    assert part.step == 4
    part.train()
    straight = build_trainer(packed_run(tmp_path, "straight", "trainer.schedule=null"))
    straight.train()
    weights, expected = part.model.state_dict(), straight.model.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_run_with_adapters_is_resumed_to_the_bit(tmp_path):
    model = f"model={{type: transformers:LlamaForCausalLM, {', '.join(f'{k}: {v}' for k, v in LLAMA.items())}, "
    model += "lora: {match: '*.q_proj', rank: 2, dropout: 0.1}}"
    build_trainer(packed_run(tmp_path, "resumed", model, "trainer.max_steps=4", "trainer.schedule=null")).train()
    resumed = build_trainer(packed_run(tmp_path, "resumed", model, "trainer.schedule=null"), accept_changes=True)
    assert resumed.step == 4
    resumed.train()
    straight = build_trainer(packed_run(tmp_path, "straight", model, "trainer.schedule=null"))
    straight.train()
    weights, expected = resumed.model.state_dict(), straight.model.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert any(name.endswith("lora_b") and value.any() for name, value in expected.items())


def test_packed_documents_do_not_see_each_other():
    torch.manual_seed(0)
    sizes = {**LLAMA, "rms_norm_eps": 1e-5, "initializer_range": 0.3}
    theirs = build(transformers.LlamaForCausalLM, sizes).eval()
    ours = Llama(
        vocab_size=61, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, tie_embeddings=False
    ).eval()
    ours.load_state_dict(theirs.state_dict())
    row = {
        "input_ids": TOKENS[:1],
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]),
        "document_ids": torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]]),
    }
    torch.testing.assert_close(theirs(**row).logits, ours(**row)["logits"], atol=1e-5, rtol=1e-5)


def test_weights_drawn_anew_follow_from_the_seed(llama_folder):
    heads = []
    for _ in range(2):
        torch.manual_seed(5)
        settings = {"num_labels": 3, "pad_token_id": 0}
        heads.append(build(transformers.LlamaForSequenceClassification, settings, pretrained=llama_folder).score.weight)
    assert torch.equal(*heads)


ENCODER_DECODER = {
    **{"vocab_size": 61, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2},
}


@pytest.mark.parametrize("name", ["WhisperForConditionalGeneration", "MarianMTModel"])
def test_what_a_class_freezes_by_itself_is_frozen_also_where_weights_are_loaded(tmp_path, name):
    target = getattr(transformers, name)
    target(target.config_class(**ENCODER_DECODER)).save_pretrained(tmp_path)
    built, loaded = build(target, ENCODER_DECODER), build(target, pretrained=tmp_path)
    frozen = [{name for name, one in each.named_parameters() if not one.requires_grad} for each in (built, loaded)]
    assert frozen[0] == frozen[1]
    assert "model.encoder.embed_positions.weight" in frozen[1]


class OwnLlama(transformers.LlamaForCausalLM):
    """A user's subclass whose constructor does more than to make weights."""

    def __init__(self, config):
        super().__init__(config)
        self.extra = torch.nn.Linear(2, 2)
        self.scale = float(torch.rand(()))
        self.decayed = [one for one in self.parameters() if one.dim() > 1]
        self.model.norm.weight.requires_grad = False
        self.model.embed_tokens.weight.register_hook(lambda gradient: gradient * 0)
        self.register_buffer("noise", torch.rand(3), persistent=False)
        self.post_init()


@pytest.mark.parametrize("is_auto", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_user_s_subclass_is_built_in_full_and_then_filled(tmp_path, tied, is_auto, monkeypatch):
    torch.manual_seed(5)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied))
    theirs.generation_config.eos_token_id = [2, 7]
    theirs.save_pretrained(tmp_path)
    target = OwnLlama
    if is_auto:
        target = transformers.AutoModelForCausalLM
        monkeypatch.setitem(target._model_mapping._extra_content, transformers.LlamaConfig, OwnLlama)
    torch.manual_seed(3)
    expected = build(OwnLlama, {**LLAMA, "tie_word_embeddings": tied})
    torch.manual_seed(3)
    model, report = build_transformers(target, {}, pretrained=tmp_path)
    assert type(model) is OwnLlama
    assert set(report.missing) == {"extra.weight", "extra.bias"}
    assert model.scale == expected.scale
    assert torch.equal(model.noise, expected.noise)
    assert torch.equal(model.extra.weight, expected.extra.weight)
    assert {id(one) for one in model.decayed} <= {id(one) for one in model.parameters()}
    assert {name for name, one in model.named_parameters() if not one.requires_grad} == {"model.norm.weight"}
    for name, weight in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.generation_config.eos_token_id == [2, 7]
    assert model.config._name_or_path == ""
    assert model.training


def test_strict_that_is_asked_for_rejects_a_head_that_another_class_lacks(llama_folder, tmp_path):
    transformers.LlamaModel.from_pretrained(llama_folder).save_pretrained(tmp_path)
    _, report = build_transformers(transformers.LlamaForCausalLM, {}, pretrained=tmp_path)
    assert report.missing == ("lm_head.weight",)
    with raises(CheckpointError, "lm_head.weight"):
        build(transformers.LlamaForCausalLM, pretrained=tmp_path, strict=True)


def test_a_weight_of_whole_numbers_is_rejected_with_its_file_and_key(llama_folder, tmp_path):
    tensors = load_file(llama_folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(llama_folder / "config.json", tmp_path)
    with raises(CheckpointError, "model.safetensors", "model.norm.weight"):
        build(transformers.LlamaForCausalLM, pretrained=tmp_path)


def test_a_value_that_transformers_looks_up_in_vain_is_named_with_its_setting():
    rope = {"rope_type": "weird", "rope_theta": 10000.0}
    with raises(ConfigError, "weird", "rope_parameters.rope_type"):
        build(transformers.LlamaForCausalLM, {**LLAMA, "rope_parameters": rope})
