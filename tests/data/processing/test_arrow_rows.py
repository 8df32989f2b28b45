"""Samples in a folder of Arrow files."""

import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from tests.messages import raises
from torch.utils.data import DataLoader

from trainwright.data import arrow as arrow_rows
from trainwright.data.arrow import ArrowRows, ArrowRowWriter, StoredSample
from trainwright.data.cache import MAKER_FILE
from trainwright.data.collators import Stack
from trainwright.data.loader import TrainData
from trainwright.errors import DataError


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(arrow_rows, "_BATCH_ROWS", 3)


def write(folder, samples):
    writer = ArrowRowWriter(folder)
    for sample in samples:
        writer.add(StoredSample.of(sample))
    writer.finish()
    (folder / MAKER_FILE).touch()
    return ArrowRows(folder)


def test_samples_come_back_by_index_over_many_batches(tmp_path, small_batches):
    rows = write(tmp_path, [{"input_ids": [n] * (n + 1), "text": str(n)} for n in range(10)])
    assert len(rows) == 10
    assert rows.columns == ["input_ids", "text"]
    assert [sample["text"] for sample in rows] == list("0123456789")
    assert [sample["input_ids"].tolist() for sample in rows.__getitems__([9, 0, 4, -1])] == [
        [9] * 10, [0], [4] * 5, [9] * 10,
    ]  # fmt: skip
    assert rows.__getitems__([]) == []


@pytest.mark.parametrize("index", [10, -11])
def test_an_index_outside_is_rejected(tmp_path, index):
    rows = write(tmp_path, [{"a": 1}] * 10)
    with pytest.raises(IndexError, match="out of range for the 10 samples"):
        rows[index]


def test_lengths_are_the_tokens_of_each_sample(tmp_path, small_batches):
    rows = write(tmp_path, [{"input_ids": list(range(n))} for n in (3, 0, 5, 2)])
    assert isinstance(rows.lengths, np.ndarray)
    assert rows.lengths.tolist() == [3, 0, 5, 2]


def test_without_input_ids_there_are_no_lengths(tmp_path):
    assert not hasattr(write(tmp_path, [{"text": "a"}]), "lengths")


def plain(value):
    """A nest with its tensors as dtype, shape and numbers, which can be compared."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_each_sample_has_the_keys_that_it_had(tmp_path, small_batches):
    samples = [{"a": 1}, {"a": 2, "b": "x"}, {"a": 3, "b": None}, {"a": 4}, {"c": "y"}, {"b": "z"}, {"d": 5}]
    rows = write(tmp_path, samples)
    assert list(rows) == samples
    assert rows.columns == ["a", "b", "c", "d"]


def test_each_dict_in_a_sample_has_the_keys_that_it_had(tmp_path, small_batches):
    samples = [
        {"m": {"a": 1}},
        {"m": {"b": "x"}},
        {"m": {}},
        {"m": {"a": 2}},
        {"m": None},
        {"turns": [{"who": "me"}, {"what": {"x": "1"}}, {"what": {"y": "2", "x": None}}]},
        {"turns": []},
        {"turns": [{"who": "me", "what": {}}]},
        {"m": {"c": {"d": 1.5}}},
    ]
    assert list(write(tmp_path, samples)) == samples


def test_empty_arrays_have_the_dtype_and_shape_that_they_had(tmp_path, small_batches):
    samples = [
        {"x": torch.zeros(0, 3)},
        {"x": np.zeros((2, 0), np.float32)},
        {"x": torch.ones(1, 2)},
        {"x": torch.zeros(0, 0, dtype=torch.uint8)},
        {"y": torch.zeros(0, dtype=torch.bool), "m": {"x": torch.zeros(0)}},
        {"y": [torch.zeros(0, 2), torch.zeros(0, 2)], "m": {"x": torch.zeros(4, dtype=torch.int64)}},
        {"z": [torch.zeros(0, 2), torch.zeros(0)]},
    ]
    expected = [{**sample} for sample in samples]
    expected[1] = {"x": torch.zeros(2, 0)}
    expected[5]["y"] = torch.zeros(2, 0, 2)
    assert plain(list(write(tmp_path, samples))) == plain(expected)


def test_samples_that_are_all_alike_need_no_forms_and_those_that_are_not_do_not_cost_a_file_each(tmp_path):
    write(tmp_path, [{"x": [1], "m": {"a": 1}}] * 3)
    assert b"__form__" not in (tmp_path / "rows-00000.arrow").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    rows = write(other, [{"x": torch.zeros(n % 2)} for n in range(20)])
    assert len(list(other.glob("rows-*.arrow"))) == 1
    assert [len(sample["x"]) for sample in rows] == [0, 1] * 10
    with pytest.raises(TypeError, match="__form__"):
        StoredSample.of({"__form__": 1})


def test_a_column_that_turns_from_whole_numbers_to_floats_is_of_floats_everywhere(tmp_path, small_batches):
    rows = write(tmp_path, [{"x": [1, 2], "y": 1}] * 3 + [{"x": [0.5], "y": 0.5}])
    assert rows[0]["x"].dtype == rows[3]["x"].dtype == torch.float32
    assert isinstance(rows[0]["y"], float)


def test_values_of_two_kinds_in_one_column_are_rejected_with_its_name(tmp_path, small_batches):
    with raises(DataError, "x", "0", "2"):
        write(tmp_path, [{"x": 1}, {"x": "a"}, {"x": 2}])
    with raises(DataError, "3", "4"):
        write(tmp_path, [{"x": 1}] * 3 + [{"x": "a"}] * 2)


def test_a_batch_is_written_when_it_has_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_rows, "_BATCH_BYTES", 1000)
    rows = write(tmp_path, [{"x": torch.zeros(60)}] * 20)
    assert len(rows.open().starts) - 1 == 4


def test_opening_waits_until_the_first_use_and_a_copy_opens_for_itself(tmp_path):
    rows = ArrowRows(tmp_path / "not there yet")
    with raises(DataError):
        len(rows)
    rows = write(tmp_path, [{"x": [1]}])
    assert len(rows) == 1
    assert b"ArrowRows" in pickle.dumps(rows)
    assert len(pickle.dumps(rows)) < 500
    assert pickle.loads(pickle.dumps(rows))[0]["x"].tolist() == [1]


def test_a_spawned_loader_reads_the_same(tmp_path):
    rows = write(tmp_path, [{"x": [n, n]} for n in range(6)])
    len(rows)
    context = multiprocessing.get_context("spawn")
    batches = list(DataLoader(rows, batch_size=4, num_workers=1, multiprocessing_context=context))
    assert [batch["x"][:, 0].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5]]


def test_our_loader_reads_it_without_watching_for_draws(tmp_path):
    rows = write(tmp_path, [{"x": [n]} for n in range(10)])
    data = TrainData(rows, collator=Stack(), global_batch_size=4, seed=0, shuffle=False)
    assert rows.draws_nothing
    assert next(data.batches(iter))["x"].tolist() == [[0], [1], [2], [3]]
