"""Remarks: each names what is wrong and what to do."""

import pytest
import torch
from tests.analysis.projects import write_project
from tests.messages import mentions

from trainwright import RunConfig
from trainwright.analysis.data import TokenRange, describe_data, remarks_on_tokens
from trainwright.data.tokenizer import load_tokenizer

PADDED = (
    "  train: {type: mine.Tokens}\n  collator: {type: padded, pad_token_id: 0, pad_to_multiple_of: 16, drop: [url]}\n"
)


@pytest.fixture
def remarks(in_tmp):
    def look(data, *overrides):
        return describe_data(RunConfig.load(write_project(in_tmp, data), list(overrides))).sets[0].remarks

    return look


def test_a_token_outside_the_vocabulary_is_named_with_its_position(remarks):
    [remark] = [each for each in remarks(PADDED, "model.vocab_size=100") if "vocab_size" in each]
    assert remark.startswith("The sample at position ")
    assert "has the token 2" in remark
    assert "model.vocab_size is 100" in remark
    assert not any("vocab_size" in each for each in remarks(PADDED))


def test_a_tokenizer_larger_than_the_model_is_a_remark(in_tmp):
    config = RunConfig.load(write_project(in_tmp, PADDED), ["model.vocab_size=200"])
    seen = TokenRange()
    seen.add({"input_ids": torch.tensor([1, 2])}, "The first batch")
    [remark] = remarks_on_tokens(config, seen, load_tokenizer("bytes"))
    assert mentions(remark, "260", "model.vocab_size", "200")
    seen.add({"input_ids": [-1]}, "The sample at position 4")
    assert next(iter(remarks_on_tokens(config, seen, None))).startswith("The sample at position 4 has the token -1")


def test_much_padding_comes_with_advice_and_little_with_none(remarks):
    assert any("of the batch is padding (by attention_mask)" in each and "pack" in each for each in remarks(PADDED))
    assert not any("padding" in each for each in remarks(PADDED.replace("pad_to_multiple_of: 16, ", "max_length: 2, ")))


def test_fields_that_the_collator_drops_are_named_and_tokenized_texts_are_not(remarks):
    assert "The collator drops or renames url: the batch has no such field." in remarks(PADDED)
    data = (
        "  train: {type: json_lines, path: code.jsonl}\n  collator: {type: tokenize, tokenizer: bytes, drop: [url]}\n"
    )
    assert not any("drops" in each for each in remarks(data))
