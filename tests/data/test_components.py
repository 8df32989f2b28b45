"""Datasets from their components: nested ones, functions, and rows that go through a function first."""

from pathlib import Path

import pytest
import torch
from tests.messages import raises

from trainwright import Component
from trainwright.build.data import DatasetBuilder
from trainwright.config import Origin, ProcessSection
from trainwright.data.mix import Mix, MixedStream
from trainwright.errors import ConfigError, DataError, TrainwrightError

FILE = """
import functools

from torch.utils.data import Dataset, IterableDataset


class Rows(Dataset):
    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return {"input_ids": [self.first + index] * (1 + index % 3)}


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(Rows(self.size))


def create_dataset(path, args):
    return Rows(args.size, first=len(path))


def create_dataset_of_two(path, args):
    return Rows(2)


def longer(row, by=1):
    return {"input_ids": row["input_ids"] * by}


def versioned(row, version=1):
    return row


copied = functools.partial(dict)


def cut(row):
    return None if row["input_ids"][0] % 2 else [{"input_ids": [token]} for token in row["input_ids"]]
"""


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "rows.py").write_text(FILE)

    def build(process=None, **settings):
        if process is not None:
            process = ProcessSection.from_mapping(process).located_at(Origin("run.yaml", 3))
        builder = DatasetBuilder(project_dir=Path(tmp_path), seed=3, process=process)
        return builder.build("data.train", Component.from_mapping(settings))

    return build


def tokens(dataset):
    return [torch.as_tensor(sample["input_ids"]).tolist() for sample in dataset]


def test_sources_nest(build):
    inner = {"a": {"type": "rows.Rows", "size": 30, "weight": 3}, "b": {"type": "rows.Rows", "size": 9, "weight": 1}}
    mixed = build(type="mix", sources=inner)
    assert isinstance(mixed, Mix)
    assert mixed.weights == {"a": 3, "b": 1}
    without = {name: {key: value for key, value in each.items() if key != "weight"} for name, each in inner.items()}
    packed = build(type="pack", length=8, source={"type": "mix", "sources": without})
    assert sum(len(row["input_ids"]) for row in packed) == len(packed) * 8


def test_weights_may_be_given_beside_the_sources(build):
    sources = {"a": {"type": "rows.Rows", "size": 30}, "b": {"type": "rows.Rows", "size": 9}}
    assert build(type="mix", sources=sources, weights={"a": 1, "b": 1}).weights == {"a": 1, "b": 1}


def test_a_weight_that_is_missing_is_named(build):
    sources = {"a": {"type": "rows.Rows", "size": 30, "weight": 1}, "b": {"type": "rows.Rows", "size": 9}}
    with raises(ConfigError, "data.train.sources"):
        build(type="mix", sources=sources)


def test_weights_in_two_places_are_rejected(build):
    sources = {"a": {"type": "rows.Rows", "size": 30, "weight": 1}, "b": {"type": "rows.Rows", "size": 9, "weight": 1}}
    with raises(ConfigError, "data.train.weights"):
        build(type="mix", sources=sources, weights={"a": 1, "b": 1})
    with raises(ConfigError, "1", "2"):
        build(type="mix", sources={"a": {"type": "rows.Rows", "size": 30}}, weights=[1, 2])


def test_a_function_that_is_not_there_is_named_as_one(build):
    with raises(TrainwrightError, "rows2.cut", "data.process.type", "datasets/clean.py"):
        build({"type": "rows2.cut"}, type="rows.Rows", size=3)


def test_an_error_in_a_nested_source_says_where_it_stands(build):
    with raises(TrainwrightError, "data.train.source.source", "sise"):
        build(type="pack", length=8, source={"type": "pack", "length": 4, "source": {"type": "rows.Rows", "sise": 3}})


def test_a_function_of_a_path_and_args_reads_them_as_attributes(build):
    dataset = build(type="rows.create_dataset", path="abc", args={"size": 4})
    assert tokens(dataset)[0] == [3]
    assert len(dataset) == 4
    assert len(build(type="rows.create_dataset_of_two", path="abc")) == 2
    with raises(ConfigError, "data.train.args", "3"):
        build(type="rows.create_dataset", path="abc", args=3)


def test_rows_go_through_a_function_before_they_are_mixed_or_packed(build):
    assert tokens(build({"type": "rows.longer", "by": 2}, type="rows.Rows", size=3)) == [[0] * 2, [1] * 4, [2] * 6]
    packed = build({"type": "rows.longer", "by": 2}, type="pack", length=4, source={"type": "rows.Rows", "size": 2})
    assert sorted(tokens(packed)) == [[0, 0, 0, 0], [1, 1, 1, 1]] or len(packed) == 2


def test_a_row_may_become_several_or_none(build):
    expected = [[0], [2], [2], [2]]
    assert tokens(build({"type": "rows.cut"}, type="rows.Rows", size=4)) == expected
    assert tokens(build({"type": "rows.cut"}, type="rows.Stream", size=4)) == expected


def test_a_wrong_argument_of_the_function_is_named(build):
    with raises(TrainwrightError, "bye", "data.process"):
        build({"type": "rows.longer", "bye": 2}, type="rows.Rows", size=3)


def test_version_and_num_workers_are_settings_and_no_arguments_of_the_function(build):
    process = {"type": "rows.longer", "by": 2, "num_workers": 2}
    first = build(process, type="rows.Rows", size=3)
    assert tokens(first) == [[0] * 2, [1] * 4, [2] * 6]
    assert build({**process, "num_workers": 0}, type="rows.Rows", size=3).folder == first.folder
    assert build({**process, "version": "b"}, type="rows.Rows", size=3).folder != first.folder


def test_a_stream_is_processed_by_the_loaders_workers(build):
    process = {"type": "rows.longer", "by": 2, "version": 2}
    assert tokens(build(process, type="rows.Stream", size=2)) == [[0] * 2, [1] * 4]
    with raises(ConfigError, "data.process.num_workers", "data.num_workers", at="run.yaml:3"):
        build({**process, "num_workers": 2}, type="rows.Stream", size=2)


def test_a_parameter_with_the_name_of_a_setting_is_rejected(build):
    assert tokens(build({"type": "rows.versioned"}, type="rows.Rows", size=1)) == [[0]]
    with raises(ConfigError, "data.process.version", at="run.yaml:3"):
        build({"type": "rows.versioned", "version": 3}, type="rows.Rows", size=1)


def test_a_function_without_a_source_needs_a_version(build):
    with raises(ConfigError, "version", at="run.yaml:3"):
        build({"type": "rows.copied"}, type="rows.Rows", size=1)
    assert tokens(build({"type": "rows.copied", "version": 1}, type="rows.Rows", size=1)) == [[0]]


def test_an_index_and_a_stream_are_mixed_as_streams(build):
    mixed = build(type="mix", sources={"a": {"type": "rows.Rows", "size": 3}, "b": {"type": "rows.Stream", "size": 2}})
    assert isinstance(mixed, MixedStream)
    assert mixed.run_seed == 3
    assert sorted(tokens(mixed)) == [[0], [0], [1, 1], [1, 1], [2, 2, 2]]


def test_a_path_that_is_missing_is_named(build):
    with raises(DataError, "nowhere.jsonl"):
        len(build(type="json_lines", path="nowhere.jsonl"))
