"""What an input is, as a key."""

import os
import uuid

import fsspec
import pytest
from tests.messages import raises

from trainwright.config import Component
from trainwright.data.processing.fingerprint import canonical_arguments, describe_input
from trainwright.data.sources.files import json_lines
from trainwright.errors import ConfigError


def test_arguments_are_one_text_whatever_their_order():
    one = canonical_arguments({"a": 1, "b": [1.5, None, {"c": "x"}]}, "clean")
    assert one == canonical_arguments({"b": (1.5, None, {"c": "x"}), "a": 1}, "clean")
    assert one != canonical_arguments({"a": 2, "b": [1.5, None, {"c": "x"}]}, "clean")


def test_an_argument_without_a_text_is_refused_by_name():
    with raises(ConfigError, "0"):
        canonical_arguments({"tokenizer": [object()]}, "clean")


def test_an_argument_that_names_a_file_changes_with_it(in_tmp):
    (in_tmp / "bpe.json").write_text("one")
    before = canonical_arguments({"tokenizer": "bpe.json"}, "clean")
    (in_tmp / "bpe.json").write_text("longer")
    assert canonical_arguments({"tokenizer": "bpe.json"}, "clean") != before


@pytest.mark.parametrize("path", ["data", "data/*.txt", "data/**/*.txt", "data/a.txt"])
def test_an_input_changes_with_its_files_folders_and_globs(in_tmp, path):
    (in_tmp / "data").mkdir()
    (in_tmp / "data" / "a.txt").write_text("one")
    component = {"type": "text", "path": path}
    before = describe_input(component, [])
    assert describe_input(component, []) == before
    assert describe_input({**component, "type": "other"}, []) != before
    os.utime(in_tmp / "data" / "a.txt", ns=(1, 1))
    assert describe_input(component, []) != before


def test_a_cache_inside_of_the_data_and_the_cache_dir_do_not_count(in_tmp):
    (in_tmp / "data" / "processed").mkdir(parents=True)
    (in_tmp / "data" / "processed" / "CACHEDIR.TAG").touch()
    component = Component("text", path="data", cache_dir="data/processed")
    before = describe_input(component, [])
    (in_tmp / "data" / "processed" / "rows").write_text("made")
    assert describe_input(component, []) == before


def test_texts_that_are_no_paths_are_taken_as_texts(in_tmp):
    for text in ("", "a" * 5000, "line\nline", "hf://name", "[INST] *", "~nobody/x", "\0"):
        assert describe_input({"type": "text", "prompt": text}, []) == describe_input(
            {"type": "text", "prompt": text}, []
        )


def test_an_input_changes_with_the_file_of_the_users_class(load):
    text = "class Rows:\n    def __getitem__(self, index):\n        return 1\n"
    one, two = load(text, "rows"), load(text.replace("1", "2"), "rows")
    assert describe_input({"type": "Rows"}, one.Rows()) == describe_input({"type": "Rows"}, load(text, "rows").Rows())
    assert describe_input({"type": "Rows"}, one.Rows()) != describe_input({"type": "Rows"}, two.Rows())


def test_an_input_changes_with_what_the_users_class_imports(load):
    def describe(value):
        helper = load(f"def value(i):\n    return {value}\n", "helper")
        rows = load(
            f"import {helper.__name__} as helper\n"
            "class Rows:\n    def __getitem__(self, i):\n        return helper.value(i)\n"
        )
        return describe_input({"type": "Rows"}, rows.Rows())

    assert describe(1) == describe(1)
    assert describe(1) != describe(2)


def test_an_input_changes_with_the_function_that_makes_it(load):
    def describe(value):
        rows = f"SCALE = {value}\ndef rows():\n    return [SCALE]\n"
        made = load(rows + "def create_dataset(path, args=None):\n    return rows()\n").create_dataset
        return describe_input({"type": "make", "path": "nowhere"}, made("nowhere"), target=made)

    assert describe(1) == describe(1)
    assert describe(1) != describe(2)


def test_a_path_is_looked_up_where_the_source_does(in_tmp, tmp_path_factory):
    project = tmp_path_factory.mktemp("project")
    for folder in (in_tmp, project):
        (folder / "a.jsonl").write_text("{}\n")

    def open_here(path):
        return path

    def describe(target):
        return describe_input({"type": "rows", "path": "a.jsonl"}, [], target=target, project_dir=project)

    ours, theirs = describe(json_lines), describe(open_here)
    os.utime(in_tmp / "a.jsonl", ns=(1, 1))
    assert describe(json_lines) == ours
    assert describe(open_here) != theirs  # who does not take project_dir may read from either
    theirs = describe(open_here)
    os.utime(project / "a.jsonl", ns=(1, 1))
    assert describe(json_lines) != ours
    assert describe(open_here) != theirs


def test_an_input_changes_with_files_behind_urls(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    memory = fsspec.filesystem("memory")
    folder = f"/{uuid.uuid4().hex}"
    memory.pipe({f"{folder}/a.txt": b"one"})
    try:
        for url in (
            f"file://{tmp_path}/a.jsonl",
            f"memory:/{folder}/a.txt",
            f"memory:/{folder}",
            f"memory:/{folder}/*.txt",
        ):
            component = {"type": "mine", "path": url}
            before = describe_input(component, [])
            assert describe_input(component, []) == before
            os.utime(tmp_path / "a.jsonl", ns=(len(url), 1))
            memory.pipe({f"{folder}/a.txt": b"longer" * len(url)})
            assert describe_input(component, []) != before
    finally:
        memory.rm(folder, recursive=True)


def test_the_seed_counts_where_the_target_takes_it():
    def takes(run_seed):
        return [run_seed]

    def takes_not():
        return []

    def describe(target, seed, **arguments):
        return describe_input({"type": "rows", **arguments}, [], target=target, run_seed=seed)

    assert describe(takes, 1) != describe(takes, 2)
    assert describe(takes_not, 1) == describe(takes_not, 2)
    assert describe(takes, 1, run_seed=7) == describe(takes, 2, run_seed=7)  # the config's wins
    assert describe(None, 1) != describe(None, 2)
