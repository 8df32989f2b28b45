"""What a function does and what an input is, as a key."""

import functools
import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from trainwright.config import Component
from trainwright.data.processing.fingerprint import canonical_arguments, describe_input, fingerprint_function
from trainwright.errors import ConfigError

COUNTER = itertools.count()

CLEAN = """
import re
from functools import lru_cache, partial

SEPARATOR = " "
WORDS = {"a", "b", "c"}
PATTERN = re.compile("x+")

def strip(text):
    return text.strip()

@lru_cache
def cached(text):
    return strip(text)

def unused():
    return 1

class Cutter:
    size = 3

    def __init__(self, limit):
        self.limit = limit

    def cut(self, text):
        return text[: self.limit]

    def __call__(self, sample):
        return {"text": self.cut(sample["text"])}

cutter = Cutter(5)

def clean(sample, upper=False):
    def inner(text):
        return cached(text) + SEPARATOR
    words = [inner(word) for word in PATTERN.split(sample["text"]) if word not in WORDS and word not in {"d", "e"}]
    return {"text": cutter.cut("".join(words)), "upper": upper}
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a module from its text, each time anew."""

    def load(text, name="clean"):
        number = next(COUNTER)
        path = tmp_path / f"{name}_{number}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"{name}_{number}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def fingerprint(module):
    return fingerprint_function(module.clean)


def test_the_same_text_has_the_same_fingerprint_whatever_its_place_and_comments(load):
    moved = "# a comment\n\n\n" + CLEAN.replace("    words = ", "    # why\n    words = ")
    assert fingerprint(load(CLEAN)) == fingerprint(load(moved))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"upper": upper', '"loud": upper'),
        ("upper=False", "upper=True"),
        ('SEPARATOR = " "', 'SEPARATOR = "-"'),
        ('"b", "c"}', '"b", "z"}'),
        ("text.strip()", "text.lstrip()"),
        ("x+", "y+"),
        ("Cutter(5)", "Cutter(6)"),
        ("text[: self.limit]", "text[: self.limit + 1]"),
        ("size = 3", "size = 4"),
        ("+ SEPARATOR", "+ SEPARATOR * 2"),
    ],
)
def test_a_change_of_anything_that_the_function_uses_changes_it(load, before, after):
    assert before in CLEAN
    assert fingerprint(load(CLEAN)) != fingerprint(load(CLEAN.replace(before, after)))


def test_a_change_of_what_it_does_not_use_leaves_it(load):
    assert fingerprint(load(CLEAN)) == fingerprint(load(CLEAN.replace("return 1", "return 2")))


def test_a_change_in_an_imported_file_of_the_user_changes_it(load):
    def through(strip):
        text = load(f"def strip(text):\n    return {strip}\n", "text")
        by_name = load(f"from {text.__name__} import strip\ndef clean(sample):\n    return strip(sample)\n")
        by_module = load(f"import {text.__name__} as text\ndef clean(sample):\n    return text.strip(sample)\n")
        return fingerprint(by_name), fingerprint(by_module)

    one, two = through("text.strip()"), through("text.rstrip()")
    assert one == through("text.strip()")
    assert one[0] != two[0]
    assert one[1] != two[1]


def test_partials_lambdas_closures_methods_and_callable_objects_count_with_what_they_hold(load):
    module = load(CLEAN)

    def adding(amount):
        return lambda sample: sample + amount

    kinds = [
        lambda value: functools.partial(module.clean, upper=value),
        lambda value: adding(value),
        lambda value: module.Cutter(value),
        lambda value: module.Cutter(value).cut,
    ]
    for make in kinds:
        assert fingerprint_function(make(1)) == fingerprint_function(make(1))
        assert fingerprint_function(make(1)) != fingerprint_function(make(2))


def test_a_tokenizer_counts_with_its_words_and_not_with_what_it_was_used_for():
    def encode_with(*words):
        inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="?")
        return tokenizer, lambda sample: tokenizer(sample["text"])

    tokenizer, encode = encode_with("?", "a", "b")
    before = fingerprint_function(encode)
    tokenizer("a", truncation=True, max_length=2, padding="max_length")
    assert fingerprint_function(encode) == before == fingerprint_function(encode_with("?", "a", "b")[1])
    assert fingerprint_function(encode_with("?", "a", "c")[1]) != before


def test_calling_a_function_leaves_its_fingerprint(load):
    module = load(
        "LOADED = None\n"
        "def tokenizer():\n    global LOADED\n    LOADED = LOADED or [1, 2]\n    return LOADED\n"
        "def clean(n):\n    total = 0\n    for each in range(n):\n        total += len(tokenizer())\n    return total\n"
    )
    before = fingerprint(module)
    module.clean(5000)  # often enough for Python to specialise the code
    assert module.LOADED == [1, 2]
    assert fingerprint(module) == before


def test_two_lambdas_in_one_line_are_two():
    first, second = (lambda x: x + 1, lambda x: x + 2)
    assert fingerprint_function(first) != fingerprint_function(second)


def test_functions_that_call_each_other_come_to_an_end(load):
    text = "def clean(n):\n    return other(n)\ndef other(n):\n    return clean(n)\n"
    assert fingerprint(load(text)) == fingerprint(load(text))


def test_a_function_without_a_file_has_one_too():
    space = {}
    exec("def clean(x):\n    return x + 1", space)
    assert len(fingerprint_function(space["clean"])) == 64
    assert len(fingerprint_function(len)) == 64


def test_another_process_finds_the_same_with_another_hash_seed(tmp_path):
    (tmp_path / "clean.py").write_text(CLEAN)
    module = "trainwright.data.processing.fingerprint"
    program = f"import clean; from {module} import fingerprint_function; print(fingerprint_function(clean.clean))"
    found = set()
    # The first run compiles the file, the second reads what was compiled: constants are shared differently then.
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_arguments_are_one_text_whatever_their_order():
    one = canonical_arguments({"a": 1, "b": [1.5, None, {"c": "x"}]}, "clean")
    assert one == canonical_arguments({"b": (1.5, None, {"c": "x"}), "a": 1}, "clean")
    assert one != canonical_arguments({"a": 2, "b": [1.5, None, {"c": "x"}]}, "clean")


def test_an_argument_without_a_text_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"clean: the argument tokenizer\[0\] is a object, which has no text"):
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


def test_an_object_that_tells_nothing_of_itself_is_warned_of(load, caplog):
    module = load(
        "import threading\nLOCK = threading.Lock()\ndef clean(sample):\n    with LOCK:\n        return sample\n"
    )
    assert fingerprint(module) == fingerprint(module)
    assert "The function uses a lock, of which no change would be noticed" in caplog.text
