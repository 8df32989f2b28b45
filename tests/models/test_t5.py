"""T5: equal to transformers' model on the same weights, in both versions, with padding on either side."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises
from tests.models.folders import assert_same_tensors, config_of, tensors_in
from tests.models.parity import (
    VOCABULARY,
    assert_close,
    assert_files_come_back,
    padding_mask,
    read_as_ours,
    reference_model,
    tokens,
)

from trainwright.errors import ConfigError, DataError
from trainwright.models.t5 import T5, distance_buckets

SIZES = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
SIZES |= {"decoder_start_token_id": 0}
VERSION_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def both(tmp_path, *, own_head=False, **changes):
    # Scores are not scaled: with larger weights attention would be all or nothing, and blow roundings up.
    reference = reference_model("T5ForConditionalGeneration", "T5Config", spread=0.15, **{**SIZES, **changes})
    if own_head:
        reference.lm_head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, 32) * 0.3)
    return read_as_ours(T5, reference, tmp_path / "theirs"), reference


def small_t5(**changes):
    torch.manual_seed(0)
    return T5(**{"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, **changes}).eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_decoder_layers": 3, "d_kv": 6, "num_heads": 2, "pad_token_id": 3, "decoder_start_token_id": 5},
        {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "layer_norm_epsilon": 1e-3},
        VERSION_1_1,
        {**VERSION_1_1, "own_head": True},
        {"feed_forward_proj": "gated-silu"},
        {"feed_forward_proj": "gelu"},
        {"feed_forward_proj": "relu", "dense_act_fn": "gelu"},
        {"feed_forward_proj": "gated-gelu", "dense_act_fn": "relu"},
        {"feed_forward_proj": "gated-relu", "dense_act_fn": "gelu_new"},
    ],
)
def test_logits_and_loss_equal_those_of_transformers(tmp_path, changes):
    model, reference = both(tmp_path, **changes)
    ids, labels = tokens(3, 40), tokens(3, 25, seed=2)
    labels[0, 20:] = -100
    labels[1, :3] = -100
    ours, theirs = model(ids, labels), reference(input_ids=ids, labels=labels)
    assert_close(ours["logits"], theirs.logits)
    assert_close(ours["loss"], theirs.loss)


@pytest.mark.parametrize("left", [False, True])
def test_padded_rows_have_the_logits_of_transformers(tmp_path, left):
    model, reference = both(tmp_path)
    inputs = {
        "input_ids": tokens(3, 12),
        "attention_mask": padding_mask(12, 7, 1, width=12, left=left),
        "decoder_input_ids": tokens(3, 9, seed=2),
        "decoder_attention_mask": padding_mask(4, 9, 2, width=9, left=left),
    }
    ours, theirs = model(**inputs)["logits"], reference(**inputs).logits
    real = inputs["decoder_attention_mask"].bool()
    assert ours.isfinite().all()
    assert_close(ours[real], theirs[real])


@pytest.mark.parametrize("changes", [{}, {**VERSION_1_1, "own_head": True}])
def test_every_tensor_comes_back_as_it_was(tmp_path, changes):
    model, reference = both(tmp_path, **changes)
    again = assert_files_come_back(model, tmp_path / "theirs")
    ids, labels = tokens(2, 9), tokens(2, 5, seed=2)
    assert torch.equal(again(input_ids=ids, labels=labels).logits, reference(input_ids=ids, labels=labels).logits)


def test_a_head_of_its_own_that_equals_the_embeddings_is_read_from_them(tmp_path):
    model, reference = both(tmp_path, **VERSION_1_1)
    theirs = tensors_in(tmp_path / "theirs")
    assert "lm_head.weight" not in theirs
    assert model.settings["tie_embeddings"] is False
    assert model.lm_head.weight is not model.shared.weight
    again = model.save_pretrained(tmp_path / "again")
    assert_same_tensors(theirs, tensors_in(again))
    assert torch.equal(T5.from_pretrained(again).lm_head.weight, model.lm_head.weight)
    loaded = type(reference).from_pretrained(again).eval()
    ids, labels = tokens(2, 9), tokens(2, 5, seed=2)
    assert_close(loaded(input_ids=ids, labels=labels).logits, reference(input_ids=ids, labels=labels).logits)


def test_a_gated_mlp_that_has_no_name_here_is_rejected():
    told = {"model_type": "t5", "feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}
    with raises(ConfigError, "gated-gelu", "feed_forward_proj", "dense_act_fn"):
        T5.settings_from_hugging_face(told)


def test_the_config_of_old_files_means_the_same():
    old = {"model_type": "t5", "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
    settings = T5.settings_from_hugging_face(old)
    assert (settings["tie_embeddings"], settings["scale_outputs"]) == (False, False)
    settings = T5.settings_from_hugging_face({"model_type": "t5"})
    assert (settings["tie_embeddings"], settings["scale_outputs"]) == (True, True)


def test_a_tied_head_without_scaling_is_written_so_that_it_is_read_again(tmp_path):
    folder = small_t5(tie_embeddings=True, scale_outputs=False).save_pretrained(tmp_path / "ours")
    assert config_of(folder)["scale_decoder_outputs"] is False
    assert T5.from_pretrained(folder).settings["scale_outputs"] is False


def test_old_files_with_copies_of_the_embeddings_are_read(tmp_path):
    from safetensors.torch import save_file

    _, reference = both(tmp_path)
    weights = tensors_in(tmp_path / "theirs")
    for key in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        weights[key] = weights["shared.weight"].clone()
    weights["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(32, 4)
    save_file(weights, tmp_path / "theirs" / "model.safetensors")
    model = T5.from_pretrained(tmp_path / "theirs").eval()
    ids, labels = tokens(2, 9), tokens(2, 5, seed=2)
    assert_close(model(ids, labels)["logits"], reference(input_ids=ids, labels=labels).logits)


def test_the_decoder_reads_the_labels_behind_the_start_token():
    model = small_t5(pad_token_id=7, decoder_start_token_id=4)
    shifted = model.shift_right(torch.tensor([[8, 9, 2], [3, -100, -100]]))
    assert shifted.tolist() == [[4, 8, 9], [4, 3, 7]]
    ids, labels = tokens(2, 6), tokens(2, 3, seed=2)
    given = model(ids, decoder_input_ids=model.shift_right(labels))
    assert given["loss"] is None
    assert_close(given["logits"], model(ids, labels)["logits"])


def test_neither_labels_nor_decoder_inputs_is_rejected():
    with raises(DataError, "decoder_input_ids"):
        small_t5()(tokens(1, 4))


def test_no_position_of_the_target_sees_a_later_token():
    model = small_t5()
    ids, target = tokens(1, 6), tokens(1, 8, seed=2)
    changed = target.clone()
    changed[0, 5] = 0
    before = model(ids, decoder_input_ids=target)["logits"]
    after = model(ids, decoder_input_ids=changed)["logits"]
    assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])


def test_an_input_of_nothing_but_padding_is_finite():
    mask = padding_mask(6, 0, width=6)
    assert small_t5()(tokens(2, 6), tokens(2, 4), attention_mask=mask)["logits"].isfinite().all()


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 10), (6, 40)])
def test_buckets_are_those_of_transformers(both_ways, num_buckets, max_distance):
    module = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-300, 301)
    ours = distance_buckets(distances, num_buckets=num_buckets, max_distance=max_distance, both_ways=both_ways)
    theirs = module.T5Attention._relative_position_bucket(
        distances, bidirectional=both_ways, num_buckets=num_buckets, max_distance=max_distance
    )
    assert torch.equal(ours, theirs)
    assert ours.min() == 0
    assert ours.max() == num_buckets - 1


@pytest.mark.parametrize("sizes", [{"num_buckets": 2}, {"num_buckets": 32, "max_distance": 16}])
def test_too_few_buckets_or_too_near_an_end_are_rejected(sizes):
    with raises(ConfigError, "num_buckets"):
        small_t5(**sizes)


def test_an_unknown_feed_forward_is_rejected():
    with raises(ConfigError, "wavy", "feed_forward"):
        small_t5(feed_forward="gated-wavy")
    with raises(ConfigError, "wavy", "feed_forward"):
        small_t5(feed_forward="wavy")


def test_dropout_falls_in_training_only():
    model = small_t5(dropout=0.3)
    ids, labels = tokens(2, 6), tokens(2, 4, seed=2)
    assert torch.equal(model(ids, labels)["logits"], model(ids, labels)["logits"])
    model.train()
    assert not torch.equal(model(ids, labels)["logits"], model(ids, labels)["logits"])


def test_fresh_weights_are_spread_as_in_transformers():
    torch.manual_seed(0)
    sizes = {**SIZES, "d_model": 96, "d_kv": 32, "d_ff": 256, "vocab_size": 300}
    transformers = pytest.importorskip("transformers")
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).state_dict()
    ours = T5(**T5.settings_from_hugging_face(sizes)).state_dict()
    for key in set(ours) & set(theirs):
        if ours[key].numel() > 5000:
            assert ours[key].std().item() == pytest.approx(theirs[key].std().item(), rel=0.1), key


@pytest.mark.parametrize(
    ("preset", "count"), [("small", 60_506_624), ("base", 222_903_552), ("v1.1-base", 247_577_856)]
)
def test_presets_have_the_published_numbers_of_weights(preset, count):
    with torch.device("meta"):
        model = T5.from_preset(preset)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
