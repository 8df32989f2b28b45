"""Tokens: blocks that never reach across files, documents with their lengths, and files that are written whole."""

from __future__ import annotations

import pickle
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.data.sources import tokens as tokens_module
from trainwright.data.sources.tokens import Tokens, write_tokens
from trainwright.errors import ConfigError, DataError

rows_of_tokens = st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=4)


def ids(dataset):
    return [dataset[index]["input_ids"].tolist() for index in range(len(dataset))]


def documents_of(row, end):
    """The documents in a row of tokens, by plain Python."""
    documents, current = [], []
    for token in row:
        current.append(token)
        if token == end:
            documents.append(current)
            current = []
    return [*documents, current] if current else documents


@given(rows=rows_of_tokens, length=st.integers(2, 5), suffix=st.sampled_from([".bin", ".npy"]))
@settings(max_examples=40)
def test_blocks_stay_within_files_and_leave_out_what_is_incomplete(rows, length, suffix):
    expected = [row[start : start + length] for row in rows for start in range(0, len(row) - length + 1, length)]
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            write_tokens(f"{folder}/{number}{suffix}", [row], "uint32")
        dataset = Tokens(folder, length, dtype="uint32")
        if not expected:
            with raises(DataError, length, golden=False):
                len(dataset)
            return
        assert ids(dataset) == expected
        assert dataset.lengths.tolist() == [length] * len(expected)
        assert dataset[-1]["labels"].tolist() == expected[-1]


@given(rows=rows_of_tokens, longest=st.one_of(st.none(), st.integers(2, 5)))
@settings(max_examples=40)
def test_documents_end_with_their_end_and_long_ones_come_in_pieces(rows, longest):
    whole = [document for row in rows for document in documents_of(row, 0)]
    step = longest or 1000
    expected = [document[start : start + step] for document in whole for start in range(0, len(document), step)]
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows):
            write_tokens(f"{folder}/{number}.bin", [row])
        dataset = Tokens(f"{folder}/*.bin", longest, documents=True, end_of_document=0)
        if expected:
            assert ids(dataset) == expected
            assert dataset.lengths.tolist() == [len(each) for each in expected]
            assert dataset.tokens_per_sample is None


def test_a_sample_is_int64_and_its_labels_have_memory_of_their_own(tmp_path):
    write_tokens(tmp_path / "x.bin", [[1, 2, 3, 4]])
    dataset = Tokens("x.bin", 2, project_dir=tmp_path)
    sample = dataset[1]
    assert sample["input_ids"].dtype == torch.int64
    assert dataset.tokens_per_sample == 2
    sample["labels"].fill_(-100)
    assert sample["input_ids"].tolist() == [3, 4]
    with pytest.raises(IndexError, match="out of range for the 2 samples"):
        dataset[2]


def test_a_scan_in_small_steps_finds_the_same_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens_module, "_SCAN_TOKENS", 2)
    write_tokens(tmp_path / "x.npy", [[1, 2], [3], [4, 5, 6]], end_of_document=0)
    assert Tokens(tmp_path / "x.npy", documents=True, end_of_document=0).lengths.tolist() == [3, 2, 4]


def test_the_fingerprint_changes_with_the_files(tmp_path):
    write_tokens(tmp_path / "a.bin", [[1, 2, 3]])
    before = Tokens(tmp_path, 2).fingerprint
    assert Tokens(tmp_path, 2).fingerprint == before
    write_tokens(tmp_path / "a.bin", [[4, 5, 6]])
    assert Tokens(tmp_path, 2).fingerprint != before


def test_a_worker_maps_the_files_itself(tmp_path):
    write_tokens(tmp_path / "x.bin", [range(1000)])
    dataset = Tokens("x.bin", 10, project_dir=tmp_path)
    assert len(dataset) == 100
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1500
    assert pickle.loads(pickled)[99]["input_ids"].tolist() == [*range(990, 1000)]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_numpy_reads_what_was_written(tmp_path, dtype):
    assert write_tokens(tmp_path / "x.npy", ([n] * n for n in range(5)), dtype, end_of_document=7) == 15
    expected = [token for n in range(5) for token in [*[n] * n, 7]]
    assert np.load(tmp_path / "x.npy").tolist() == expected
    assert np.load(tmp_path / "x.npy").dtype == dtype
    write_tokens(tmp_path / "x.bin", [expected], dtype)
    assert np.fromfile(tmp_path / "x.bin", dtype).tolist() == expected


def test_a_token_too_large_for_its_type_is_rejected_and_nothing_is_left(tmp_path):
    with raises(DataError, "1", "3", "70000", "0", "65535"):
        write_tokens(tmp_path / "x.bin", [[1], [3, 70_000]])
    assert list(tmp_path.iterdir()) == []
    with raises(ConfigError):
        write_tokens(tmp_path / "x.txt", [[1]])


def test_files_that_hold_no_tokens_are_named(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    with raises(DataError, "a.npy", "2", "3"):
        len(Tokens("a.npy", 2, project_dir=tmp_path))
    (tmp_path / "b.npy").write_bytes(b"no numpy")
    with raises(DataError, "b.npy"):
        len(Tokens("b.npy", 2, project_dir=tmp_path))
    (tmp_path / "c.bin").write_bytes(b"odd")
    with raises(DataError, "c.bin"):
        len(Tokens("c.bin", 2, project_dir=tmp_path))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sequence_length": 1}, ("2",)),
        ({}, ("sequence_length",)),
        ({"sequence_length": 4, "dtype": "float32"}, ("float32",)),
        ({"documents": True}, ("end_of_document",)),
        ({"sequence_length": 4, "end_of_document": 0}, ()),
    ],
)
def test_settings_that_cannot_work_are_rejected(options, problem):
    with raises(ConfigError, *problem):
        Tokens("x.bin", **options)
