"""Log-likelihoods of continuations: one forward for many rows, compared with one row at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from trainwright.models.gpt2 import GPT2
from trainwright.models.llama import Llama
from trainwright.models.scoring import score_continuations

SIZE = 23
TOKENS = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=6)


def make(kind):
    torch.manual_seed(3)
    if kind == "transformers":
        config = GPT2Config(vocab_size=SIZE, n_embd=16, n_layer=1, n_head=2, n_positions=16)
        return GPT2LMHeadModel(config).eval()
    if kind == "gpt2":
        return GPT2(vocab_size=SIZE, hidden_size=16, num_layers=1, num_heads=2, max_positions=16).eval()
    return Llama(vocab_size=SIZE, hidden_size=16, num_layers=1, num_heads=2).eval()


MODELS = {kind: make(kind) for kind in ("llama", "gpt2", "transformers")}


def alone(model, context, continuation):
    """The sum of the log-probabilities of the continuation's tokens, from all logits of one row."""
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logits = model(input_ids=ids)["logits"][0].log_softmax(-1)
    own = logits[len(context) - 1 : -1]
    target = torch.tensor(continuation)
    return float(own.gather(1, target[:, None]).sum()), bool((own.argmax(-1) == target).all())


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5), kind=st.sampled_from(list(MODELS)))
def test_a_batch_scores_each_row_as_alone(rows, kind):
    found = score_continuations(MODELS[kind], rows)
    for score, (context, continuation) in zip(found, rows, strict=True):
        total, is_greedy = alone(MODELS[kind], context, continuation)
        assert score.log_likelihood == pytest.approx(total, abs=1e-4)
        assert score.is_greedy == is_greedy


def test_rows_with_the_same_input_are_read_once():
    model, sizes = MODELS["llama"], []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    found = score_continuations(model, [([1, 2, 3], [token]) for token in range(SIZE)])
    handle.remove()
    assert sizes == [(1, 3)]
    assert sum(torch.tensor([each.log_likelihood for each in found]).exp()) == pytest.approx(1.0, abs=1e-4)
    assert sum(each.is_greedy for each in found) == 1
