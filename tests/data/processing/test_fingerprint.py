"""What a function and an input are, as a key."""

import functools
import json
import os
import subprocess
import sys
import uuid

import fsspec
import pytest
import torch
from tests.messages import raises
from torch.utils.data import TensorDataset

from trainwright.config import Component
from trainwright.data.process import canonical_arguments, describe_input, fingerprint_function
from trainwright.data.sources.files import json_lines
from trainwright.errors import ConfigError


def test_arguments_are_one_text_whatever_their_order():
    one = canonical_arguments({"a": 1, "b": [1.5, None, {"c": "x"}]}, "clean")
    assert one == canonical_arguments({"b": (1.5, None, {"c": "x"}), "a": 1}, "clean")
    assert one != canonical_arguments({"a": 2, "b": [1.5, None, {"c": "x"}]}, "clean")


def test_an_argument_without_a_text_is_rejected_by_name():
    with raises(ConfigError, "0", "version"):
        canonical_arguments({"tokenizer": [object()]}, "clean")
    assert canonical_arguments({"tokenizer": [object()]}, "clean", version=1)


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


def test_an_input_changes_with_the_source_of_the_users_class(load):
    text = "class Rows:\n    def __getitem__(self, index):\n        return 1\n"

    def describe(text):
        return describe_input({"type": "Rows"}, load(text, "rows").Rows())

    assert describe(text) == describe(text)
    assert describe(text) != describe(text.replace("1", "2"))


def test_an_input_changes_with_the_source_of_the_function_that_makes_it(load):
    def describe(value):
        made = load(f"def create_dataset(path, args=None):\n    return [{value}]\n").create_dataset
        return describe_input({"type": "make", "path": "nowhere"}, made("nowhere"), target=made)

    assert describe(1) == describe(1)
    assert describe(1) != describe(2)


def test_what_the_users_class_imports_is_not_followed(load):
    def describe(value):
        load(f"def value(i):\n    return {value}\n", "helper")
        rows = load("import helper\nclass Rows:\n    def __getitem__(self, i):\n        return helper.value(i)\n")
        return describe_input({"type": "Rows"}, rows.Rows())

    assert describe(1) == describe(2)


def test_of_a_librarys_class_only_the_name_counts():
    text = describe_input({"type": "text"}, TensorDataset(torch.zeros(1)), target=json_lines)
    assert json.loads(text) == {"component": {"type": "text"}}


def test_an_object_in_a_component_needs_a_version_or_a_dataset_that_tells_its_content():
    class Named:
        fingerprint = "abc"

    component = {"type": "rows", "tokenizer": object()}
    with raises(ConfigError, "tokenizer", "version"):
        describe_input(component, [])
    assert describe_input(component, [], version=1)
    assert describe_input(component, Named())


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


CLEAN = """
import functools
import re

SEPARATOR = "-"

def strip(text):
    return text.strip()

@functools.lru_cache
def cached(sample):
    return strip(sample["text"])

class Cutter:
    def __init__(self, limit):
        self.limit = limit

    def cut(self, sample):
        return {"text": sample["text"][: self.limit]}

    def __call__(self, sample):
        return self.cut(sample)

def clean(sample, upper=False):
    return {"text": SEPARATOR + strip(sample["text"]), "upper": upper}
"""


def test_the_same_source_has_the_same_fingerprint_wherever_the_file_is(load):
    assert fingerprint_function(load(CLEAN).clean) == fingerprint_function(load("\n\n" + CLEAN).clean)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("clean", "upper=False", "upper=True"),
        ("clean", '"upper": upper', '"loud": upper'),
        ("clean", "def clean(sample, ", "def clean(sample, more=1, "),
        ("cached", 'sample["text"])', 'sample["body"])'),
        ("Cutter", "self.limit = limit", "self.limit = limit + 1"),
    ],
)
def test_a_change_of_the_source_changes_it(load, name, before, after):
    assert before in CLEAN
    one = fingerprint_function(getattr(load(CLEAN), name))
    assert fingerprint_function(getattr(load(CLEAN.replace(before, after)), name)) != one


def test_equal_sources_in_two_files_or_under_two_names_are_two(load):
    one = fingerprint_function(load(CLEAN).clean)
    assert fingerprint_function(load(CLEAN, "other").clean) != one
    text = "def a(row):\n    return row\ndef b(row):\n    return row\n"
    assert fingerprint_function(load(text).a) != fingerprint_function(load(text).b)


@pytest.mark.parametrize("change", [("text.strip()", "text.lstrip()"), ('SEPARATOR = "-"', 'SEPARATOR = "+"')])
def test_what_the_function_calls_and_reads_is_not_followed(load, change):
    one = fingerprint_function(load(CLEAN).clean)
    assert fingerprint_function(load(CLEAN.replace(*change)).clean) == one


def make_adder(amount):
    return lambda sample: sample + amount


def make_defaulting(amount):
    return lambda sample, by=amount: sample + by


def multiply(factor):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(sample):
            return function(sample) * factor

        return wrapper

    return decorate


@pytest.mark.parametrize(
    "kind",
    ["partial", "closure", "partial of a closure", "default", "decorator", "instance", "method", "partial of a method"],
)
def test_values_that_are_bound_to_a_function_count(load, kind):
    module = load(CLEAN)
    make = {
        "partial": lambda value: functools.partial(module.clean, upper=value),
        "closure": make_adder,
        "partial of a closure": lambda value: functools.partial(make_adder(value), amount=3),
        "default": make_defaulting,
        "decorator": lambda value: multiply(value)(module.clean),
        "instance": module.Cutter,
        "method": lambda value: module.Cutter(value).cut,
        "partial of a method": lambda value: functools.partial(module.Cutter(value).cut),
    }[kind]
    assert fingerprint_function(make(1)) == fingerprint_function(make(1))
    assert fingerprint_function(make(1)) != fingerprint_function(make(2))
    assert fingerprint_function(make({"a": [1.5, None]})) == fingerprint_function(make({"a": [1.5, None]}))
    with raises(ConfigError, "version", golden=False):
        fingerprint_function(make(object()))
    assert fingerprint_function(make(object()), version=1) == fingerprint_function(make(object()), version=1)


def test_functions_classes_and_modules_that_a_function_holds_are_no_objects(load):
    module = load(CLEAN)
    for held in (module.strip, module.cached, module.Cutter, module, len):
        assert fingerprint_function(make_adder(held)) == fingerprint_function(make_adder(held))
    assert fingerprint_function(make_adder(module.strip)) != fingerprint_function(make_adder(module.Cutter))
    with raises(ConfigError, "amount", "version"):
        fingerprint_function(make_adder(module.Cutter(3).cut))  # it holds the object
    with raises(ConfigError, "amount", "version"):
        fingerprint_function(make_adder([].append))


def test_two_lambdas_in_one_line_are_two():
    first, second = (lambda x: x + 1, lambda x: x + 2)
    assert fingerprint_function(first) != fingerprint_function(second)


def test_every_line_of_a_lambda_counts(load):
    text = "first = dict(\n    f=lambda row:\n        row['a']\n        + row['b']\n)['f']\n"
    one = fingerprint_function(load(text).first)
    assert fingerprint_function(load(text).first) == one
    assert fingerprint_function(load(text.replace("'b'", "'c'")).first) != one


def test_a_function_whose_source_cannot_be_read_needs_a_version():
    space = {}
    exec("def typed(x):\n    return x + 1\nshort = lambda x: x", space)
    for function in (space["typed"], space["short"], len, [].append, functools.partial(len)):
        with raises(ConfigError, "version", at="run.yaml:3"):
            fingerprint_function(function, where="run.yaml:3")
        assert fingerprint_function(function, version=1) == fingerprint_function(function, version=2)  # the key has it


def test_another_process_finds_the_same_with_another_hash_seed(tmp_path):
    (tmp_path / "mine.py").write_text("def clean(x, words=frozenset({'a', 'b', 'c'})):\n    return x\n")
    module = "trainwright.data.process"
    program = f"import mine; from {module} import fingerprint_function; print(fingerprint_function(mine.clean))"
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1
