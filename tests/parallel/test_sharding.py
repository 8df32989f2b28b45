"""Rules become a plan, without any process: what is split how, what no rule speaks of, and what cannot be."""

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright.errors import ConfigError
from trainwright.models.bert import Bert, BertClassifier
from trainwright.models.cnn import CNN
from trainwright.models.gpt2 import GPT2
from trainwright.models.llama import Llama
from trainwright.models.lora import add_lora
from trainwright.models.t5 import T5
from trainwright.models.vit import ViT
from trainwright.parallel.sharding import packaged_files, packaged_rules, parse_rules, plan_sharding, read_rules

TWO = {"tensor": 2}
SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 4}
SHIPPED = {
    "llama": lambda: Llama(vocab_size=32, num_kv_heads=2, tie_embeddings=False, attention_bias="all", **SMALL),
    "gpt2": lambda: GPT2(vocab_size=32, **SMALL),
    "bert": lambda: Bert(vocab_size=32, **SMALL),
    "bert_classifier": lambda: BertClassifier(vocab_size=32, num_labels=2, **SMALL),
    "vit": lambda: ViT(num_labels=2, image_size=8, patch_size=4, **SMALL),
    "t5": lambda: T5(vocab_size=32, **SMALL),
    "t5_gated": lambda: T5(vocab_size=32, feed_forward="gated-gelu", tie_embeddings=False, **SMALL),
}


class Net(nn.Module):
    """A user's model: a block with a norm between its split layers, and a head."""

    def __init__(self, hidden=8):
        super().__init__()
        self.block = nn.ModuleDict({"up": nn.Linear(4, hidden), "norm": nn.LayerNorm(hidden), "down": nn.Linear(8, 4)})
        self.head = nn.Linear(4, 3)


def plan_of(rules, model=None, sizes=TWO):
    return plan_sharding(model or Net(), parse_rules(rules), sizes)


UP_AND_DOWN = {"block.up.weight": ["tensor", None], "block.down.weight": [None, "tensor"], "block.norm.*": [None]}


@pytest.mark.parametrize("make", SHIPPED.values(), ids=SHIPPED)
def test_packaged_rules_cover_every_parameter_of_a_shipped_model(make):
    model = make()
    plan = plan_sharding(model, packaged_rules(model), TWO)
    assert (plan.uncovered, plan.unmatched, plan.remarks()) == ([], [], [])
    # All large matrices of both layers: queries, keys, values and outputs, and those of the MLP.
    assert sum(layout.tensor_dim is not None for layout in plan.layouts.values()) >= 2 * 4


def test_every_packaged_file_is_the_rules_of_a_model_and_is_found_by_name(tmp_path):
    assert set(packaged_files()) == {"llama", "gpt2", "bert", "vit", "t5"}
    for name in packaged_files():
        assert read_rules(name, project_dir=tmp_path).parameters


def test_a_subclass_of_a_shipped_model_has_its_rules_and_other_models_have_none():
    class Mine(Llama):
        pass

    assert packaged_rules(Mine(vocab_size=8, **SMALL)) == packaged_rules(Llama(vocab_size=8, **SMALL))
    assert packaged_rules(Net()) is None


def test_rules_say_dims_along_tensor_and_data():
    plan = plan_of({"parameters": {**UP_AND_DOWN, "block.up.weight": ["tensor", "fsdp"], "head.*": None}})
    assert plan.layouts["block.up.weight"].axes == (("tensor",), ("fsdp",))
    assert (plan.layouts["block.up.weight"].tensor_dim, plan.data_dim("block.up.weight")) == (0, 1)
    assert (plan.layouts["block.down.weight"].tensor_dim, plan.data_dim("block.down.weight")) == (1, None)
    assert (plan.layouts["head.weight"].tensor_dim, plan.layouts["head.weight"].rule) == (None, "head.*")


def test_one_dim_may_be_sharded_along_two_axes():
    plan = plan_of({"parameters": {**UP_AND_DOWN, "block.up.weight": [["fsdp", "tensor"], None]}})
    assert (plan.layouts["block.up.weight"].tensor_dim, plan.data_dim("block.up.weight")) == (0, 0)


def test_the_first_rule_that_matches_decides():
    plan = plan_of({"parameters": {"block.up.weight": ["tensor", None], "**": None}})
    assert plan.layouts["block.up.weight"].tensor_dim == 0
    assert plan.layouts["block.down.weight"].rule == "**"
    assert plan.uncovered == []


def test_a_flat_mapping_is_sorted_by_what_its_globs_name():
    plan = plan_of({**UP_AND_DOWN, "block.down": [None, "tensor", None], "block.up[1]": ["tensor"], "head": [None]})
    assert plan.layouts["block.down.weight"].tensor_dim == 1
    assert plan.outputs == {
        "block.down": {None: ((), ("tensor",), ())},
        "block.up": {1: (("tensor",),)},
        "head": {None: ((),)},
    }


def test_rules_without_effect_and_parameters_without_rules_are_reported_by_name():
    plan = plan_of({"parameters": {**UP_AND_DOWN, "blocks.up.weight": [None]}, "outputs": {"tail": [None]}})
    assert plan.unmatched == ["blocks.up.weight", "tail"]
    assert plan.uncovered == ["block.up.bias", "block.down.bias", "head.weight", "head.bias"]
    assert "blocks.up.weight, tail" in plan.remarks()[0]
    assert "block.up.bias, block.down.bias, head.weight, head.bias" in plan.remarks()[1]


def test_a_flat_rule_that_matches_nothing_is_reported():
    assert plan_of({**UP_AND_DOWN, "tail": [None]}).unmatched == ["tail"]


@pytest.mark.parametrize("extra", [{}, {"**": None, "tail": [None]}], ids=["uncovered", "unmatched"])
def test_strict_rules_reject_what_is_otherwise_reported(extra):
    with raises(ConfigError, "model.sharding", *extra.keys() - {"**"}):
        plan_of({"parameters": {**UP_AND_DOWN, **extra}, "strict": True})


def test_on_a_pipeline_stage_unmatched_rules_are_not_reported():
    rules = {"parameters": {**UP_AND_DOWN, "layers.7.weight": [None], "**": None}, "strict": True}
    assert plan_of(rules, sizes={"tensor": 2, "pipeline": 2}).unmatched == []


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"head.weight": ["model", None]}, ("model", "head.weight", "tensor")),
        ({"parameters": {"head.weight": ["tensro", None]}}, ("tensor", "tensro")),
        ({"parameters": {"head.weight": ["context", None]}}, ("context", "tensor")),
        ({"head.weight": ["context", None]}, ("context", "tensor")),
        ({"head.weight": ["tensor", "tensor"]}, ("tensor",)),
        ({"head.weight": ["tensor"]}, ("head.weight", "1", "3", "4")),
        ({"head.weight": "tensor"}, ()),
        ({"head.weight": [1, None]}, ()),
        ({"parameters": {}, "head": [None]}, ("head",)),
        ({"parameters": ["head"]}, ("model.sharding.parameters",)),
        ({"strict": "yes"}, ("model.sharding.strict",)),
        ({"fused": {"head": 1}}, ("model.sharding.fused",)),
        ({"on_parts": 3}, ("model.sharding.on_parts",)),
        ({"head[x]": [None]}, ("0",)),
        (
            {"head.weight": ["tensor", None], "**": None},
            ("0", "head.weight", "3", "4", "2", "tensor"),
        ),
        ({"**": None}, ("2", "model.sharding", "tensor")),
    ],
)
def test_rules_that_cannot_be_are_rejected(rules, message):
    with raises(ConfigError, *message):
        plan_of(rules)


def test_more_tensor_ranks_than_key_value_heads_are_rejected_by_the_setting():
    model = Llama(vocab_size=32, num_kv_heads=2, **SMALL)
    with raises(ConfigError, "model.num_kv_heads", "2", "4", "tensor", "k_proj"):
        plan_sharding(model, packaged_rules(model), {"tensor": 4})


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "t5"])
def test_heads_that_do_not_divide_are_rejected_by_the_setting(name):
    model = SHIPPED[name]()
    with raises(ConfigError, "model.num_heads", "4", "3", "tensor"):
        plan_sharding(model, packaged_rules(model), {"tensor": 3})


def test_a_model_without_rules_is_rejected_where_the_tensor_axis_has_ranks_and_taken_where_not():
    model = CNN(num_labels=2)
    assert packaged_rules(model) is None
    with raises(ConfigError, "2", "tensor"):
        plan_sharding(model, None, TWO)
    assert plan_sharding(model, None, {"tensor": 1, "fsdp": 2}).remarks() == []


def test_a_vocabulary_may_be_split_unevenly_and_fsdp_then_takes_the_other_dim():
    model = Llama(vocab_size=33, tie_embeddings=False, **SMALL)
    plan = plan_sharding(model, packaged_rules(model), TWO)
    assert plan.uneven == {"model.embed_tokens.weight", "lm_head.weight"}
    assert plan.data_dim("lm_head.weight") == 1
    assert plan.data_dim("model.layers.0.mlp.up_proj.weight") is None


def test_two_rules_for_one_tied_parameter_must_agree():
    model = Llama(vocab_size=32, tie_embeddings=True, **SMALL)
    rules = parse_rules({"model.embed_tokens.weight": ["tensor", None], "lm_head.weight": [None, "tensor"]})
    with raises(ConfigError, "lm_head.weight"):
        plan_sharding(model, rules, TWO)


def test_a_tied_parameter_is_covered_under_all_of_its_names():
    model = Llama(vocab_size=32, tie_embeddings=True, **SMALL)
    plan = plan_sharding(model, parse_rules({"model.embed_tokens.weight": ["tensor", None]}), TWO)
    assert plan.layouts["lm_head.weight"].tensor_dim == 0
    assert "lm_head.weight" not in plan.uncovered


def test_adapters_are_sharded_like_their_weights():
    model = SHIPPED["llama"]()
    add_lora(model, match=["q_proj", "o_proj"], rank=2)
    layouts = plan_sharding(model, packaged_rules(model), TWO).layouts
    attention = "model.layers.0.self_attn"
    dims = {
        name: layouts[f"{attention}.{name}"].tensor_dim
        for name in ("q_proj.lora_a", "q_proj.lora_b", "o_proj.lora_a", "o_proj.lora_b")
    }
    assert dims == {"q_proj.lora_a": None, "q_proj.lora_b": 0, "o_proj.lora_a": 1, "o_proj.lora_b": None}


def test_a_parameter_between_sharded_layers_needs_a_rule():
    split = {"block.up.weight": ["tensor", None], "block.down.weight": [None, "tensor"]}
    with raises(ConfigError, "block.norm.weight", "on_parts"):
        plan_of({"parameters": split})
    assert plan_of({"parameters": split, "on_parts": ["block.norm.*"]}).on_parts == {
        "block.norm.weight",
        "block.norm.bias",
    }
    assert plan_of({"parameters": {**split, "block.norm.*": [None]}}).on_parts == frozenset()


def test_rules_are_read_from_a_file_of_the_project_and_errors_name_it(tmp_path):
    (tmp_path / "rules.yaml").write_text("head.weight: [tensor, null]\nstrict: true\n")
    rules = read_rules("rules.yaml", project_dir=tmp_path)
    assert (rules.flat, rules.strict, rules.is_packaged) == ({"head.weight": (("tensor",), ())}, True, False)
    (tmp_path / "wrong.yaml").write_text("head.weight: [rows, null]\n")
    with raises(ConfigError, "rows", "wrong.yaml", "model.sharding", "head.weight"):
        read_rules("wrong.yaml", project_dir=tmp_path)
    (tmp_path / "list.yaml").write_text("- head\n")
    with raises(ConfigError, "1"):
        read_rules("list.yaml", project_dir=tmp_path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lama", ("run.yaml:3", "llama", "model.sharding")),
        ("rules/none.yaml", ("run.yaml:3", "model.sharding", "rules/none.yaml")),
        (3, ("run.yaml:3", "model.sharding", "3")),
        ({"a": 3}, ("run.yaml:3", "model.sharding")),
    ],
)
def test_a_setting_that_names_no_rules_is_rejected_with_its_location(setting, message, tmp_path):
    with raises(ConfigError, *message):
        read_rules(setting, project_dir=tmp_path, origin=lambda dotted: "run.yaml:3")


def test_a_plan_needs_no_memory_for_the_weights():
    with torch.device("meta"):
        model = Llama(vocab_size=32000, hidden_size=4096, num_layers=3, num_heads=32, num_kv_heads=8)
    plan = plan_sharding(model, packaged_rules(model), {"tensor": 8})
    assert plan.layouts["model.layers.2.mlp.down_proj.weight"].tensor_dim == 1
