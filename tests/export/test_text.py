"""Text as it is made: whole characters only, from runs and from exported folders alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.export.runs import train_run
from tests.messages import raises
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainwright.data.tokenizer import load_tokenizer
from trainwright.errors import CheckpointError, ConfigError, DataError
from trainwright.export.huggingface import export_run
from trainwright.export.text import (
    Continuation,
    TextStream,
    complete_texts,
    encode_prompt,
    end_tokens,
    load_text_model,
    num_tokens_of,
    stream_text,
)

BYTES = load_tokenizer("bytes")
PROJECT = Path(__file__).parents[1] / "project"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_run(tmp_path_factory.mktemp("project"))[0]


def pair_tokenizer():
    """A byte-level BPE tokenizer with few merges, so that most characters span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["grüße an alle, die das lesen"] * 3, trainer)
    return tokenizer


PAIRS = pair_tokenizer()


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30), st.integers(0, 10), st.sampled_from([BYTES, PAIRS]))
def test_chunks_are_complete_characters_and_add_up_to_the_text(text, cut, tokenizer):
    tokens = encode_prompt(tokenizer, text)
    stream = TextStream(tokenizer, tokens[:0])
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(tokens)
    before = encode_prompt(tokenizer, text[:cut])
    stream = TextStream(tokenizer, before)
    rest = "".join(stream.push(token) for token in encode_prompt(tokenizer, text[cut:])) + stream.finish()
    assert text[:cut] + rest == text


def test_a_character_is_kept_back_until_it_is_whole():
    stream = TextStream(BYTES, [])
    assert [stream.push(byte) for byte in "a€!".encode()] == ["a", "", "", "€", "!"]


def test_incomplete_bytes_are_returned_at_the_end():
    stream = TextStream(BYTES, [])
    assert stream.push(0xFF) == ""
    assert stream.push(ord("a")) == "\ufffda"
    assert stream.push(0xE2) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_a_run_and_its_export_say_the_same(run, tmp_path):
    texts = []
    folder = export_run(run, tmp_path / "hf")
    for place, tokenizer in ((run, None), (folder, "bytes")):
        model, found = load_text_model(place, tokenizer=tokenizer)
        generator = torch.Generator().manual_seed(3)
        texts.append("".join(stream_text(model, found, "def ", max_new_tokens=30, generator=generator)))
    assert texts[0] == texts[1]
    assert texts[0]


def test_the_end_token_ends_the_text(run):
    model, tokenizer = load_text_model(run)
    torch.nn.init.zeros_(model.model.norm.weight)  # every token is equally likely
    assert end_tokens(tokenizer) == {258}
    assert end_tokens(PAIRS) == {0}

    def only_the_end(_module, _inputs, outputs):
        outputs["logits"][..., 258] = 9.0
        return outputs

    model.register_forward_hook(only_the_end)
    assert "".join(stream_text(model, tokenizer, "x", max_new_tokens=9, temperature=0.0)) == ""


def test_what_has_no_tokenizer_says_how_to_name_one(run, tmp_path):
    folder = export_run(run, tmp_path / "hf")
    with raises(CheckpointError):
        load_text_model(folder)


def test_plain_weights_are_not_a_text_model_and_an_export_is_not_exported(run, tmp_path):
    with raises(CheckpointError):
        load_text_model(export_run(run, tmp_path / "plain", file_format="safetensors"))
    with raises(CheckpointError):
        export_run(export_run(run, tmp_path / "hf"), tmp_path / "other")


def test_a_folder_has_no_steps(run, tmp_path):
    with raises(ConfigError):
        load_text_model(export_run(run, tmp_path / "hf"), step=3)


def test_an_empty_prompt_and_an_encoder_are_rejected(run):
    model, tokenizer = load_text_model(run)
    with raises(DataError):
        next(stream_text(model, tokenizer, "", max_new_tokens=3))

    class Pair(torch.nn.Module):
        def forward(self, input_ids, decoder_input_ids):
            return {}

    with raises(ConfigError):
        next(stream_text(Pair(), tokenizer, "a", max_new_tokens=3))


def test_a_run_without_a_decoder_is_rejected_before_its_tokenizer(tmp_path):
    shutil.copy(PROJECT / "parts.py", tmp_path / "parts.py")
    folder, _ = train_run(tmp_path, (PROJECT / "run.yaml").read_text(), ["trainer.max_steps=2"])
    with raises(ConfigError, "input_ids"):
        load_text_model(folder)


class Counting(torch.nn.Module):
    """Draws the numbers of a list, one after the other, from a vocabulary of 300 tokens."""

    def __init__(self, *numbers):
        super().__init__()
        self.numbers = list(numbers)

    def forward(self, input_ids):
        logits = torch.zeros(*input_ids.shape, 300)
        logits[:, -1, self.numbers.pop(0)] = 9.0
        return {"logits": logits}


@pytest.mark.parametrize(
    ("numbers", "pieces"),
    [
        ([ord("a"), 299, ord("b")], ["a", "<299>", "b"]),
        ([0xE2, 299, *"€".encode()], ["\ufffd<299>", "€"]),
        ([299, 260], ["<299>", "<260>"]),
    ],
)
def test_a_token_that_the_tokenizer_lacks_is_shown_by_its_number(numbers, pieces):
    model = Counting(*numbers)
    made = stream_text(model, BYTES, "x", max_new_tokens=len(numbers), temperature=0.0)
    assert list(made) == pieces
    assert num_tokens_of(PAIRS) == PAIRS.get_vocab_size()
    assert num_tokens_of(object()) is None


def test_a_tokenizer_of_another_model_is_named(run):
    model, _ = load_text_model(run)
    other = Tokenizer(models.WordLevel({"def": 999}, unk_token="def"))
    with raises(DataError, "999", "260", "--tokenizer"):
        next(stream_text(model, other, "def", max_new_tokens=3))


def test_without_a_length_the_text_ends_at_the_positions_and_one_beyond_is_rejected():
    model = Counting(*[ord("a")] * 8)
    model.max_positions = 8
    assert "".join(stream_text(model, BYTES, "x", temperature=0.0)) == "a" * 8
    with raises(DataError, "8"):
        next(stream_text(model, BYTES, "x", max_new_tokens=9))


@pytest.mark.parametrize(
    ("stops", "text", "num_tokens"),
    [(["c"], "ab", 3), (["bcx", "cd"], "ab", 4), (["zz"], "abcde", 5), (["de", "abc"], "", 3), (["ex"], "abcde", 5)],
)
def test_a_text_ends_before_one_that_stops_it(stops, text, num_tokens):
    model = Counting(*map(ord, "abcde"))
    made = Continuation(model, BYTES, "x", max_new_tokens=5, temperature=0.0, stop_texts=stops)
    chunks = list(made)
    assert "".join(chunks) == text
    assert all(chunks)
    assert made.num_tokens == num_tokens
    assert made.is_stopped == (text != "abcde")


@settings(max_examples=60, deadline=None)
@given(st.text("ab", min_size=1, max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_no_text_that_stops_is_shown_and_nothing_is_lost(text, stops):
    model = Counting(*map(ord, text))
    made = Continuation(model, BYTES, "x", max_new_tokens=len(text), temperature=0.0, stop_texts=stops)
    shown = "".join(made)
    read = next((text[:end] for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)), None)
    assert shown == (text if read is None else read[: min(read.find(stop) for stop in stops if stop in read)])
    assert made.is_stopped == (read is not None)


def test_texts_of_a_batch_are_those_of_each_alone(run):
    model, tokenizer = load_text_model(run)
    prompts = ["def ", "x", [100, 101, 102], "grüße"]
    options = {"seed": 5, "temperature": 1.2, "top_k": 40}
    together = list(complete_texts(model, tokenizer, prompts, **options))
    assert together == list(complete_texts(model, tokenizer, prompts, batch_size=1, **options))
    assert max(each.num_tokens for each in together) <= 64 - len("grüße".encode()) + 1
    other = list(complete_texts(model, tokenizer, prompts, **{**options, "seed": 6}))
    assert [each.text for each in other] != [each.text for each in together]
    with raises(DataError, "1"):
        next(complete_texts(model, tokenizer, ["a", ""]))
