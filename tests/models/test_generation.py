"""Generation: with the cache as without it, stopping, sampling, and models that take no cache."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises
from tests.models.folders import our_llama, reference, tokens

from trainwright.errors import ConfigError, DataError
from trainwright.models.bert import Bert, BertClassifier
from trainwright.models.cnn import CNN
from trainwright.models.decoding import KeyValueCache
from trainwright.models.generation import generate, room_after, sample
from trainwright.models.scoring import score_continuations
from trainwright.models.t5 import T5


def drawn(model, prompt, **options):
    return torch.stack(list(generate(model, prompt, **{"max_new_tokens": 12, **options})), dim=1)


@pytest.mark.parametrize("changes", [{"num_kv_heads": 2}, {"attention_bias": "qkv"}, {"head_size": 6}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_with_the_cache_are_those_without(changes, temperature):
    model = our_llama(initializer_range=0.3, **changes)
    results = [
        drawn(
            model,
            tokens(3, 5),
            temperature=temperature,
            use_cache=use_cache,
            generator=torch.Generator().manual_seed(5),
        )
        for use_cache in (True, False)
    ]
    assert results[0].shape == (3, 12)
    assert torch.equal(*results)


def test_a_model_that_returns_its_logits_alone_generates_and_scores_as_one_with_a_mapping():
    class Logits(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, input_ids):
            return self.model(input_ids)["logits"]

    model = our_llama(initializer_range=0.3)
    assert torch.equal(drawn(Logits(model), tokens(3, 5), temperature=0.0), drawn(model, tokens(3, 5), temperature=0.0))
    rows = [([1, 2, 3], [4, 5]), ([6], [7])]
    [theirs, ours] = [score_continuations(each, rows) for each in (model, Logits(model))]
    assert [each.is_greedy for each in ours] == [each.is_greedy for each in theirs]


def test_greedy_tokens_are_those_of_transformers():
    theirs = reference(tie_word_embeddings=False)
    model = our_llama(num_kv_heads=2, intermediate_size=48, tie_embeddings=False, norm_eps=1e-6)
    model.load_state_dict(theirs.state_dict())
    expected = theirs.generate(tokens(1, 5), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(drawn(model, tokens(1, 5), temperature=0.0), expected[:, 5:])


def test_tokens_in_pieces_give_the_logits_of_one_pass():
    model = our_llama(num_kv_heads=2, initializer_range=0.3).eval()
    rows = tokens(2, 12)
    cache = KeyValueCache(12)
    pieces = [model(piece, cache=cache)["logits"] for piece in rows.split([4, 1, 5, 2], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(rows)["logits"], atol=1e-5, rtol=1e-5)
    assert cache.length == 12
    with raises(DataError, "12", "13"):
        model(rows[:, :1], cache=cache)


def test_a_cache_rejects_masks_and_too_many_positions():
    model = our_llama(max_positions=4)
    with raises(DataError, "attention_mask"):
        model(tokens(1, 2), attention_mask=torch.ones(1, 2), cache=KeyValueCache(4))
    cache = KeyValueCache(9)
    model(tokens(1, 3), cache=cache)
    with raises(DataError, "4", "5"):
        model(tokens(1, 2), cache=cache)


@pytest.mark.parametrize(("length", "room"), [(4, 3), (6, 1), (7, 0)])
def test_more_tokens_than_there_are_positions_for_are_rejected_with_what_is_left(length, room):
    model = our_llama(max_positions=6, initializer_range=0.3)
    assert room_after(model, length) == room
    if room:
        options = {"temperature": 0.0, "max_new_tokens": room}
        with_cache, without = (drawn(model, tokens(1, length), use_cache=each, **options) for each in (True, False))
        assert torch.equal(with_cache, without)
        assert with_cache.shape == (1, room)
    with raises(DataError, room or length, "6"):
        drawn(model, tokens(1, length), max_new_tokens=room + 1)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.tensor([1, 2, 3]), ("3", "input_ids")),
        (torch.zeros(1, 3), ("torch.float32",)),
        (torch.tensor([[1, 5000]]), ("1", "5000")),
    ],
)
def test_a_prompt_that_is_no_rows_of_tokens_is_rejected(ids, said):
    with raises(DataError, *said):
        drawn(our_llama(), ids)


def test_a_row_that_stopped_stays_and_all_stopped_ends():
    model = our_llama(initializer_range=0.3)
    free = drawn(model, tokens(2, 3), temperature=0.0)
    stop = free[0, 2].item()
    stopped = drawn(model, tokens(2, 3), temperature=0.0, stop_ids=[stop])
    first = free[0].tolist().index(stop)
    assert stopped[0, first:].eq(stop).all()
    alone = drawn(model, tokens(2, 3)[:1], temperature=0.0, stop_ids=[stop])
    assert alone[0].tolist() == free[0, : first + 1].tolist()


def test_the_mode_comes_back_even_when_nobody_asks_for_the_rest():
    model = our_llama().train()
    tokens_made = generate(model, tokens(1, 3), max_new_tokens=9)
    next(tokens_made)
    assert not model.training
    tokens_made.close()
    assert model.training


def test_a_model_of_transformers_generates_without_a_cache():
    theirs = reference()
    expected = theirs.generate(tokens(1, 5), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(drawn(theirs, tokens(1, 5), temperature=0.0), expected[:, 5:])


def test_top_p_keeps_the_fewest_tokens_that_hold_it():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(2000, 1)
    generator = torch.Generator().manual_seed(0)
    for top_p, kept in [(0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})]:
        assert set(sample(logits, temperature=1.0, top_p=top_p, generator=generator).tolist()) == kept
    both = sample(logits, temperature=1.0, top_k=2, top_p=0.99, generator=generator)
    assert set(both.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, ("1",)),
        ({"temperature": float("nan")}, ()),
        ({"temperature": float("inf")}, ()),
        ({"top_k": 0}, ("top_k", "0")),
        ({"top_k": 2.5}, ("top_k", "2.5")),
        ({"top_p": 1.5}, ("top_p", "1.5")),
        ({"top_p": 0}, ("top_p", "0")),
        ({"top_p": float("nan")}, ("top_p",)),
        ({"max_new_tokens": -1}, ("max_new_tokens", "1")),
    ],
)
def test_impossible_ways_to_sample_are_rejected(options, message):
    with raises(ConfigError, *message):
        drawn(our_llama(), tokens(1, 3), **options)


def test_an_empty_prompt_is_rejected():
    with raises(DataError):
        drawn(our_llama(), tokens(1, 0))


SIZES = {"vocab_size": 61, "hidden_size": 16, "num_layers": 1, "num_heads": 2}


@pytest.mark.parametrize(
    ("kind", "sizes", "reason"),
    [
        (T5, SIZES, ()),
        (Bert, SIZES, ()),
        (BertClassifier, {**SIZES, "num_labels": 3}, ()),
        (CNN, {"num_labels": 3, "stage_channels": [8]}, ("pixel_values", "input_ids")),
    ],
)
def test_what_is_no_decoder_is_rejected_with_the_reason(kind, sizes, reason):
    with raises(ConfigError, *reason, kind.__name__):
        drawn(kind(**sizes), tokens(1, 3))


def test_an_encoder_of_transformers_is_rejected_too():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=16))
    with raises(ConfigError, "BertForMaskedLM"):
        drawn(model, tokens(1, 3))


def test_a_decoder_of_the_users_own_generates():
    class Own(torch.nn.Module):
        def forward(self, input_ids):
            return {"logits": torch.nn.functional.one_hot((input_ids + 1) % 61, 61).float()}

    assert drawn(Own(), torch.tensor([[3]]), temperature=0.0, max_new_tokens=3).tolist() == [[4, 5, 6]]
