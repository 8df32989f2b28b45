"""Text as it is made: whole characters only, from runs and from exported folders alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.export.runs import train_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainwright.data.tokenizer import load_tokenizer
from trainwright.errors import CheckpointError, ConfigError, DataError
from trainwright.export.huggingface import export_run
from trainwright.export.text import TextStream, encode_prompt, end_tokens, load_speaker, stream_text

BYTES = load_tokenizer("bytes")


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
def test_pieces_are_whole_characters_and_add_up_to_the_text(text, cut, tokenizer):
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


def test_bytes_that_are_no_character_come_out_at_the_end():
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
        model, found = load_speaker(place, tokenizer=tokenizer)
        generator = torch.Generator().manual_seed(3)
        texts.append("".join(stream_text(model, found, "def ", max_new_tokens=30, generator=generator)))
    assert texts[0] == texts[1]
    assert texts[0]


def test_the_end_token_ends_the_text(run):
    model, tokenizer = load_speaker(run)
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
    with pytest.raises(CheckpointError, match="has no tokenizer that is known"):
        load_speaker(folder)


def test_a_folder_has_no_steps(run, tmp_path):
    with pytest.raises(ConfigError, match="has no steps"):
        load_speaker(export_run(run, tmp_path / "hf"), step=3)


def test_an_empty_prompt_and_an_encoder_are_refused(run):
    model, tokenizer = load_speaker(run)
    with pytest.raises(DataError, match="prompt has no tokens"):
        next(stream_text(model, tokenizer, "", max_new_tokens=3))

    class Pair(torch.nn.Module):
        def forward(self, input_ids, decoder_input_ids):
            return {}

    with pytest.raises(ConfigError, match="Pair has an encoder"):
        next(stream_text(Pair(), tokenizer, "a", max_new_tokens=3))
