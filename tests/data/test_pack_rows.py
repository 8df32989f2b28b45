"""Documents from samples, and what a row says of their borders."""

import numpy as np
import pytest
import torch
from tests.messages import raises

from trainwright.data.pack import Document, DocumentReader, Row, RowFormat
from trainwright.data.tokenizer import load_tokenizer
from trainwright.errors import ConfigError, DataError


def row_of(*pieces, length=10, borders="documents"):
    row = Row(RowFormat(length=length, borders=borders, pad_token_id=7))
    for tokens, offset, size in pieces:
        row.add(Document(np.array(tokens)), offset, size)
    return row.finish()


def as_lists(row):
    return {name: values.tolist() for name, values in row.items()}


def test_a_row_tells_pieces_and_padding_apart():
    assert as_lists(row_of(([11, 12, 13], 0, 3), ([21, 22, 23, 24, 25], 1, 4))) == {
        "input_ids": [11, 12, 13, 22, 23, 24, 25, 7, 7, 7],
        "labels": [-100, 12, 13, -100, 23, 24, 25, -100, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 2, 3, 0, 0, 0],
        "document_ids": [0, 0, 0, 1, 1, 1, 1, -1, -1, -1],
    }


def test_all_of_a_row_is_int64():
    row = row_of(([11, 12], 0, 2))
    assert {values.dtype for values in row.values()} == {torch.int64}


def test_the_mask_is_causal_within_documents_and_leaves_no_query_without_a_key():
    mask = row_of(([1, 2], 0, 2), ([3], 0, 1), length=4, borders="mask")["attention_mask"]
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]


def test_without_borders_there_is_neither_mask_nor_ids():
    assert set(row_of(([1, 2], 0, 2), borders="none")) == {"input_ids", "labels", "position_ids"}


@pytest.mark.parametrize(
    "tokens",
    [[5, 6, 7], np.array([5, 6, 7], dtype=np.uint16), torch.tensor([5, 6, 7], dtype=torch.int32)],
    ids=["list", "array", "tensor"],
)
@pytest.mark.parametrize("end", [None, 70_000])
def test_tokens_may_come_as_lists_arrays_and_tensors(tokens, end):
    reader = DocumentReader(end_of_document=end)
    [document] = reader.read([{"input_ids": tokens}])
    expected = [5, 6, 7] if end is None else [5, 6, 7, end]
    assert document.tokens.tolist() == expected
    assert reader.count([{"input_ids": tokens}], 0) == [len(expected)]


def test_a_document_keeps_its_own_labels_and_learns_its_end():
    reader = DocumentReader(end_of_document=9)
    [document] = reader.read([{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}])
    row = Row(RowFormat(length=5, borders="none", pad_token_id=0))
    row.add(document, 0, 4)
    assert row.finish()["labels"].tolist() == [-100, -100, 3, 9, -100]


def test_texts_are_encoded_and_closed_by_the_tokenizers_end():
    reader = DocumentReader(tokenizer="bytes", text="body")
    end = load_tokenizer("bytes").eos_id
    samples = [{"body": "hi"}, {"body": ""}, {"input_ids": [1]}]
    assert [document.tokens.tolist() for document in reader.read(samples)] == [[104, 105, end], [end], [1, end]]
    assert reader.count(samples, 0) == [3, 1, 2]
    given = DocumentReader(tokenizer="bytes", end_of_document=3).read([{"text": "hi"}])
    assert given[0].tokens.tolist() == [104, 105, 3]


def test_an_end_that_the_tokenizer_has_put_there_is_not_put_there_again():
    class Closing:
        eos_id = 3

        def encode(self, text):
            return [*text.encode(), 3]

    assert DocumentReader(tokenizer=Closing()).read([{"text": "hi"}])[0].tokens.tolist() == [104, 105, 3]
    assert DocumentReader(tokenizer=Closing()).count([{"text": "hi"}], 0) == [3]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": "hi"}, ("4", "input_ids")),
        ([1, 2], ("4", "input_ids")),
        ({"input_ids": np.zeros((1, 3), dtype=np.int64)}, ("input_ids", "4", "2")),
        ({"input_ids": 3}, ("input_ids", "4")),
        ({"input_ids": [0.5]}, ("input_ids", "4")),
        ({"input_ids": [1, None]}, ("input_ids", "4", "NoneType")),
        ({"input_ids": np.array([0.5])}, ("input_ids", "4")),
        ({"input_ids": [1], "labels": torch.tensor([0.5])}, ("4",)),
        ({"input_ids": [1, 2], "labels": [1]}, ("4", "2", "input_ids", "1")),
        ({"input_ids": [1, 2], "labels": 1}, ("4", "2", "input_ids")),
    ],
)
def test_a_sample_that_is_no_document_is_named(sample, message):
    with raises(DataError, *message):
        DocumentReader().read([sample], [4])


def test_settings_without_effect_or_sense_are_rejected():
    with raises(ConfigError):
        DocumentReader(text="body")
    with raises(ConfigError, "1"):
        RowFormat(length=1, borders="none", pad_token_id=0)
    with raises(ConfigError, "lines"):
        RowFormat(length=8, borders="lines", pad_token_id=0)
