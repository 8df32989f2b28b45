"""Batches of prompts: rows of other lengths, each reader, static shapes, and what a row depends on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises
from tests.models.folders import SIZES, our_llama, reference

from trainwright.errors import ConfigError, DataError
from trainwright.models.decoding import KeyValueCache, StaticReader
from trainwright.models.generation import generate, sample_completions, select, uniform_numbers
from trainwright.models.gpt2 import GPT2
from trainwright.models.transformers_models import build_transformers

PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 4, 5], [60, 2, 3, 4]]


def llama():
    return our_llama(num_kv_heads=2, initializer_range=0.3)


def gpt2():
    torch.manual_seed(0)
    return GPT2(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, max_positions=64, initializer_range=0.3)


def alone(model, prompt, **options):
    """The greedy continuation of one prompt, each token from a forward over all tokens before it."""
    tokens = list(prompt)
    for _ in range(10):
        with torch.no_grad():
            tokens.append(int(model.eval()(input_ids=torch.tensor([tokens]))["logits"][0, -1].argmax()))
    return tokens[len(prompt) :]


def readers(model):
    return {
        "cached": {},
        "uncached": {"use_cache": False},
        "static": {"reader": StaticReader(model, compiler=None, length_multiple=16)},
        "compiled": {"reader": StaticReader(model, compiler="eager", length_multiple=16)},
    }


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("way", ["cached", "uncached", "static", "compiled"])
def test_rows_of_other_lengths_continue_as_each_does_alone(make, way):
    model = make()
    expected = [alone(model, prompt) for prompt in PROMPTS]
    options = readers(model)[way]
    assert sample_completions(model, PROMPTS, max_new_tokens=10, temperature=0, **options).rows() == expected
    same = sample_completions(model, PROMPTS[:1] * 2, max_new_tokens=10, temperature=0, **options)
    assert same.rows() == [expected[0]] * 2
    if way not in ("cached", "uncached"):
        made = list(generate(model, torch.tensor(PROMPTS[:1]), max_new_tokens=10, temperature=0, **options))
        assert torch.cat(made).tolist() == expected[0]


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_of_models_of_transformers_continue_as_each_does_alone(kind, use_cache):
    sizes = {"num_key_value_heads": 2} if kind == "Llama" else {"n_embd": 32, "n_layer": 2, "n_head": 4}
    if kind == "Llama":
        model = reference()
    else:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=61, n_positions=64, initializer_range=0.3, **sizes)
        model = transformers.GPT2LMHeadModel(config)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    made = sample_completions(
        model, PROMPTS, max_new_tokens=10, temperature=0, num_return_sequences=2, use_cache=use_cache
    )
    assert made.rows() == [row for row in expected for _ in range(2)]


def test_a_model_of_transformers_in_a_run_generates_while_it_trains():
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES, "model_type": "llama"}
    model, _ = build_transformers(transformers.AutoModelForCausalLM, sizes)
    model.train()
    made = sample_completions(model, PROMPTS, max_new_tokens=10, temperature=0).rows()
    assert model.training
    assert made == [alone(model, prompt) for prompt in PROMPTS]


SAMPLING = {"max_new_tokens": 12, "temperature": 1.3, "top_k": 30, "top_p": 0.95}


@pytest.mark.parametrize("way", ["cached", "uncached", "static"])
def test_a_row_depends_on_its_prompt_and_seed_and_not_on_its_batch(way):
    model = llama()
    options = {**SAMPLING, **readers(model)[way]}
    together = sample_completions(model, PROMPTS, seeds=[1, 2, 3, -4], **options).rows()
    backwards = sample_completions(model, PROMPTS[::-1], seeds=[-4, 3, 2, 1], **options).rows()
    single = [
        sample_completions(model, [prompt], seeds=[seed], **options).rows()[0]
        for prompt, seed in zip(PROMPTS, [1, 2, 3, -4], strict=True)
    ]
    assert together == backwards[::-1] == single
    assert together != sample_completions(model, PROMPTS, seeds=[5, 6, 7, 8], **options).rows()


def test_several_sequences_of_a_prompt_differ_and_the_first_is_that_of_one():
    model = llama()
    before = torch.get_rng_state()
    one = sample_completions(model, PROMPTS, seeds=range(4), **SAMPLING).rows()
    many = sample_completions(model, PROMPTS, seeds=range(4), num_return_sequences=3, **SAMPLING).rows()
    assert many[::3] == one
    assert len({tuple(row) for row in many}) == 12
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_stop_alone_and_are_padded():
    model = llama()
    free = [alone(model, prompt) for prompt in PROMPTS]
    stop = free[2][3]
    made = sample_completions(model, PROMPTS, max_new_tokens=10, temperature=0, stop_ids=[stop], pad_id=7)
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert made.rows() == expected
    assert made.is_stopped.tolist() == [stop in row for row in free]
    assert (made.tokens[~made.mask] == 7).all()
    short = sample_completions(model, PROMPTS[2:3], max_new_tokens=10, temperature=0, stop_ids=[stop])
    assert short.tokens.shape == (1, free[2].index(stop) + 1)


def test_ranks_go_on_until_all_have_stopped():
    model = llama()
    stop = alone(model, PROMPTS[0])[0]
    asked = []

    def all_stopped(here):
        asked.append(here)
        return here and len(asked) == 4  # another rank needs four tokens

    made = sample_completions(
        model, PROMPTS[:1], max_new_tokens=10, temperature=0, stop_ids=[stop], all_stopped=all_stopped
    )
    assert asked == [True] * 4
    assert made.rows() == [[stop]]


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_log_probabilities_are_those_of_the_forward(temperature):
    model = llama()
    made = sample_completions(
        model,
        PROMPTS,
        seeds=range(4),
        max_new_tokens=8,
        temperature=temperature,
        top_k=5,
        repetition_penalty=1.3,
        log_probabilities=True,
    )
    for prompt, row, scores in zip(PROMPTS, made.rows(), made.log_probabilities, strict=True):
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt + row]))["logits"][0, len(prompt) - 1 : -1]
        expected = (logits / (temperature or 1.0)).log_softmax(-1)[range(len(row)), row]
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_the_repetition_penalty_and_the_least_length_are_those_of_transformers():
    theirs = reference()
    model = our_llama(num_kv_heads=2, intermediate_size=48, tie_embeddings=False, norm_eps=1e-6)
    model.load_state_dict(theirs.state_dict())
    prompt = torch.tensor([[5, 6, 7, 6]])
    free = theirs.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    for options in (
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"min_new_tokens": 5, "eos_token_id": int(free[0, 6])},
    ):
        given = {"eos_token_id": None, **options}
        expected = theirs.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0, **given)[0, 4:]
        ours = dict(options)
        stops = [ours.pop("eos_token_id")] if "eos_token_id" in ours else []
        made = sample_completions(
            model, [prompt[0].tolist(), [9]], max_new_tokens=12, temperature=0, stop_ids=stops, **ours
        )
        assert made.rows()[0] == expected.tolist()
        streamed = generate(model, prompt, max_new_tokens=12, temperature=0, stop_ids=stops, **ours)
        assert torch.cat(list(streamed)).tolist() == expected.tolist()
        assert expected.tolist() != free[0, 4:].tolist()


def test_a_static_step_is_compiled_once_for_prompts_of_other_lengths_and_other_weights():
    model, compiled = llama(), []

    def compiler(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    reader = StaticReader(model, compiler=compiler, length_multiple=32)
    for prompts in (PROMPTS, [[1, 2], [3], [4], [5, 6, 7]], [[9] * 20] * 4):
        made = sample_completions(model, prompts, max_new_tokens=10, temperature=0, reader=reader)
        assert made.rows() == [alone(model, prompt) for prompt in prompts]
        assert len(compiled) == 1
        with torch.no_grad():  # an update of the training that the samples are for
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    sample_completions(model, PROMPTS, max_new_tokens=30, temperature=0, reader=reader)
    assert len(compiled) == 2


def test_a_static_reader_reads_weights_that_were_replaced_and_other_precisions():
    model = llama()
    reader = StaticReader(model, compiler=None)
    options = {"max_new_tokens": 10, "temperature": 0, "reader": reader}
    sample_completions(model, PROMPTS, **options)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = sample_completions(model, PROMPTS, log_probabilities=True, **options)
        expected = sample_completions(model, PROMPTS, max_new_tokens=10, temperature=0, log_probabilities=True)
    assert rounded.rows() == expected.rows()
    model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()}, assign=True)
    assert sample_completions(model, PROMPTS, **options).rows() == [alone(model, prompt) for prompt in PROMPTS]


def test_what_has_no_cache_cannot_be_static():
    with raises(ConfigError, "LlamaForCausalLM", "llama"):
        StaticReader(reference())


def test_the_head_is_applied_to_the_positions_that_are_asked_for():
    model = llama().eval()
    rows = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    with torch.no_grad():
        whole = model(rows)["logits"]
        some = model(rows, logits_at=torch.tensor([1, 3]))["logits"]
    torch.testing.assert_close(some, torch.stack((whole[0, 1], whole[1, 3]))[:, None])
    with raises(DataError, "logits_at", "labels"):
        model(rows, labels=rows, logits_at=torch.tensor([1, 3]))


def test_a_cache_of_rows_without_room_is_rejected_before_the_first_token():
    model = our_llama(max_positions=8)
    with raises(DataError, "8", "5", "4"):
        sample_completions(model, [[1], [1, 2, 3, 4, 5]], max_new_tokens=5, temperature=0)
    cache = KeyValueCache(2)
    with raises(DataError, "2", "3"):
        model(torch.tensor([[1, 2, 3]]), cache=cache)


@pytest.mark.parametrize(
    ("prompts", "options", "kind", "said"),
    [
        ([], {}, DataError, ()),
        ([[1], []], {"seeds": [1, 2]}, DataError, ("1",)),
        ([[1]], {}, ConfigError, ("seeds", "temperature")),
        ([[1]], {"seeds": [1, 2]}, ConfigError, ("2", "1")),
        ([[1]], {"seeds": [1], "num_return_sequences": 0}, ConfigError, ("num_return_sequences", "0")),
        ([[1]], {"seeds": [1], "repetition_penalty": 0}, ConfigError, ("repetition_penalty", "0")),
        ([[1]], {"seeds": [1], "min_new_tokens": 9}, ConfigError, ("min_new_tokens", "9")),
    ],
)
def test_impossible_batches_are_rejected(prompts, options, kind, said):
    with raises(kind, *said):
        sample_completions(our_llama(), prompts, max_new_tokens=3, **options)


def test_no_new_tokens_are_none():
    made = sample_completions(our_llama(), PROMPTS, max_new_tokens=0, temperature=0, log_probabilities=True)
    assert made.rows() == [[]] * 4
    assert made.log_probabilities.shape == (4, 0)


def split_mix(state):
    """SplitMix64's output for a state, in Python's integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
    return state ^ (state >> 31)


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(1, 3), st.integers(1, 5))
def test_the_numbers_are_those_of_split_mix(seed, copies, length):
    numbers = uniform_numbers([seed, 7], copies, length)
    stride = 0x9E3779B97F4A7C15
    for copy in range(copies):
        key = split_mix((split_mix(seed % 2**64) + (copy + 1) * stride) % 2**64)
        for column in range(length):
            expected = split_mix((key + (column + 1) * stride) % 2**64) >> 41
            assert numbers[copy, column].item() == expected / 2**23


def test_the_numbers_are_uniform():
    numbers = uniform_numbers(range(100), 10, 100).flatten().double()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = numbers.histc(20, 0, 1)
    assert ((counts - 5000) ** 2 / 5000).sum() < 50  # chi-squared of 19 degrees of freedom: 43.8 at 0.001


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32) | st.just(-math.inf), min_size=1, max_size=9),
    st.sampled_from([0.0, 1e-7, 0.25, 0.5, 1 - 2**-23, 1 - 2**-24]),
    st.none() | st.integers(1, 9),
    st.none() | st.floats(0.05, 1.0),
)
def test_a_token_without_probability_is_never_selected(logits, number, top_k, top_p):
    logits[0] = 0.0  # at least one token is possible
    [token] = select(torch.tensor([logits]), torch.tensor([number]), temperature=1.0, top_k=top_k, top_p=top_p)
    assert logits[int(token)] > -math.inf
    if top_k is not None:
        assert sum(other > logits[int(token)] for other in logits) < top_k


def test_logits_that_are_not_numbers_select_a_token_of_the_vocabulary():
    logits = torch.full((2, 5), math.nan)
    for top_k in (None, 3):
        chosen = select(logits, torch.tensor([0.1, 0.9]), temperature=1.0, top_k=top_k)
        assert chosen.min() >= 0
        assert chosen.max() < 5
