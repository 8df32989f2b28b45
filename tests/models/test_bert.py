"""Bert and BertClassifier: equal to transformers' models on the same weights; they begin from a plain encoder too."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.messages import raises
from tests.models.folders import tensors_in
from tests.models.parity import (
    VOCABULARY,
    assert_close,
    assert_files_come_back,
    padding_mask,
    read_as_ours,
    reference_model,
    tokens,
)

from trainwright.errors import CheckpointError, ConfigError, DataError
from trainwright.models.bert import Bert, BertClassifier

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 32}


def both(tmp_path, model_class=Bert, **changes):
    kind = model_class.hugging_face_architectures["bert"]
    reference = reference_model(kind, "BertConfig", **{**SIZES, **changes})
    return read_as_ours(model_class, reference, tmp_path / "theirs"), reference


def small(model_class=Bert, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_positions": 32}
    return model_class(**{**sizes, "initializer_range": 0.3, **changes}).eval()


@pytest.mark.parametrize("model_class", [Bert, BertClassifier])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 1, "num_attention_heads": 1, "type_vocab_size": 3},
        {"hidden_size": 48, "num_attention_heads": 8, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
        {"pad_token_id": None},
    ],
)
def test_logits_equal_those_of_transformers(tmp_path, model_class, changes):
    model, reference = both(tmp_path, model_class, **changes)
    ids = tokens(3, 14)
    mask = padding_mask(14, 9, 2, width=14)
    types = (torch.arange(14).expand(3, 14) > 5).long()
    for inputs in (
        {},
        {"attention_mask": mask},
        {"attention_mask": mask, "token_type_ids": types},
        {"position_ids": torch.arange(14).flip(0)[None].expand(3, 14)},
    ):
        ours, theirs = model(ids, **inputs)["logits"], reference(input_ids=ids, **inputs).logits
        assert_close(ours, theirs)


def test_the_loss_is_that_of_the_masked_tokens(tmp_path):
    model, reference = both(tmp_path)
    ids = tokens(3, 10)
    labels = torch.where(torch.rand(3, 10, generator=torch.Generator().manual_seed(4)) < 0.3, ids, -100)
    ours, theirs = model(ids, labels), reference(input_ids=ids, labels=labels)
    assert_close(ours["loss"], theirs.loss)
    chosen = labels != -100
    assert_close(ours["loss"], torch.nn.functional.cross_entropy(ours["logits"][chosen], labels[chosen]))


@pytest.mark.parametrize(("num_labels", "labels"), [(3, [0, 2, 1]), (2, [1, 0, 1]), (1, [0.5, -1.0, 2.0])])
def test_the_classifier_s_loss_is_that_of_transformers(tmp_path, num_labels, labels):
    model, reference = both(tmp_path, BertClassifier, num_labels=num_labels)
    ids, labels = tokens(3, 10), torch.tensor(labels)
    ours, theirs = model(ids, labels), reference(input_ids=ids, labels=labels)
    assert ours["logits"].shape == (3, num_labels)
    assert_close(ours["loss"], theirs.loss)


@pytest.mark.parametrize(("model_class", "changes"), [(Bert, {}), (BertClassifier, {"num_labels": 5})])
def test_every_tensor_comes_back_as_it_was(tmp_path, model_class, changes):
    model, reference = both(tmp_path, model_class, **changes)
    again = assert_files_come_back(model, tmp_path / "theirs")
    ids = tokens(2, 9)
    assert torch.equal(again(input_ids=ids).logits, reference(input_ids=ids).logits)


def test_names_of_classes_are_kept(tmp_path):
    names = {0: "bad", 1: "good", 2: "unsure"}
    model, _ = both(tmp_path, BertClassifier, id2label=names, label2id={name: key for key, name in names.items()})
    assert model.settings["num_labels"] == 3
    again = assert_files_come_back(model, tmp_path / "theirs")
    assert again.config.id2label == names


@pytest.mark.parametrize("with_pooler", [True, False])
def test_a_classifier_begins_from_a_plain_encoder_and_says_what_is_new(tmp_path, caplog, with_pooler):
    transformers = pytest.importorskip("transformers")
    encoder = reference_model("BertModel", "BertConfig", **SIZES)
    if not with_pooler:
        encoder = transformers.BertModel(encoder.config, add_pooling_layer=False).eval()
    encoder.save_pretrained(tmp_path / "encoder")
    with raises(CheckpointError, "classifier.weight"):
        BertClassifier.from_pretrained(tmp_path / "encoder")
    with caplog.at_level(logging.WARNING):
        model = BertClassifier.from_pretrained(tmp_path / "encoder", strict=False, num_labels=4).eval()
    assert "classifier.weight" in caplog.text
    assert ("pooler.dense.weight" in caplog.text) is not with_pooler
    ids = tokens(2, 9)
    assert_close(model.bert(ids), encoder(input_ids=ids).last_hidden_state)
    assert model(ids)["logits"].shape == (2, 4)
    assert all(parameter.isfinite().all() and not parameter.is_meta for parameter in model.parameters())


def test_a_classifier_begins_from_a_masked_language_model(tmp_path):
    _, reference = both(tmp_path)
    model = BertClassifier.from_pretrained(tmp_path / "theirs", strict=False).eval()
    ids = tokens(2, 9)
    assert_close(model.bert(ids), reference.bert(input_ids=ids).last_hidden_state)


def test_old_files_with_other_names_and_copies_of_tied_weights_are_read(tmp_path):
    from safetensors.torch import save_file

    _, reference = both(tmp_path)
    weights = tensors_in(tmp_path / "theirs")
    weights = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for key, tensor in weights.items()
    }
    weights["bert.embeddings.position_ids"] = torch.arange(32)[None]
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"].clone()
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"].clone()
    save_file(weights, tmp_path / "theirs" / "model.safetensors")
    model = Bert.from_pretrained(tmp_path / "theirs").eval()
    assert_close(model(tokens(2, 9))["logits"], reference(input_ids=tokens(2, 9)).logits)
    assert "bert.embeddings.LayerNorm.weight" in tensors_in(model.save_pretrained(tmp_path / "again"))


@pytest.mark.parametrize(("name", "value"), [("is_decoder", True), ("position_embedding_type", "relative_key")])
def test_what_it_cannot_do_is_rejected_by_name_and_value(name, value):
    with raises(ConfigError, name, value):
        Bert.settings_from_hugging_face({"model_type": "bert", name: value})


def test_a_row_of_nothing_but_padding_is_finite():
    model = small()
    logits = model(tokens(2, 5), attention_mask=padding_mask(5, 0, width=5))["logits"]
    assert logits.isfinite().all()


def test_padding_changes_nothing():
    model = small(BertClassifier)
    ids = tokens(2, 8)
    padded = torch.nn.functional.pad(ids, (0, 5))
    assert_close(model(padded, attention_mask=padding_mask(8, 8, width=13))["logits"], model(ids)["logits"])


def test_the_head_is_the_table_of_embeddings():
    model = small()
    assert model.cls["predictions"].decoder.weight is model.bert.embeddings.word_embeddings.weight
    names = dict(model.named_parameters())
    assert "cls.predictions.bias" in names
    assert not {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"} & set(names)


def test_the_padding_s_embedding_starts_at_zero_and_gets_no_gradient():
    model = small(BertClassifier)
    ids = tokens(2, 8)
    ids[:, -2:] = 0
    model(ids, torch.tensor([0, 1]))["loss"].backward()
    table = model.bert.embeddings.word_embeddings.weight
    assert table[0].eq(0).all()
    assert table.grad[0].eq(0).all()
    assert table.grad[ids[0, 0]].ne(0).any()


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "classifier_dropout"])
def test_each_dropout_falls_in_training_only(name):
    model = small(BertClassifier, **{"classifier_dropout": 0.0, name: 0.5})
    ids = tokens(2, 10)
    assert torch.equal(model(ids)["logits"], model(ids)["logits"])
    model.train()
    assert not torch.equal(model(ids)["logits"], model(ids)["logits"])


def test_too_long_rows_are_rejected():
    with raises(DataError, "32", "33"):
        small()(tokens(1, 33))


def test_a_width_that_does_not_split_into_heads_is_rejected():
    with raises(ConfigError, "hidden_size", "32", "5"):
        small(num_heads=5)


@pytest.mark.parametrize(("preset", "count"), [("base", 109_514_298), ("large", 335_174_458)])
def test_presets_have_the_published_numbers_of_weights(preset, count):
    with torch.device("meta"):
        model = Bert.from_preset(preset)
        assert BertClassifier.from_preset(preset, num_labels=3).settings["num_labels"] == 3
    assert sum(parameter.numel() for parameter in model.parameters()) == count
