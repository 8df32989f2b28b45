"""Llama: equal to transformers' model on the same weights, causal, and clear about wrong sizes."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises
from tests.models.folders import reference

from trainwright.data.pack import pack
from trainwright.errors import ConfigError, DataError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.llama import Llama, default_intermediate_size

VOCABULARY = 61


def small_llama(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 32}
    return Llama(**{**sizes, **changes})


def random_tokens(*shape):
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def reference_llama(model, **changes):
    transformers = pytest.importorskip("transformers")
    attention = model.model.layers[0].self_attn
    config = transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=attention.q_proj.in_features,
        intermediate_size=model.model.layers[0].mlp.up_proj.out_features,
        num_hidden_layers=len(model.model.layers),
        num_attention_heads=attention.q_proj.out_features // attention.head_size,
        num_key_value_heads=attention.k_proj.out_features // attention.head_size,
        max_position_embeddings=model.max_positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=model.settings["tie_embeddings"],
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_logits_and_loss_equal_those_of_transformers(num_kv_heads, tie_embeddings):
    model = small_llama(num_kv_heads=num_kv_heads, tie_embeddings=tie_embeddings, initializer_range=0.3).eval()
    reference = reference_llama(model)
    reference.load_state_dict(model.state_dict(keep_vars=True))
    tokens = random_tokens(3, 20)
    labels = tokens.clone()
    labels[0, 5:9] = IGNORED_LABEL
    ours, theirs = model(tokens, labels), reference(input_ids=tokens, labels=labels)
    torch.testing.assert_close(ours["logits"], theirs.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours["loss"], theirs.loss, atol=1e-5, rtol=1e-5)


def test_weights_of_transformers_load_as_they_are():
    model = small_llama(num_kv_heads=2, tie_embeddings=False)
    reference = reference_llama(model)
    model.load_state_dict(reference.state_dict(), strict=True)
    tokens = random_tokens(2, 8)
    torch.testing.assert_close(model(tokens)["logits"], reference(input_ids=tokens).logits, atol=1e-5, rtol=1e-5)


def test_rope_theta_is_that_of_transformers():
    model = small_llama(rope_theta=500.0, initializer_range=0.3)
    reference = reference_llama(model, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    reference.load_state_dict(model.state_dict(keep_vars=True))
    tokens = random_tokens(1, 32)
    torch.testing.assert_close(model(tokens)["logits"], reference(input_ids=tokens).logits, atol=1e-5, rtol=1e-5)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral"])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
@pytest.mark.parametrize("tied", [True, False])
def test_folders_of_three_types_give_the_logits_of_transformers(tmp_path, kind, scaling, tied):
    changes = {"Llama": {"attention_bias": True}, "Mistral": {"sliding_window": None, "head_dim": 12}}.get(kind, {})
    rope = {**(scaling or {"rope_type": "default"}), "rope_theta": 500.0}
    theirs = reference(kind, rope_parameters=rope, tie_word_embeddings=tied, rms_norm_eps=1e-3, **changes)
    theirs.save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path).eval()
    assert model.settings["rope_scaling"] == scaling
    tokens = random_tokens(2, 50)
    ours, expected = model(tokens, tokens), theirs(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(ours["logits"], expected.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours["loss"], expected.loss, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
@pytest.mark.parametrize("bias", ["none", "qkv", "all"])
def test_transformers_reads_what_is_written_and_gives_the_same_logits(tmp_path, scaling, bias):
    transformers = pytest.importorskip("transformers")
    model = small_llama(
        initializer_range=0.2, num_kv_heads=2, head_size=10, rope_scaling=scaling, attention_bias=bias, rope_theta=300.0
    ).eval()
    model.save_pretrained(tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert type(theirs).__name__ == ("Qwen2ForCausalLM" if bias == "qkv" else "LlamaForCausalLM")
    tokens = random_tokens(2, 30)
    torch.testing.assert_close(model(tokens)["logits"], theirs(input_ids=tokens).logits, atol=1e-5, rtol=1e-5)


def test_settings_in_the_words_of_earlier_configs_are_read():
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}, "hidden_size": 64}
    settings = Llama.settings_from_hugging_face(old)
    assert settings["rope_theta"] == 5e5
    assert settings["rope_scaling"] == {"rope_type": "linear", "factor": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, ("gelu", "hidden_act")),
        ({"mlp_bias": True}, ("mlp_bias",)),
        ({"attention_dropout": 0.1}, ("attention_dropout", "0.1")),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("dynamic", "rope_type")),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ("yarn", "rope_type")),
        ({"rope_scaling": {"rope_type": "linear"}}, ()),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor", "0.5")),
        ({"model_type": "mistral"}, ("4096",)),
        ({"model_type": "mistral", "sliding_window": 128}, ("128",)),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, ("64",)),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, ("8",)),
    ],
)
def test_what_cannot_be_done_is_rejected_by_name_and_value(changes, message):
    with raises(ConfigError, *message):
        Llama.settings_from_hugging_face({"model_type": "llama", **changes})


def test_seventy_billion_weights_are_built_without_memory():
    with torch.device("meta"):
        model = Llama.from_preset("llama3-70b")
    assert sum(each.numel() for each in model.parameters()) == 70_553_706_496
    assert all(each.is_meta for each in model.state_dict().values())


@pytest.mark.parametrize(
    ("preset", "num_weights"),
    [
        ("tinyllama-1.1b", 1_100_048_384),
        ("llama3-1b", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("qwen2-0.5b", 494_032_768),
    ],
)
def test_presets_have_the_published_numbers_of_weights(preset, num_weights):
    with torch.device("meta"):
        model = Llama.from_preset(preset)
    assert sum(each.numel() for each in model.parameters()) == num_weights


def test_left_padding_leaves_the_real_tokens_alone():
    model = small_llama(num_kv_heads=2, initializer_range=0.3)
    tokens = random_tokens(1, 6)
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.int64), tokens), dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    logits = model(padded, attention_mask=mask)["logits"]
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:, 3:], model(tokens)["logits"], atol=1e-5, rtol=1e-5)


def test_a_mask_of_ones_changes_nothing():
    model = small_llama(initializer_range=0.3)
    tokens = random_tokens(2, 7)
    with_mask = model(tokens, attention_mask=torch.ones_like(tokens))["logits"]
    torch.testing.assert_close(with_mask, model(tokens)["logits"], atol=1e-5, rtol=1e-5)


def packed_rows(*lengths, length, borders="documents"):
    """One row of random documents, as data/pack.py makes it, and the documents."""
    documents = [random_tokens(size + 3)[3:] for size in lengths]
    packed = pack([{"input_ids": document} for document in documents], length=length, borders=borders)
    assert len(packed) == 1
    row = {name: values[None] for name, values in packed[0].items()}
    placed = [documents[number] for number, _, _ in packed.plan.row(0)]
    return row, placed


@pytest.mark.parametrize("borders", ["documents", "mask"])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_packed_documents_have_the_logits_of_each_alone(num_kv_heads, borders):
    model = small_llama(num_kv_heads=num_kv_heads, initializer_range=0.3)
    row, documents = packed_rows(9, 1, 6, 8, length=28, borders=borders)
    logits = model(**row)["logits"]
    assert logits.isfinite().all()
    start = 0
    for document in documents:
        alone = model(document[None])["logits"]
        torch.testing.assert_close(logits[:, start : start + len(document)], alone, atol=1e-5, rtol=1e-5)
        start += len(document)


def test_packed_documents_have_the_mean_loss_of_all_their_predicted_tokens():
    model = small_llama(initializer_range=0.3)
    row, documents = packed_rows(9, 2, 7, length=24)
    sums = [model(document[None], document[None])["loss"] * (len(document) - 1) for document in documents]
    torch.testing.assert_close(model(**row)["loss"], sum(sums) / (8 + 1 + 6), atol=1e-5, rtol=1e-5)


def test_no_gradient_passes_from_one_packed_document_to_another():
    model = small_llama(initializer_range=0.3)
    row, documents = packed_rows(9, 6, 8, length=28)
    inputs = []
    model.model.embed_tokens.register_forward_hook(lambda *call: inputs.append(call[2].requires_grad_()) or call[2])
    logits = model(**row)["logits"]
    borders = row["document_ids"][0]
    for number in range(-1, len(documents)):
        [gradient] = torch.autograd.grad(logits[0, borders == number].square().sum(), inputs[0], retain_graph=True)
        assert gradient[0, borders == number].abs().sum(dim=-1).gt(0).all()
        assert gradient[0, borders != number].eq(0).all()


def test_padding_of_a_packed_row_is_not_in_the_loss():
    model = small_llama(initializer_range=0.3)
    row, _ = packed_rows(9, 6, length=20)
    expected = model(**row)["loss"]
    row["input_ids"][row["document_ids"] < 0] = 5
    torch.testing.assert_close(model(**row)["loss"], expected, atol=0, rtol=0)


def test_transformers_takes_packed_rows_with_a_mask():
    model = small_llama(initializer_range=0.3)
    reference = reference_llama(model)
    reference.load_state_dict(model.state_dict(keep_vars=True))
    row, _ = packed_rows(9, 6, 8, length=28, borders="mask")
    theirs = reference(**row)
    ours = model(**row)
    torch.testing.assert_close(ours["logits"], theirs.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours["loss"], theirs.loss, atol=1e-5, rtol=1e-5)


def test_positions_that_are_given_in_order_change_no_bit():
    model = small_llama(num_kv_heads=2, initializer_range=0.3)
    tokens = random_tokens(2, 12)
    expected = model(tokens)["logits"]
    assert torch.equal(model(tokens, position_ids=torch.arange(12).repeat(2, 1))["logits"], expected)
    assert not torch.allclose(model(tokens, position_ids=torch.arange(0, 24, 2).repeat(2, 1))["logits"], expected)


def test_documents_and_padding_can_both_be_masked():
    model = small_llama(initializer_range=0.3)
    tokens = random_tokens(1, 8)
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.int64), tokens), dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 8])
    borders = torch.tensor([[0] * 7 + [1] * 4])
    logits = model(padded, attention_mask=mask, document_ids=borders)["logits"]
    torch.testing.assert_close(logits[:, 3:7], model(tokens[:, :4])["logits"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[:, 7:], model(tokens[:, 4:])["logits"], atol=1e-5, rtol=1e-5)


def test_a_mask_of_four_dims_must_be_bool():
    with raises(DataError, "1", "4", "torch.float32"):
        small_llama()(random_tokens(1, 4), attention_mask=torch.zeros(1, 1, 4, 4))


def test_the_graph_of_packed_rows_has_no_breaks():
    model = small_llama(num_kv_heads=2)
    row, _ = packed_rows(9, 6, length=20)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**row)["loss"], model(**row)["loss"])


def test_no_position_sees_a_later_token():
    model = small_llama(initializer_range=0.3)
    tokens = random_tokens(1, 10)
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % VOCABULARY
    before, after = model(tokens)["logits"], model(changed)["logits"]
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6], after[:, 6])


def test_without_labels_there_is_no_loss():
    assert small_llama()(random_tokens(1, 4))["loss"] is None


def test_the_loss_comes_from_the_criterion_attribute():
    model = small_llama()
    tokens = random_tokens(2, 6)
    logits = model(tokens)["logits"]
    by_hand = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(model(tokens, tokens)["loss"], by_hand)
    model.criterion = torch.nn.CrossEntropyLoss(reduction="sum")
    torch.testing.assert_close(model(tokens, tokens)["loss"], by_hand * 10)


def test_tied_embeddings_are_one_parameter_and_get_one_gradient():
    model = small_llama()
    names = [name for name, _ in model.named_parameters()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" in dict(small_llama(tie_embeddings=False).named_parameters())


def test_a_model_from_the_meta_device_is_whole_after_a_reset():
    with torch.device("meta"):
        model = small_llama()
    model.to_empty(device="cpu")
    model.reset_parameters()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert abs(model(random_tokens(2, 8), random_tokens(2, 8))["loss"].item() - torch.tensor(61.0).log()) < 0.2


def test_sixteen_bits_keep_the_positions_and_the_loss_in_full_precision():
    model = small_llama(num_kv_heads=2)
    tokens = random_tokens(2, 32)
    expected = model(tokens, tokens)["loss"]
    result = model.to(torch.bfloat16)(tokens, tokens)
    assert result["logits"].dtype == torch.bfloat16
    assert result["loss"].dtype == torch.float32
    torch.testing.assert_close(result["loss"], expected, atol=0.02, rtol=0)


def test_dropout_acts_only_in_training():
    model = small_llama(dropout=0.5)
    tokens = random_tokens(1, 8)
    assert not torch.equal(model(tokens)["logits"], model(tokens)["logits"])
    model.eval()
    assert torch.equal(model(tokens)["logits"], model(tokens)["logits"])


def test_it_learns_a_repeating_sequence():
    model = small_llama()
    tokens = torch.arange(8).repeat(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(tokens, tokens)["loss"]
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    continued = model.generate(tokens[:1, :8], max_new_tokens=8, temperature=0.0)
    assert continued[0].tolist() == list(range(8)) * 2


def test_generation_repeats_with_the_same_generator_and_restores_the_mode():
    model = small_llama(dropout=0.1)
    tokens = random_tokens(2, 3)
    draws = [
        model.generate(tokens, max_new_tokens=5, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    ]
    assert draws[0].shape == (2, 8)
    assert torch.equal(draws[0][:, :3], tokens)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert model.training


def test_generation_ends_at_the_positions():
    assert small_llama(max_positions=4).generate(random_tokens(1, 3), max_new_tokens=2).shape == (1, 5)
    with raises(DataError, "max_new_tokens", "3", "4", "2"):
        small_llama(max_positions=4).generate(random_tokens(1, 3), max_new_tokens=3)


def test_top_k_of_one_takes_the_likeliest():
    model = small_llama(initializer_range=0.3)
    tokens = random_tokens(1, 3)
    sampled = model.generate(tokens, max_new_tokens=4, top_k=1, temperature=5.0)
    assert torch.equal(sampled, model.generate(tokens, max_new_tokens=4, temperature=0.0))


def test_the_default_mlp_width_is_a_multiple_of_64():
    assert [default_intermediate_size(size) for size in (24, 192, 256, 4096)] == [64, 512, 704, 10944]


def test_the_graph_has_no_breaks():
    model = small_llama(num_kv_heads=2)
    tokens = random_tokens(2, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, tokens)["loss"], model(tokens, tokens)["loss"])


@pytest.mark.parametrize("tied", [True, False])
def test_the_fused_loss_has_the_gradients_of_the_other_and_leaves_out_the_logits(tied):
    plain, fused = (small_llama(fused_loss=each, tie_embeddings=tied, initializer_range=0.3) for each in (False, True))
    tokens = random_tokens(3, 20)
    labels = tokens.clone()
    labels[0, 5:9] = IGNORED_LABEL
    expected, found = plain(tokens, labels), fused(tokens, labels)
    assert found["logits"] is None
    assert expected["logits"] is not None
    torch.testing.assert_close(found["loss"], expected["loss"])
    for result in (expected, found):
        result["loss"].backward()
    for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4)


def test_the_fused_loss_is_for_training_alone():
    model = small_llama(fused_loss=True)
    tokens = random_tokens(2, 6)
    assert model(tokens)["logits"] is not None
    with torch.no_grad():
        assert model(tokens, tokens)["logits"] is not None
    assert model.eval()(tokens, tokens)["logits"] is not None
    assert small_llama()(tokens, tokens)["logits"] is not None  # by itself on a GPU only


def test_a_fused_loss_that_cannot_be_is_rejected():
    model = small_llama(fused_loss=True)
    model.criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    with raises(ConfigError, "fused_loss", "CrossEntropyLoss"):
        model(random_tokens(1, 4), random_tokens(1, 4))


def test_too_long_sequences_are_rejected_with_both_lengths():
    with raises(DataError, "32", "33"):
        small_llama()(random_tokens(1, 33))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, ("hidden_size", "30", "4")),
        ({"num_kv_heads": 3}, ("num_heads", "4", "num_kv_heads", "3")),
        ({"num_layers": 0}, ("num_layers", "0")),
        ({"dropout": 1.0}, ("1.0",)),
        ({"head_size": 7}, ("head_size", "7")),
        ({"attention_bias": "some"}, ("some", "attention_bias")),
    ],
)
def test_impossible_sizes_are_rejected_by_name(changes, message):
    with raises(ConfigError, *message):
        small_llama(**changes)
