"""Datasets of Hugging Face, offline: from files and saved folders, by index and as a stream that goes on exactly."""

from __future__ import annotations

import builtins
import json
import pickle
import sys

import pytest
import torch
from tests.messages import raises
from torch.utils.data import DataLoader, IterableDataset

from trainwright.data.fetch import is_stream
from trainwright.data.sources.huggingface import huggingface
from trainwright.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")

COUNT = 14


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    datasets.disable_progress_bars()


@pytest.fixture
def project(tmp_path):
    """Three files of rows n = 0 … 13, in a project's data folder."""
    (tmp_path / "data").mkdir()
    for name, numbers in {"a": range(5), "b": range(5, 7), "c": range(7, COUNT)}.items():
        rows = [{"n": n, "ids": [n, n + 1], "ragged": [1] * (n % 3), "t": f"text {n}"} for n in numbers]
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


FILES = ["data/a.jsonl", "data/b.jsonl", "data/c.jsonl"]


def numbers(rows):
    return [int(row["n"]) for row in rows]


def stream_of(project, **options):
    return huggingface("json", data_files=FILES, streaming=True, project_dir=project, **options)


def test_files_are_read_by_index_with_numbers_as_tensors(project):
    rows = huggingface("json", data_files=FILES, project_dir=project)
    assert len(rows) == COUNT
    assert rows.draws_nothing
    first, last = rows.__getitems__([0, 13])
    assert first["n"].dtype == torch.int64
    assert last["ids"].tolist() == [13, 14]
    assert last["ragged"].tolist() == [1]
    assert first["t"] == "text 0"
    assert numbers([rows[5], rows[-1]]) == [5, 13]
    assert numbers([pickle.loads(pickle.dumps(rows))[3]]) == [3]


def test_the_fingerprint_changes_with_the_rows_and_the_columns(project):
    def fingerprint(**options):
        return huggingface("json", data_files=FILES, project_dir=project, **options).fingerprint

    before = fingerprint()
    assert fingerprint() == before
    assert fingerprint(columns=["n"]) != before
    (project / "data" / "b.jsonl").write_text('{"n": 70, "ids": [1], "ragged": [], "t": "x"}\n')
    assert fingerprint() != before


def test_a_stream_gives_the_same_rows_in_any_shards(project):
    stream = stream_of(project)
    assert is_stream(stream)
    assert numbers(stream) == numbers(stream) == list(range(COUNT))
    row = next(iter(stream))
    assert (row["ids"].tolist(), row["t"]) == ([0, 1], "text 0")
    assert stream.num_shards == 3
    for num_shards in (1, 2, 3):
        shards = [stream.shard(num_shards, index) for index in range(num_shards)]
        assert [n for shard in shards for n in numbers(shard)] == list(range(COUNT))


def test_a_stream_goes_on_after_any_prefix_and_begins_anew_after_that(project):
    stream = stream_of(project)
    iterator = iter(stream)
    for start in range(COUNT + 1):
        state = json.loads(json.dumps(stream.state_dict()))
        other = stream_of(project)
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert numbers(other) == list(range(start, COUNT))
        assert numbers(other) == list(range(COUNT))
        next(iterator, None)


def test_iterations_side_by_side_do_not_disturb_each_other(project):
    stream = stream_of(project, columns=["n"])
    first, second = iter(stream), iter(stream)
    assert numbers([next(first), next(second), next(first)]) == [0, 0, 1]
    assert numbers(second) == list(range(1, COUNT))
    assert numbers(first) == list(range(2, COUNT))


class InWorker(IterableDataset):
    """What a loader does with shards in its workers: each worker reads the one that it was given."""

    def __init__(self, stream, skip):
        self.stream = stream
        self.skip = skip

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        shard = self.stream.shard(worker.num_workers, worker.id)
        iterator = iter(shard)
        for _ in range(self.skip):
            next(iterator)
        shard.load_state_dict(shard.state_dict())
        yield from numbers(shard)


@pytest.mark.parametrize("skip", [0, 3])
def test_a_worker_reads_the_whole_shard_that_it_was_given(project, skip):
    stream = stream_of(project)
    found = [n for batch in DataLoader(InWorker(stream, skip), num_workers=2, batch_size=None) for n in [int(batch)]]
    parts = [numbers(stream.shard(2, index)) for index in range(2)]
    assert sorted(found) == sorted(parts[0][skip:] + parts[1][skip:])


def test_a_saved_folder_is_read_both_ways(project):
    whole = datasets.Dataset.from_dict({"n": list(range(9)), "t": ["x"] * 9})
    whole.save_to_disk(str(project / "one"), num_shards=3)
    datasets.DatasetDict({"train": whole, "test": whole.select(range(2))}).save_to_disk(str(project / "many"))
    assert numbers(huggingface("one", project_dir=project)) == list(range(9))
    stream = huggingface("one", streaming=True, project_dir=project)
    assert stream.num_shards == 3
    assert numbers(stream) == list(range(9))
    assert numbers(huggingface("many", split="test", project_dir=project)) == [0, 1]
    with raises(ConfigError):
        len(huggingface("many", project_dir=project))
    with raises(ConfigError, "valid"):
        len(huggingface("many", split="valid", project_dir=project))
    with raises(ConfigError):
        len(huggingface("one", split="train", project_dir=project))
    with raises(ConfigError):
        len(huggingface("one", revision="main", project_dir=project))


def test_several_splits_need_a_choice(project):
    files = {"train": FILES[:2], "test": FILES[2]}
    with raises(ConfigError):
        len(huggingface("json", data_files=files, project_dir=project))
    assert len(huggingface("json", data_files=files, split="test", project_dir=project)) == 7
    assert numbers(huggingface("json", data_files=files, split="test", streaming=True, project_dir=project)) == [
        *range(7, 14)
    ]


def test_a_folder_of_files_is_read_from_the_project(project):
    assert sorted(numbers(huggingface("data", project_dir=project))) == list(range(COUNT))


def test_only_the_columns_asked_for_are_kept(project):
    assert list(huggingface("json", data_files=FILES, columns=["t"], project_dir=project)[0]) == ["t"]
    assert list(next(iter(stream_of(project, columns=["n", "t"])))) == ["n", "t"]
    with raises(DataError):
        len(huggingface("json", data_files=FILES, columns=["x"], project_dir=project))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("offline", [None, True])
def test_a_name_that_cannot_be_reached_says_so(streaming, offline):
    dataset = huggingface("nobody/nothing", streaming=streaming, offline=offline)
    with raises(DataError, "nobody/nothing"):
        dataset.dataset  # noqa: B018


def test_offline_holds_only_while_loading(project):
    before = datasets.config.HF_HUB_OFFLINE
    len(huggingface("json", data_files=FILES, offline=not before, project_dir=project))
    assert before == datasets.config.HF_HUB_OFFLINE


def test_missing_files_and_bad_settings_are_named(project):
    with raises(DataError, "no.jsonl"):
        len(huggingface("json", data_files="no.jsonl", project_dir=project))
    with raises(ConfigError, "data_files"):
        huggingface("json")


def test_a_broken_row_ends_the_stream_with_an_error_and_not_quietly(project):
    (project / "data/b.jsonl").write_text('{"n": \n')
    iterator = iter(stream_of(project))
    for _ in range(5):
        next(iterator)
    with pytest.raises(Exception, match="JSON"):
        next(iterator)


def test_a_missing_library_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def reject(name, *arguments, **options):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "datasets")
    monkeypatch.setattr(builtins, "__import__", reject)
    with raises(DataError):
        len(huggingface("json", data_files="x.jsonl"))
