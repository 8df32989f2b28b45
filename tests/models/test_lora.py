"""LoRA: the first forward is the same, only what is named learns, and merging changes no answer."""

import copy

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright.errors import ConfigError
from trainwright.models.llama import Llama
from trainwright.models.lora import LoRALinear, add_lora, load_lora_state, lora_state, merge_lora

TOKENS = torch.arange(24).reshape(2, 12) % 17


def small_llama():
    torch.manual_seed(0)
    return Llama(vocab_size=17, hidden_size=16, num_layers=2, num_heads=2, max_positions=16)


def train_a_little(model, steps=3):
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.05)
    for _ in range(steps):
        model(TOKENS, labels=TOKENS)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(TOKENS)["logits"]


def test_the_first_forward_is_equal_to_the_bit():
    model = small_llama()
    before = logits(model)
    names = add_lora(model, match=["*.q_proj", "*.v_proj"], rank=4)
    assert names == [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv"]
    assert torch.equal(logits(model), before)


def test_only_adapters_and_what_train_names_learn():
    model = small_llama()
    add_lora(model, match="q_proj", train="model.norm.weight")
    learning = {name for name, one in model.named_parameters() if one.requires_grad}
    adapters = {f"model.layers.{layer}.self_attn.q_proj.lora_{letter}" for layer in (0, 1) for letter in "ab"}
    assert learning == adapters | {"model.norm.weight"}
    before = copy.deepcopy(model.state_dict())
    train_a_little(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == learning


def test_the_layers_keep_the_names_of_their_weights():
    model, plain = small_llama(), small_llama()
    add_lora(model, match="*_proj")
    assert plain.state_dict().keys() < model.state_dict().keys()
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert all(name.endswith((".lora_a", ".lora_b")) for name in missing)
    assert unexpected == []


def test_merging_gives_the_same_answers_from_plain_layers():
    model = small_llama()
    untrained = logits(model)
    add_lora(model, match="*_proj", rank=4, dropout=0.1)
    trained = logits(train_a_little(model))
    assert not torch.allclose(trained, untrained, atol=1e-3)
    names = merge_lora(model)
    assert len(names) == 14
    torch.testing.assert_close(logits(model), trained, atol=1e-5, rtol=1e-5)
    assert model.state_dict().keys() == small_llama().state_dict().keys()
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}


def test_the_adapter_adds_alpha_over_rank_of_its_product():
    model = nn.Sequential(nn.Linear(6, 5))
    layer = model[0]
    add_lora(model, match="0", rank=2, alpha=3)
    nn.init.normal_(layer.lora_b)
    inputs = torch.randn(4, 6)
    expected = inputs @ (layer.weight + 1.5 * layer.lora_b @ layer.lora_a).T + layer.bias
    torch.testing.assert_close(model(inputs), expected)


def test_dropout_falls_on_the_adapter_alone_and_only_in_training():
    model = nn.Sequential(nn.Linear(50, 3))
    add_lora(model, match="0", dropout=0.5)
    inputs = torch.randn(2, 50)
    assert torch.equal(model(inputs), model.eval()(inputs))  # B is zero: what is dropped shows nowhere
    nn.init.normal_(model[0].lora_b)
    assert torch.equal(model(inputs), model(inputs))
    model.train()
    assert not torch.equal(model(inputs), model(inputs))


def test_a_layer_of_16_bits_has_an_adapter_of_32():
    model = nn.Sequential(nn.Linear(8, 8).to(torch.bfloat16))
    add_lora(model, match="0")
    nn.init.normal_(model[0].lora_b)
    inputs = torch.randn(2, 8).to(torch.bfloat16)
    before = model(inputs)
    assert model[0].lora_a.dtype == torch.float32
    assert before.dtype == torch.bfloat16
    merge_lora(model)
    assert model[0].weight.dtype == torch.bfloat16
    torch.testing.assert_close(model(inputs), before, atol=0.05, rtol=0.05)


def test_a_layer_at_two_places_stays_one_layer():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.append(model[0])
    assert add_lora(model, match="*") == ["0"]
    assert model[0] is model[2]
    assert isinstance(model[2], LoRALinear)


def test_hooks_on_a_layer_are_kept():
    model, calls = nn.Sequential(nn.Linear(2, 2)), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    add_lora(model, match="0")
    model(torch.ones(1, 2))
    assert calls == [1]


def test_a_model_on_the_meta_device_gets_adapters_there():
    with torch.device("meta"):
        model = small_llama()
    add_lora(model, match="*.q_proj")
    assert {one.device.type for one in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.reset_parameters()
            assert module.lora_b.eq(0).all()
            assert module.lora_a.ne(0).any()


def test_the_state_of_adapters_loads_into_a_twin():
    model, twin = small_llama(), small_llama()
    for each in (model, twin):
        add_lora(each, match="*.q_proj", train="model.norm.weight")
    train_a_little(model)
    state = lora_state(model)
    assert set(state) == {name for name, one in model.named_parameters() if one.requires_grad}
    load_lora_state(twin, state)
    assert torch.equal(logits(model), logits(twin))


def test_adapters_that_do_not_fit_are_named_with_both_shapes():
    model, other = small_llama(), small_llama()
    add_lora(model, match="*.q_proj", rank=4)
    add_lora(other, match=["*.q_proj", "*.k_proj"], rank=8)
    with raises(ConfigError, "q_proj.lora_a", "8", "16", "4"):
        load_lora_state(model, {name: one for name, one in lora_state(other).items() if "q_proj" in name})
    with raises(ConfigError, "k_proj.lora_a"):
        load_lora_state(model, lora_state(other))
    with raises(ConfigError):
        load_lora_state(model, {})


def test_a_glob_that_names_no_linear_layer_is_rejected_with_the_nearest():
    with raises(ConfigError, "lora.match", "*.q_prj", "*.q_proj"):
        add_lora(small_llama(), match="*.q_prj")
    with raises(ConfigError, "self_attn"):
        add_lora(small_llama(), match="self_attn")
    with raises(ConfigError, "classifier.*", "lora.train"):
        add_lora(small_llama(), match="q_proj", train="classifier.*")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 0}, ("lora.rank", "1", "0")),
        ({"rank": 2.5}, ("lora.rank",)),
        ({"rank": True}, ("lora.rank",)),
        ({"alpha": 0}, ("lora.alpha", "0")),
        ({"alpha": float("nan")}, ("lora.alpha",)),
        ({"dropout": 1.0}, ("lora.dropout", "0", "1")),
        ({"match": []}, ("lora.match",)),
        ({"match": 3}, ("lora.match",)),
    ],
)
def test_wrong_settings_are_rejected_and_change_nothing(settings, said):
    model = small_llama()
    with raises(ConfigError, *said):
        add_lora(model, **{"match": "q_proj", **settings})
    assert all(one.requires_grad for one in model.parameters())
    assert not any(isinstance(module, LoRALinear) for module in model.modules())


def test_a_second_set_of_adapters_is_rejected():
    model = small_llama()
    add_lora(model, match="q_proj")
    with raises(ConfigError):
        add_lora(model, match="k_proj")


def test_layers_whose_weight_is_read_past_them_are_rejected():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(encoder, nn.Linear(8, 8))
    with raises(ConfigError, "0.linear1", "TransformerEncoderLayer"):
        add_lora(model, match="linear*")
    with raises(ConfigError, "MultiheadAttention"):
        add_lora(model, match="out_proj")
    assert add_lora(model, match="1") == ["1"]


def test_a_subclass_with_a_forward_of_its_own_is_rejected():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    with raises(ConfigError):
        add_lora(nn.Sequential(Doubled(2, 2)), match="0")


def test_a_tied_head_is_rejected():
    with raises(ConfigError, "lm_head", "model.embed_tokens"):
        add_lora(small_llama(), match="lm_head")


def test_layers_of_transformers_are_adapted_but_its_conv1d_is_rejected():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    bert = transformers.BertModel(transformers.BertConfig(intermediate_size=32, **sizes)).eval()
    before = bert(TOKENS).last_hidden_state
    assert add_lora(bert, match=["*.query", "*.value"]) == [
        "encoder.layer.0.attention.self.query",
        "encoder.layer.0.attention.self.value",
    ]
    assert torch.equal(bert(TOKENS).last_hidden_state, before)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=16, **sizes))
    with raises(ConfigError, "c_attn"):
        add_lora(gpt2, match="c_attn")
