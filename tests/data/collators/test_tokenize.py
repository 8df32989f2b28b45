"""Texts to padded tokens."""

import pytest
import torch
from tests.messages import raises
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from trainwright.data.collators.padded import Padded
from trainwright.data.collators.tokenize import Tokenize
from trainwright.errors import ConfigError, DataError

WORDS = {"[PAD]": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4, "three": 5, "four": 6, "a": 7}


@pytest.fixture
def words(tmp_path):
    """A tokenizer of seven words that opens each text with <s> and closes it with </s>."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    tokenizer.add_special_tokens(["[PAD]", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_texts_give_what_padded_gives_for_their_bytes():
    batch = Tokenize(tokenizer="bytes", buckets=[4, 8])([{"text": "abcde"}, {"text": "f"}])
    expected = Padded(pad_token_id=256, buckets=[4, 8])([{"input_ids": list(b"abcde")}, {"input_ids": list(b"f")}])
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in batch)


def test_bos_and_eos_are_added_and_a_cut_text_has_no_eos():
    collator = Tokenize(tokenizer="bytes", add_bos=True, add_eos=True, max_length=4, text="body", drop=["url"])
    batch = collator([{"body": "ab", "url": "x"}, {"body": "abcdef", "url": "y"}])
    assert batch["input_ids"].tolist() == [[257, 97, 98, 258], [257, 97, 98, 99]]


def test_what_the_tokenizer_adds_itself_is_not_added_twice_nor_cut_off(words):
    collator = Tokenize(tokenizer=words, add_bos=True, add_eos=True, max_length=4)
    assert collator([{"text": "one two three four"}])["input_ids"].tolist() == [[1, 3, 4, 2]]
    assert collator([{"text": "one"}])["input_ids"].tolist() == [[1, 3, 2]]
    bare = Tokenize(tokenizer=words, add_special_tokens=False)
    assert bare([{"text": "one two"}])["input_ids"].tolist() == [[3, 4]]


def test_only_completions_are_learnt(words):
    collator = Tokenize(tokenizer=words, prompt="ask", completion="say")
    batch = collator([{"ask": "one two", "say": "three"}, {"ask": "", "say": "four"}])
    assert batch["input_ids"].tolist() == [[1, 3, 4, 5, 2], [1, 6, 2, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 5, 2], [-100, 6, 2, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_a_long_completion_is_cut_like_its_labels():
    collator = Tokenize(tokenizer="bytes", prompt="p", completion="c", add_eos=True, max_length=4)
    batch = collator([{"p": "ab", "c": "cdef"}])
    assert batch["input_ids"].tolist() == [[97, 98, 99, 100]]
    assert batch["labels"].tolist() == [[-100, -100, 99, 100]]


def test_other_fields_are_stacked():
    assert Tokenize(tokenizer="bytes")([{"text": "a", "weight": 0.5}])["weight"].tolist() == [0.5]


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ({"text": 5}, ("1", "text", "5")),
        ({"text": ""}, ("1", "input_ids")),
        ({"text": "\ud800"}, ("text", "1")),
    ],
)
def test_what_is_no_text_is_rejected_by_field_and_sample(sample, problem):
    with raises(DataError, *problem):
        Tokenize(tokenizer="bytes")([{"text": "a"}, sample])


def test_fields_that_do_not_fit_are_rejected(words):
    with raises(DataError, "text"):
        Tokenize(tokenizer="bytes")([{"body": "a"}])
    with raises(DataError, "input_ids"):
        Tokenize(tokenizer="bytes")([{"text": "a", "input_ids": [1]}])
    with raises(ConfigError):
        Tokenize(tokenizer="bytes", prompt="ask")
    with raises(ConfigError, "make_labels"):
        Tokenize(tokenizer="bytes", prompt="ask", completion="say", make_labels=False)
