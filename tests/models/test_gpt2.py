"""GPT2: equal to transformers' model on the same weights, also for packed and padded rows and with a cache."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises
from tests.models.parity import (
    VOCABULARY,
    assert_close,
    assert_files_come_back,
    padding_mask,
    read_as_ours,
    reference_model,
    tokens,
)

from trainwright.data.pack import pack
from trainwright.errors import ConfigError, DataError
from trainwright.models.decoding import KeyValueCache
from trainwright.models.generation import generate
from trainwright.models.gpt2 import GPT2

SIZES = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0}


def small_gpt2(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 32}
    return GPT2(**{**sizes, "initializer_range": 0.3, **changes}).eval()


def both(tmp_path, **changes):
    reference = reference_model("GPT2LMHeadModel", "GPT2Config", **{**SIZES, **changes})
    return read_as_ours(GPT2, reference, tmp_path / "theirs"), reference


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_head": 1, "n_layer": 1, "n_inner": 40},
        {"n_embd": 48, "n_layer": 3, "activation_function": "gelu", "layer_norm_epsilon": 1e-3},
        {"tie_word_embeddings": False},
    ],
)
def test_logits_and_loss_equal_those_of_transformers(tmp_path, changes):
    model, reference = both(tmp_path, **changes)
    ids = tokens(3, 20)
    labels = ids.clone()
    labels[0, 5:9] = -100
    ours, theirs = model(ids, labels), reference(input_ids=ids, labels=labels)
    assert_close(ours["logits"], theirs.logits)
    assert_close(ours["loss"], theirs.loss)


@pytest.mark.parametrize("left", [False, True])
def test_padded_rows_have_the_logits_of_transformers(tmp_path, left):
    model, reference = both(tmp_path)
    ids = tokens(3, 12)
    mask = padding_mask(12, 7, 3, width=12, left=left)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": mask, "position_ids": position_ids}
    ours, theirs = model(ids, **inputs)["logits"], reference(input_ids=ids, **inputs).logits
    assert ours.isfinite().all()
    assert_close(ours[mask.bool()], theirs[mask.bool()])


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "n_inner": 40}])
def test_every_tensor_comes_back_as_it_was(tmp_path, changes):
    model, reference = both(tmp_path, **changes)
    assert_close(model.transformer.h[0].attn.c_attn.weight, reference.transformer.h[0].attn.c_attn.weight.t())
    again = assert_files_come_back(model, tmp_path / "theirs")
    ids = tokens(2, 9)
    assert torch.equal(again(input_ids=ids).logits, reference(input_ids=ids).logits)


def test_files_without_the_prefix_and_with_masks_are_read(tmp_path):
    from safetensors.torch import load_file, save_file

    _, reference = both(tmp_path)
    path = tmp_path / "theirs" / "model.safetensors"
    weights = {key.removeprefix("transformer."): tensor for key, tensor in load_file(path).items()}
    weights |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(weights, path)
    model = GPT2.from_pretrained(tmp_path / "theirs").eval()
    assert_close(model(tokens(2, 9))["logits"], reference(input_ids=tokens(2, 9)).logits)


@pytest.mark.parametrize(("name", "value"), [("scale_attn_by_inverse_layer_idx", True), ("add_cross_attention", True)])
def test_what_it_cannot_do_is_rejected_by_name_and_value(name, value):
    with raises(ConfigError, name, value):
        GPT2.settings_from_hugging_face({"model_type": "gpt2", name: value})


def test_dropouts_are_read_and_written(tmp_path):
    model, _ = both(tmp_path, resid_pdrop=0.2, embd_pdrop=0.3, attn_pdrop=0.4)
    assert model.settings["dropout"] == 0.2
    assert model.transformer.drop.p == 0.3
    assert model.transformer.h[0].attn.dropout == 0.4
    assert model.to_hugging_face()["attn_pdrop"] == 0.4


@pytest.mark.parametrize("name", ["dropout", "embedding_dropout", "attention_dropout"])
def test_each_dropout_falls_in_training_only(name):
    model = small_gpt2(**{"embedding_dropout": 0.0, name: 0.5})
    ids = tokens(2, 10)
    assert torch.equal(model(ids)["logits"], model(ids)["logits"])
    model.train()
    assert not torch.equal(model(ids)["logits"], model(ids)["logits"])


@pytest.mark.parametrize("borders", ["documents", "mask"])
def test_packed_documents_have_the_logits_of_each_alone(borders):
    model = small_gpt2()
    documents = [tokens(size, seed=size) for size in (9, 1, 6, 8)]
    packed = pack([{"input_ids": document} for document in documents], length=28, borders=borders)
    row = {name: values[None] for name, values in packed[0].items()}
    logits = model(**row)["logits"]
    start = 0
    for number, _, _ in packed.plan.row(0):
        document = documents[number]
        assert_close(logits[:, start : start + len(document)], model(document[None])["logits"])
        start += len(document)


def test_no_position_sees_a_later_token():
    model = small_gpt2()
    ids = tokens(1, 10)
    changed = ids.clone()
    changed[0, 6] = 0
    before, after = model(ids)["logits"], model(changed)["logits"]
    assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6], after[:, 6])


@pytest.mark.parametrize("pieces", [(10, 1, 1, 1), (1, 1, 1), (4, 5, 1, 3)])
def test_logits_with_a_cache_equal_those_without(pieces):
    model = small_gpt2()
    ids = tokens(2, sum(pieces))
    cache = KeyValueCache(sum(pieces))
    parts = [model(piece, cache=cache)["logits"] for piece in ids.split(pieces, dim=1)]
    assert_close(torch.cat(parts, dim=1), model(ids)["logits"])
    assert cache.length == sum(pieces)


def test_generated_tokens_are_the_same_with_a_cache_and_without():
    model = small_gpt2()
    prompt = tokens(2, 5)
    with_cache = model.generate(prompt, max_new_tokens=12, temperature=0.0)
    without = generate(model, prompt, max_new_tokens=12, temperature=0.0, use_cache=False)
    assert torch.equal(with_cache[:, 5:], torch.stack(list(without), dim=1))


def test_a_cache_goes_with_whole_rows_only():
    with raises(DataError, "attention_mask"):
        small_gpt2()(tokens(1, 4), attention_mask=torch.ones(1, 4), cache=KeyValueCache(8))


def test_too_long_rows_are_rejected():
    with raises(DataError, "32", "33"):
        small_gpt2()(tokens(1, 33))


def test_what_adds_to_the_stream_starts_smaller_the_deeper_the_model():
    model = small_gpt2(hidden_size=128, num_layers=8, initializer_range=0.02)
    block = model.transformer.h[0]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attn.c_proj.bias.abs().max() == 0


@pytest.mark.parametrize(
    ("preset", "count"),
    [("124m", 124_439_808), ("355m", 354_823_168), ("774m", 774_030_080), ("1.5b", 1_557_611_200)],
)
def test_presets_have_the_published_numbers_of_weights(preset, count):
    with torch.device("meta"):
        model = GPT2.from_preset(preset)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_125m_is_another_name_of_124m():
    with torch.device("meta"):
        assert GPT2.from_preset("125m").settings == GPT2.from_preset("124m").settings
