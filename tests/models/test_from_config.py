"""The model section: build, load, replace, adapt, freeze, in this order, with the place of each mistake."""

import json
from pathlib import Path

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright import RunConfig
from trainwright.errors import CheckpointError, ConfigError, TrainwrightError
from trainwright.models.from_config import build_model_section
from trainwright.models.llama import Llama
from trainwright.models.lora import LoRALinear

transformers = pytest.importorskip("transformers")

LLAMA = "hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32, vocab_size: 61"

OWN_PARTS = """
from torch import nn

class Narrow(nn.Module):
    def __init__(self, *, width, replaces):
        super().__init__()
        self.inner = nn.Linear(replaces.gate_proj.in_features, width)
        self.outer = nn.Linear(width, replaces.gate_proj.in_features)

    def forward(self, hidden):
        return self.outer(self.inner(hidden).relu())

class AnyKeywords(nn.Module):
    def __init__(self, **keywords):
        super().__init__()
        assert not keywords
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "own.py").write_text(OWN_PARTS)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "published")
    return tmp_path


def build(project, section):
    file = project / "run.yaml"
    file.write_text(f"seed: 1\nmodel: {{{section}}}\ntrainer: {{max_steps: 1}}\n")
    config = RunConfig.load(file)
    torch.manual_seed(0)
    return build_model_section(config.model, project_dir=project, origin=config.origin)[0]


def learning(model):
    return {name for name, one in model.named_parameters() if one.requires_grad}


def test_a_section_of_transformers_is_built_from_keywords(project):
    model = build(project, f"type: transformers:LlamaForCausalLM, {LLAMA}")
    assert type(model) is transformers.LlamaForCausalLM


@pytest.mark.parametrize("name", ["llama", "transformers:AutoModelForCausalLM"])
def test_a_folder_beside_the_run_file_gives_sizes_and_weights_in_float32(project, name):
    model = build(project, f"type: {name}, pretrained: published")
    expected = transformers.LlamaForCausalLM.from_pretrained(project / "published").state_dict()
    weights = model.state_dict()
    assert all(torch.equal(weights[key], expected[key].float()) for key in expected)
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_what_stands_in_the_section_changes_the_folder_s_settings(project):
    assert build(project, "type: llama, pretrained: published, dropout: 0.5").settings["dropout"] == 0.5


def test_replacements_come_after_the_weights_and_are_trained_beside_adapters(project):
    model = build(
        project,
        "type: llama, pretrained: published, replace: {layers.0.mlp: {type: own.py:Narrow, width: 4}}, "
        "lora: {match: '*.q_proj', rank: 2}",
    )
    narrow = {f"model.layers.0.mlp.{name}.{kind}" for name in ("inner", "outer") for kind in ("weight", "bias")}
    adapters = {f"model.layers.{layer}.self_attn.q_proj.lora_{letter}" for layer in (0, 1) for letter in "ab"}
    assert learning(model) == narrow | adapters
    expected = transformers.LlamaForCausalLM.from_pretrained(project / "published").state_dict()
    key = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[key], expected[key].float())


def test_a_head_that_the_files_lack_is_trained_beside_adapters(project):
    model = build(
        project,
        "type: transformers:AutoModelForSequenceClassification, pretrained: published, num_labels: 3, "
        "pad_token_id: 0, lora: {match: q_proj}",
    )
    assert {name for name in learning(model) if "lora" not in name} == {"score.weight"}


def test_adapters_reach_into_replacements(project):
    model = build(
        project,
        f"type: transformers:LlamaForCausalLM, {LLAMA}, replace: {{mlp: {{type: own.py:Narrow, width: 4}}}}, "
        "lora: {match: inner}",
    )
    assert isinstance(model.model.layers[0].mlp.inner, LoRALinear)


def test_freezing_is_last(project):
    model = build(project, f"type: transformers:LlamaForCausalLM, {LLAMA}, lora: {{match: q_proj}}, freeze: '*.lora_a'")
    assert {name.rpartition(".")[2] for name in learning(model)} == {"lora_b"}


def test_a_bare_type_replaces_and_keywords_of_any_name_get_no_old_module(project):
    model = build(project, f"type: transformers:LlamaForCausalLM, {LLAMA}, replace: {{mlp: own.py:AnyKeywords}}")
    assert type(model.model.layers[1].mlp).__name__ == "AnyKeywords"


def test_a_plain_module_loads_a_folder_by_its_own_names(project):
    from safetensors.torch import save_file

    (project / "weights").mkdir()
    layer = nn.Linear(3, 2)
    save_file(layer.state_dict(), project / "weights" / "model.safetensors")
    model = build(project, "type: torch.nn:Linear, in_features: 3, out_features: 2, pretrained: weights")
    assert torch.equal(model.weight, layer.weight)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("type: llama, vocab_size: 61, lora: {match: q_prj}", ("run.yaml:2", "model.lora.match")),
        (
            "type: llama, vocab_size: 61, lora: {mtach: q_proj}",
            ("run.yaml:2", "match", "model.lora.mtach"),
        ),
        ("type: llama, vocab_size: 61, lora: 3", ("run.yaml:2", "model.lora")),
        ("type: llama, vocab_size: 61, replace: {mpl: torch.nn:Identity}", ("run.yaml:2", "model.replace")),
        ("type: llama, vocab_size: 61, replace: {mlp: {width: 3}}", ("run.yaml:2", "mlp", "model.replace")),
        ("type: llama, vocab_size: 61, replace: {mlp: own.py:Narow}", ("model.replace.type", "Narrow")),
        ("type: llama, vocab_size: 61, replace: {mlp: own.py:Narrow}", ("model.replace", "width")),
        ("type: llama, vocab_size: 61, freeze: head}", ("run.yaml:2", "head", "model.freeze")),
        ("type: llama, pretrained: {fodler: a}", ("run.yaml:2", "model.pretrained")),
        ("type: llama, pretrained: {folder: a, stict: false}", ("run.yaml:2", "model.pretrained.stict")),
        ("type: llama, pretrained: {folder: a, dtype: 16}", ("run.yaml:2", "model.pretrained.dtype", "16")),
        (
            "type: llama, pretrained: {folder: a, dtype: int8}",
            ("run.yaml:2", "int8", "model.pretrained.dtype"),
        ),
        (
            "type: llama, pretrained: {folder: a, dtype: [bf16]}",
            ("run.yaml:2", "model.pretrained.dtype"),
        ),
        (
            "type: llama, pretrained: {folder: a, dtype: {a: 1}}",
            ("run.yaml:2", "model.pretrained.dtype"),
        ),
        ("type: llama, pretrained: {folder: a, strict: nope}", ("run.yaml:2", "model.pretrained.strict")),
        (
            "type: llama, pretrained: {folder: a, allow_pickle: 1}",
            ("run.yaml:2", "model.pretrained.allow_pickle"),
        ),
        ("type: llama, pretrained: {folder: a, home_path: 1}", ("run.yaml:2", "model.pretrained.home_path")),
        (
            "type: transformers:LlamaForCausalLM, dtype: bf16, pretrained: {folder: published, dtype: fp32}",
            ("run.yaml:2", "pretrained.dtype"),
        ),
        (
            "type: transformers:LlamaForCausalLM, torch_dtype: bf16, pretrained: {folder: published, dtype: bf16}",
            ("run.yaml:2", "torch_dtype", "pretrained.dtype"),
        ),
        ("type: llama, preset: tiny, pretrained: published", ("run.yaml:2",)),
        (
            "type: llama, pretrained: published, hiden_size: 3",
            ("hiden_size", "hidden_size"),
        ),
        ("type: torch.nn.functional:relu_", ()),
        ("type: transformers:LlamaForCausalLM, hiden_size: 3", ("run.yaml:2", "LlamaConfig")),
        ("type: transformers:GPT2LMHeadModel, pretrained: published", ("run.yaml:2", "gpt2")),
    ],
)
def test_mistakes_name_their_place(project, section, said):
    with raises(ConfigError, *said):
        build(project, section.replace("head}", "head"))


def test_a_preset_and_a_folder_are_taken_back_by_null(project):
    assert build(project, "type: llama, preset: null, pretrained: published").settings["hidden_size"] == 16
    model = build(project, "type: llama, preset: tiny, pretrained: null, lora: null, replace: null, freeze: null")
    assert model.settings["hidden_size"] == 64
    assert build(project, "type: llama, vocab_size: 61, preset: null").settings["vocab_size"] == 61
    settings = "{folder: published, strict: null, dtype: null, home_path: null, allow_pickle: null}"
    assert build(project, f"type: llama, pretrained: {settings}").lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("type: llama\n  preset: tny", ("run.yaml:3", "tny")),
        ("type: llama\n  pretrained: published\n  preset: tiny", ("run.yaml:4",)),
        (
            "type: llama\n  pretrained: published\n  hidden_size: 32",
            ("run.yaml:3", "model.pretrained", "model.safetensors"),
        ),
        (
            "type: llama\n  pretrained: run",
            ("run.yaml:3", "model.pretrained"),
        ),
        (
            "type: transformers:LlamaForCausalLM\n  pretrained: published\n  hidden_size: 32",
            ("run.yaml:3", "model.pretrained"),
        ),
        ("type: llama\n  pretrained: [a]", ("run.yaml:3", "model.pretrained", "1")),
        ("type: llama\n  lora: null\n  pretrained: ./none", ("run.yaml:4", "org/name")),
        (
            "type: bert\n  pretrained: published\n  dropout: 0.1",
            ("llama", "config.json", "model_type"),
        ),
    ],
)
def test_mistakes_name_the_line_of_their_key(project, section, said):
    (project / "run").mkdir()
    (project / "run" / "config.yaml").touch()
    file = project / "run.yaml"
    file.write_text(f"model:\n  {section}\n")
    config = RunConfig.load(file)
    with raises(TrainwrightError, *said):
        build_model_section(config.model, project_dir=project, origin=config.origin)


def test_a_head_that_ours_lacks_is_rejected_unless_not_strict(project):
    weights = project / "published" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    state = load_file(weights)
    del state["lm_head.weight"]
    save_file(state, weights)
    with raises(CheckpointError, "lm_head.weight"):
        build(project, "type: llama, pretrained: published")
    model = build(project, "type: llama, pretrained: {folder: published, strict: false}, lora: {match: q_proj}")
    assert isinstance(model, Llama)
    assert "lm_head.weight" in learning(model)


def test_the_folder_s_place_is_the_run_file_s_not_the_current_one(project, monkeypatch):
    monkeypatch.chdir("/")
    assert isinstance(build(project, "type: llama, pretrained: published"), Llama)
    assert Path.cwd() == Path("/")


def test_a_model_that_freezes_parts_of_itself_does_so(project):
    (project / "own.py").write_text(
        "from trainwright.models.llama import Llama\n\n\nclass Half(Llama):\n"
        "    def disable_untrainable_params(self):\n        self.model.norm.weight.requires_grad_(False)\n"
    )
    model = build(project, "type: own.py:Half, preset: tiny")
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.norm.weight"]


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "many"), ("num_hidden_layers", None), ("vocab_size", -2)])
@pytest.mark.parametrize("name", ["llama", "transformers:LlamaForCausalLM"])
def test_bad_values_in_config_json_name_the_run_file_and_the_config(project, name, key, value):
    path = project / "published" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with raises((ConfigError, CheckpointError), "published/config.json", at="run.yaml:2"):
        build(project, f"type: {name}, pretrained: published")


def test_a_plain_module_in_16_bits_has_a_head_of_16_bits_that_its_files_lack(project):
    from safetensors.torch import save_file

    (project / "weights").mkdir()
    save_file({"weight": torch.ones(2, 3)}, project / "weights" / "model.safetensors")
    section = "type: torch.nn:Linear, in_features: 3, out_features: 2, "
    model = build(project, section + "pretrained: {folder: weights, strict: false, dtype: bf16}")
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert model.bias.any()


def test_what_a_folder_told_builds_its_model_again_without_it(project):
    for name in ("llama", "transformers:LlamaForCausalLM"):
        section = f"type: {name}, pretrained: {{folder: published, dtype: bf16}}, lora: {{match: q_proj}}"
        (project / "run.yaml").write_text(f"model: {{{section}}}\n")
        config = RunConfig.load(project / "run.yaml")
        parts = {"project_dir": project, "origin": config.origin}
        first, facts = build_model_section(config.model, **parts)
        (project / "published").rename(project / "gone")
        again, same = build_model_section(config.model, **parts, kept=facts)
        (project / "gone").rename(project / "published")
        assert same == facts
        assert learning(again) == learning(first)
        dtypes = [{key: (one.dtype, one.shape) for key, one in model.state_dict().items()} for model in (first, again)]
        assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize(
    ("section", "override", "said"),
    [
        ("type: llama, preset: tiny", "model.preset=tyni", ("tiny",)),
        ("type: llama, preset: tiny", "model.dropout=3", ("3",)),
        ("type: llama, preset: tiny, dropout: 0.1", "model.num_layers=0", ("num_layers", "0")),
        ("type: llama, preset: tiny", "model.nm_layers=1", ("nm_layers",)),
        ("type: llama, pretrained: published", "model.dropout=3", ("3",)),
        ("type: llama, pretrained: published", "model.pretrained=''", ()),
        ("type: llama, preset: tiny, lora: {match: q_proj}", "model.lora.rank=0", ("1",)),
        ("type: llama, preset: tiny, lora: {match: q_proj}", "model.lora.r=8", ()),
        ('type: "transformers:LlamaForCausalLM"', "model.hidden_sise=8", ("hidden_sise",)),
    ],
)
def test_a_value_of_an_override_is_not_blamed_on_the_file(project, section, override, said):
    (project / "run.yaml").write_text(f"seed: 1\nmodel: {{{section}}}\ntrainer: {{max_steps: 1}}\n")
    config = RunConfig.load(project / "run.yaml", [override])
    with raises(TrainwrightError, *said, override):
        build_model_section(config.model, project_dir=project, origin=config.origin)


def test_what_a_folder_cannot_do_is_blamed_on_who_chose_the_folder(project):
    path = project / "published" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mlp_bias": True}))
    (project / "run.yaml").write_text("seed: 1\nmodel: {type: llama}\ntrainer: {max_steps: 1}\n")
    config = RunConfig.load(project / "run.yaml", ["model.pretrained=published"])
    with raises(ConfigError, "override model.pretrained=", "AutoModelForCausalLM"):
        build_model_section(config.model, project_dir=project, origin=config.origin)


OWN_ARGUMENTS = """
from torch import nn

class Reserved(nn.Module):
    def __init__(self, width=1, pretrained=None, freeze=None, **further):
        super().__init__()
        self.given = {"width": width, "pretrained": pretrained, "freeze": freeze, **further}

class OneMapping(nn.Module):
    def __init__(self, args, width=1):
        super().__init__()
        self.given = args
"""


def given_to(project, section):
    (project / "models").mkdir(exist_ok=True)
    (project / "models" / "own_arguments.py").write_text(OWN_ARGUMENTS)
    (project / "run.yaml").write_text(f"seed: 1\nmodel: {section}\n")
    config = RunConfig.load(project / "run.yaml")
    assert RunConfig.from_dict(config.to_dict()) == config
    return build_model_section(config.model, project_dir=project, origin=config.origin)[0].given


def test_args_passes_reserved_names_and_builds_nothing_in_them(project):
    section = "{type: own_arguments.Reserved, width: 2, args: {pretrained: true, freeze: 3, x: {type: 'a:B'}}}"
    assert given_to(project, section) == {"width": 2, "pretrained": True, "freeze": 3, "x": {"type": "a:B"}}


def test_a_constructor_with_a_parameter_named_args_gets_the_mapping(project):
    assert given_to(project, "{type: own_arguments.OneMapping, args: {depth: 3}}") == {"depth": 3}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{type: own_arguments.Reserved, args: [1]}", ["model.args"]),
        ("{type: own_arguments.Reserved, width: 1, args: {width: 2}}", ["model.args.width", "model.width"]),
        ("{type: llama, preset: tiny, args: {dropot: 2}}", ["dropot"]),
    ],
)
def test_wrong_args_are_located(project, section, said):
    with raises(ConfigError, *said, at="run.yaml:2"):
        given_to(project, section)
