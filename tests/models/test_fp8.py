"""Which linear layers train in fp8: the defaults, globs, and layers that cannot."""

import pytest
import torch
from tests.messages import check_message, raises
from torch import nn

from trainwright.errors import ConfigError
from trainwright.models.bert import Bert
from trainwright.models.fp8 import SMALLEST_GAIN, gains_from_fp8, use_fp8
from trainwright.models.gpt2 import GPT2
from trainwright.models.layers.fp8_linear import Fp8Linear, Fp8LoRALinear
from trainwright.models.llama import Llama
from trainwright.models.lora import add_lora, merge_lora
from trainwright.models.t5 import T5
from trainwright.models.vit import ViT


def on_meta(kind, **settings):
    with torch.device("meta"):
        return kind(**settings)


def llama(**changes):
    sizes = {"vocab_size": 512, "hidden_size": 2048, "num_layers": 4, "num_heads": 32, "num_kv_heads": 4}
    return on_meta(Llama, **{**sizes, "intermediate_size": 5632, **changes})


PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def origin(name):
    return f"run.yaml:{len(name)}"


def test_the_head_and_the_outer_blocks_stay_in_bf16():
    model = llama()
    before = {name: id(value) for name, value in model.named_parameters()}
    found = use_fp8(model)
    assert found.chosen == tuple(f"model.layers.{block}.{name}" for block in (1, 2) for name in (*PARTS, *MLP))
    assert {name for name, layer in model.named_modules() if type(layer) is Fp8Linear} == set(found.chosen)
    assert {name: id(value) for name, value in model.named_parameters()} == before
    assert model.state_dict().keys() == llama().state_dict().keys()
    check_message(found.describe(), "14 of 29", "lm_head", "tensorwise", "in the first or last block")


def test_layers_too_small_to_gain_stay_in_bf16():
    wide, narrow = llama(num_layers=3), llama(num_layers=3, intermediate_size=1280)
    assert len(use_fp8(wide).chosen) == 7, "keys and values read the same input as queries"
    found = use_fp8(narrow)
    assert [name.rpartition(".")[2] for name in found.chosen] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
    ]
    assert found.left["too small to gain"] == ("model.layers.1.mlp.down_proj",)
    square = nn.Sequential(*(nn.Linear(2 * SMALLEST_GAIN, 2 * SMALLEST_GAIN - gap) for gap in (0, 0, 16, 0)))
    assert use_fp8(square, skip=["0"]).chosen == ("1", "2")  # they are members of one list, and count together


def test_shapes_and_classes_that_cannot_be_fp8_are_named():
    class Special(nn.Linear):
        pass

    class Block(nn.Module):
        def __init__(self, odd):
            super().__init__()
            self.one, self.two, self.three = nn.Linear(2048, 2048), Special(2048, 2048), nn.Linear(2048, 2048 + odd)

    with torch.device("meta"):
        model = nn.Sequential(*(Block(8) for _ in range(4)))
    found = use_fp8(model)
    assert found.chosen == ("1.one", "2.one")
    assert type(model[1].two) is Special
    check_message(found.describe(), "Special", "divisible by 16")
    with raises(ConfigError, "runtime.fp8.match", "'three'", "divisible by 16", at=origin("runtime.fp8.match")):
        use_fp8(model, match=["three"], origin=origin)
    with raises(ConfigError, "two", "Special"):
        use_fp8(model, match=["one", "two"], origin=origin)


def test_match_names_layers_wherever_they_are_and_skip_excludes():
    model = llama(hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=1)
    found = use_fp8(model, match=["*.q_proj", "lm_head"], skip=["layers.2.*"], recipe="rowwise")
    assert found.chosen == (*(f"model.layers.{block}.self_attn.q_proj" for block in (0, 1, 3)), "lm_head")
    assert found.left["in runtime.fp8.skip"][0] == "model.layers.2.self_attn.q_proj"
    assert model.lm_head.fp8_recipe == "rowwise"
    check_message(found.describe(), "rowwise")


@pytest.mark.parametrize("setting", ["match", "skip"])
def test_a_glob_without_a_linear_layer_raises(setting):
    with raises(ConfigError, f"runtime.fp8.{setting}", "gate_projj", at=origin(f"runtime.fp8.{setting}")):
        use_fp8(llama(), **{setting: ["*.gate_projj"]}, origin=origin)


def test_a_model_without_a_layer_for_fp8_raises():
    for model in (llama(hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=1), llama(num_layers=2)):
        with raises(ConfigError, "runtime.precision", "runtime.fp8.match", at=origin("runtime.precision")):
            use_fp8(model, origin=origin)
    with raises(ConfigError, "bf16", at=origin("runtime.precision")):
        use_fp8(nn.Sequential(nn.Conv2d(1, 16, 3)), origin=origin)


@pytest.mark.parametrize(
    ("model", "number"),
    [
        (on_meta(GPT2, vocab_size=512, hidden_size=2048, num_layers=4, num_heads=16), 8),
        (on_meta(Bert, vocab_size=512, hidden_size=2048, num_layers=4, num_heads=16), 12),
        (on_meta(T5, vocab_size=512, hidden_size=2048, num_layers=3, num_heads=16), 16),
        (on_meta(ViT, num_labels=10, image_size=32, patch_size=8, hidden_size=2048, num_layers=3, num_heads=16), 6),
    ],
    ids=["gpt2", "bert", "t5", "vit"],
)
def test_shipped_models_have_blocks_with_layers_for_fp8(model, number):
    assert gains_from_fp8(model)
    found = use_fp8(model)
    assert len(found.chosen) == number, found.describe()


def test_gpt2_small_gains_nothing_from_fp8():
    model = on_meta(GPT2, vocab_size=512, hidden_size=768, num_layers=4, num_heads=12)
    assert not gains_from_fp8(model)
    assert len(use_fp8(model, match=["*.mlp.*"]).chosen) == 8


def test_layers_with_adapters_keep_them_and_merge_into_plain_ones():
    model = Llama(vocab_size=32, hidden_size=32, num_layers=3, num_heads=2, intermediate_size=64)
    add_lora(model, match="*.q_proj", rank=4)
    use_fp8(model, match=["*_proj"])
    attention = model.model.layers[1].self_attn
    assert (type(attention.q_proj), type(attention.k_proj)) == (Fp8LoRALinear, Fp8Linear)
    assert len(merge_lora(model)) == 3
    assert type(attention.q_proj) is nn.Linear


def test_adapters_of_peft_work_through_their_base_layer():
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj"]), low_cpu_mem_usage=True)
    found = use_fp8(model, match=["*.base_layer", "*.o_proj"])
    assert len(found.chosen) == 6
    assert "divisible by 16" in " ".join(found.left)


def test_layers_of_transformers_gpt2_are_named():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3))
    with raises(ConfigError, "Conv1D"):
        use_fp8(model, origin=origin)
