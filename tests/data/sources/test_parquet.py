"""Parquet: the same rows by index and as a stream, row group by row group, from any place and in any shards."""

from __future__ import annotations

import itertools
import os
import pickle
import uuid

import fsspec
import pytest
import torch
from tests.messages import raises
from torch.utils.data import DataLoader

from trainwright.data.sources import parquet as parquet_module
from trainwright.data.sources.parquet import parquet
from trainwright.errors import ConfigError, DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [{"n": n, "t": f"text {n}" if n % 5 else None, "nest": {"a": [str(n)]}} for n in range(23)]


@pytest.fixture
def folder(tmp_path):
    """Three files, one of them without rows, with row groups of four."""
    schema = pa.Table.from_pylist(ROWS).schema
    for name, rows in {"a": ROWS[:10], "b": [], "c": ROWS[10:]}.items():
        pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / f"{name}.parquet", row_group_size=4)
    return tmp_path


def test_rows_are_the_same_by_index_and_as_a_stream_in_any_shards(folder):
    rows = parquet(folder)
    assert len(rows) == 23
    assert rows.__getitems__([22, 0, -1, 7, 0]) == [ROWS[22], ROWS[0], ROWS[22], ROWS[7], ROWS[0]]
    stream = parquet(folder, streaming=True)
    assert list(stream) == ROWS == [rows[index] for index in range(23)]
    assert list(stream) == ROWS
    assert stream.num_shards == 3 + 1 + 4
    for num_shards in range(1, 9):
        shards = [stream.shard(num_shards, index) for index in range(num_shards)]
        assert [row for shard in shards for row in shard] == ROWS


@pytest.mark.parametrize("most_files", [64, 2])
def test_a_stream_goes_on_after_any_prefix(folder, monkeypatch, most_files):
    monkeypatch.setattr(parquet_module, "_MOST_FILES_TO_ASK", most_files)
    monkeypatch.setattr(parquet_module, "_ROWS_AT_A_TIME", 3)
    stream = parquet(folder, streaming=True)
    assert stream.num_shards == (8 if most_files == 64 else 3)
    iterator = iter(stream)
    for start in range(24):
        other = pickle.loads(pickle.dumps(stream))
        other.load_state_dict(stream.state_dict())
        assert list(other) == ROWS[start:]
        assert list(other) == ROWS
        next(iterator, None)


def test_resuming_reads_only_the_row_groups_that_are_left(folder, monkeypatch):
    read = []
    original = parquet_module._OpenFile.read_group
    monkeypatch.setattr(
        parquet_module._OpenFile, "read_group", lambda file, number: read.append(number) or original(file, number)
    )
    stream = parquet(folder / "c.parquet", streaming=True)
    iterator = iter(stream)
    for _ in range(12):
        next(iterator)
    state = stream.state_dict()
    read.clear()
    stream.load_state_dict({**state, "file_range": 3, "row": 0, "in": [3, str(stream.file_ranges[3])]})
    assert list(stream) == ROWS[22:]
    assert read == [3]


def test_row_groups_used_last_are_kept_within_a_bound(folder, monkeypatch):
    rows = parquet(folder)
    rows.__getitems__(range(23))
    assert len(rows._tables) == 7
    monkeypatch.setattr(parquet_module, "_KEPT_BYTES", 0)
    rows.__getitems__(range(23))
    other = pickle.loads(pickle.dumps(rows))
    assert not other._tables
    other.__getitems__(range(23))
    assert len(other._tables) == 1


def test_lists_of_numbers_become_tensors_and_those_with_gaps_stay_lists(tmp_path):
    table = pa.table(
        {
            "input_ids": pa.array([[1, 2], [], [3]], pa.list_(pa.uint16())),
            "scores": pa.array([[0.5], [1.5], [2.5]], pa.list_(pa.float64(), 1)),
            "gaps": pa.array([[1, None], None, [3]]),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    for rows in (parquet("x.parquet", project_dir=tmp_path), [*parquet(tmp_path, streaming=True)]):
        assert [rows[index]["input_ids"].tolist() for index in range(3)] == [[1, 2], [], [3]]
        assert rows[0]["input_ids"].dtype == torch.int64
        assert rows[2]["scores"].dtype == torch.float32
        assert rows[2]["scores"].tolist() == [2.5]
        assert [rows[index]["gaps"] for index in range(2)] == [[1, None], None]
        assert torch.equal(rows[2]["gaps"], torch.tensor([3]))


@pytest.mark.parametrize("taken", [1, 4, 11, 23])
def test_a_stream_whose_files_before_its_place_have_changed_does_not_go_on(folder, taken):
    stream = parquet(folder, streaming=True)
    head = list(itertools.islice(stream, taken))
    state = stream.state_dict()
    pq.write_table(pa.table({"n": [1]}), folder / "0.parquet")
    with raises(DataError):
        parquet(folder, streaming=True).load_state_dict(state)
    (folder / "0.parquet").unlink()
    stream = parquet(folder, streaming=True)
    stream.load_state_dict(state)
    assert head + list(stream) == ROWS


def test_a_list_with_a_number_that_does_not_fit_keeps_its_type_and_its_neighbours_do_not(tmp_path):
    table = pa.table(
        {
            "whole": pa.array([[2**63 + 5], [1], []], pa.list_(pa.uint64())),
            "real": pa.array([[0.5], [1e300, float("inf")], [float("inf")]], pa.list_(pa.float64())),
            "gaps": pa.array([[2**63 + 5], None, [7]], pa.list_(pa.uint64())),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    for rows in (parquet("x.parquet", project_dir=tmp_path), [*parquet(tmp_path, streaming=True)]):
        for name in ("whole", "real", "gaps"):
            assert [rows[n][name] if rows[n][name] is None else rows[n][name].tolist() for n in range(3)] == table[
                name
            ].to_pylist()
        assert [rows[n]["whole"].dtype for n in range(3)] == [torch.uint64, torch.int64, torch.int64]
        assert [rows[n]["real"].dtype for n in range(3)] == [torch.float32, torch.float64, torch.float32]
        assert [rows[n]["gaps"].dtype for n in (0, 2)] == [torch.uint64, torch.int64]


def test_the_fingerprint_changes_with_the_files(folder):
    before = parquet(folder).fingerprint
    os.utime(folder / "a.parquet", ns=(1, 1))
    assert parquet(folder).fingerprint != before


def test_only_the_columns_asked_for_are_read_in_their_order(folder):
    assert list(parquet(folder, columns=["t", "n"])[1]) == ["t", "n"]
    assert list(next(iter(parquet(folder, columns=["t", "n"], streaming=True)))) == ["t", "n"]
    with raises(DataError, "a.parquet"):
        len(parquet(folder, columns=["x"]))


def test_remote_files_are_read_both_ways(folder, tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    for name in "abc":
        fsspec.filesystem("memory").pipe(f"{url}/{name}.parquet", (folder / f"{name}.parquet").read_bytes())
    assert list(parquet(url, streaming=True)) == ROWS
    assert parquet(url, cache_dir=tmp_path / "cache").__getitems__(range(23)) == ROWS


def test_a_file_that_is_no_parquet_raises_once_and_the_next_follows(folder, monkeypatch):
    monkeypatch.setattr(parquet_module, "_MOST_FILES_TO_ASK", 0)
    (folder / "b.parquet").write_bytes(b"no parquet at all")
    iterator = iter(parquet(folder, streaming=True))
    assert [next(iterator) for _ in range(10)] == ROWS[:10]
    with raises(DataError, "b.parquet", "ArrowInvalid"):
        next(iterator)
    assert list(iterator) == ROWS[10:]


def test_rows_are_read_in_a_worker(folder):
    loader = DataLoader(parquet(folder, columns=["n"]), batch_size=10, num_workers=1)
    assert [number for batch in loader for number in batch["n"].tolist()] == list(range(23))


def test_a_cache_for_a_stream_is_rejected(folder):
    with raises(ConfigError):
        parquet(folder, streaming=True, cache_dir=folder)
