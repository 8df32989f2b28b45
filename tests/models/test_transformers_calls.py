"""At each call of a transformers model: packed documents stay apart or are rejected, and no cache is kept."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from tests.messages import mentions, raises

from trainwright.errors import ConfigError
from trainwright.models.transformers_models import build_transformers

transformers = pytest.importorskip("transformers")

LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 61,
}
OPT = {
    "hidden_size": 16,
    "word_embed_proj_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "ffn_dim": 32,
    "vocab_size": 61,
    "max_position_embeddings": 32,
}
TOKENS = torch.arange(12)[None]
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]])
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]])
SQUARE = (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :]).tril()

WITH_DOCUMENTS = {"input_ids": TOKENS, "position_ids": POSITIONS, "document_ids": DOCUMENTS}
WITH_MASK = {"input_ids": TOKENS, "position_ids": POSITIONS, "attention_mask": SQUARE}


def build(kind, settings, **more):
    torch.manual_seed(0)
    return build_transformers(getattr(transformers, kind), {**settings, **more})[0]


def test_a_model_that_reads_no_borders_from_positions_is_rejected_by_name():
    with raises(ConfigError, "position_ids"):
        build("OPTForCausalLM", OPT)(**WITH_DOCUMENTS)


def test_the_rejected_model_does_mix_documents_and_a_mask_keeps_them_apart():
    model = build("OPTForCausalLM", OPT, init_std=0.5).eval()
    other = TOKENS.clone()
    other[0, :5] += 7  # another first document
    alone = {name: value for name, value in WITH_DOCUMENTS.items() if name != "document_ids"}
    mixed = [model(**{**alone, "input_ids": each}).logits[0, 5:] for each in (TOKENS, other)]
    assert not torch.allclose(*mixed, atol=1e-3)
    apart = [model(**{**WITH_MASK, "input_ids": each}).logits[0, 5:] for each in (TOKENS, other)]
    torch.testing.assert_close(*apart)


@pytest.mark.parametrize("row", [WITH_DOCUMENTS, WITH_MASK], ids=["documents", "mask"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_that_keeps_documents_apart_is_taken_in_any_dtype(row, dtype):
    assert build("LlamaForCausalLM", LLAMA, dtype=dtype)(**row).logits.shape == (1, 12, 61)


def test_a_mask_that_would_be_added_to_the_scores_is_rejected():
    with raises(ConfigError, "LlamaForCausalLM", "attn_implementation"):
        build("LlamaForCausalLM", LLAMA, attn_implementation="eager")(**WITH_MASK)


def test_a_cache_that_hides_the_borders_is_rejected():
    with raises(ConfigError, "LlamaForCausalLM"):
        build("LlamaForCausalLM", LLAMA, use_cache=True)(**WITH_DOCUMENTS)


def test_rows_without_borders_are_nobody_s_business():
    logits = build("OPTForCausalLM", OPT)(input_ids=TOKENS, position_ids=POSITIONS).logits
    assert logits.shape[:2] == TOKENS.shape


def test_the_question_leaves_no_trace():
    model = build("LlamaForCausalLM", LLAMA, attention_dropout=0.5)
    model.lm_head.eval()
    state = torch.get_rng_state()
    with torch.inference_mode():
        model.eval()(**WITH_DOCUMENTS)
    model.train()
    model.lm_head.eval()
    another = copy.deepcopy(model)
    torch.set_rng_state(state)
    first = model(**WITH_DOCUMENTS).logits
    torch.set_rng_state(state)
    assert torch.equal(another(**WITH_DOCUMENTS).logits, first)
    assert (model.training, model.lm_head.training) == (True, False)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


def test_the_first_packed_batch_gets_the_numbers_that_a_later_one_gets():
    """A resumed run asks anew: what it draws must not differ."""
    model = build("LlamaForCausalLM", LLAMA, attention_dropout=0.5)
    logits = []
    for _ in range(2):
        torch.manual_seed(1)
        logits.append(model(**WITH_DOCUMENTS).logits)
    assert torch.equal(*logits)


def test_a_model_that_cannot_be_asked_is_named(caplog):
    bloom = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 61}
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="unpack"):
        build("BloomForCausalLM", bloom)(**WITH_MASK)  # its own error, as ever
    assert mentions(caplog.text, "BloomForCausalLM")


def test_a_cache_is_kept_for_generation_alone():
    model = build("LlamaForCausalLM", LLAMA)
    assert model.config.use_cache
    assert model(input_ids=TOKENS).past_key_values is None
    model.eval()
    assert model(input_ids=TOKENS, labels=TOKENS).past_key_values is None
    assert model(input_ids=TOKENS).past_key_values is not None
    assert model.train()(input_ids=TOKENS, use_cache=True).past_key_values is not None


def test_a_cache_that_the_user_asks_for_is_kept():
    assert build("LlamaForCausalLM", LLAMA, use_cache=True)(input_ids=TOKENS).past_key_values is not None
    assert build("LlamaForCausalLM", LLAMA, use_cache=False).eval()(input_ids=TOKENS).past_key_values is None
