"""What a function or a class does, as a digest."""

import functools
import os
import re
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from trainwright.data import cache
from trainwright.data.processing import code_walk
from trainwright.data.processing.code_walk import digest_of
from trainwright.data.sources import files

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
    words = frozenset({"p", "q", "r"})
    pattern = re.compile("z")
    nothing: "set[str]" = set()

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


def fingerprint(module):
    return digest_of(module.clean)


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
        assert digest_of(make(1)) == digest_of(make(1))
        assert digest_of(make(1)) != digest_of(make(2))


def test_a_tokenizer_counts_with_its_words_and_not_with_what_it_was_used_for():
    def encode_with(*words):
        inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="?")
        return tokenizer, lambda sample: tokenizer(sample["text"])

    tokenizer, encode = encode_with("?", "a", "b")
    before = digest_of(encode)
    tokenizer("a", truncation=True, max_length=2, padding="max_length")
    assert digest_of(encode) == before == digest_of(encode_with("?", "a", "b")[1])
    assert digest_of(encode_with("?", "a", "c")[1]) != before


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
    assert digest_of(first) != digest_of(second)


def test_functions_that_call_each_other_come_to_an_end(load):
    text = "def clean(n):\n    return other(n)\ndef other(n):\n    return clean(n)\n"
    assert fingerprint(load(text)) == fingerprint(load(text))


def test_a_function_without_a_file_has_one_too():
    space = {}
    exec("def clean(x):\n    return x + 1", space)
    assert len(digest_of(space["clean"])) == 64
    assert len(digest_of(len)) == 64


def test_another_process_finds_the_same_with_another_hash_seed(tmp_path):
    (tmp_path / "clean.py").write_text(CLEAN)
    module = "trainwright.data.processing.fingerprint"
    program = f"import clean; from {module} import digest_of; print(digest_of(clean.clean))"
    found = set()
    # The first run compiles the file, the second reads what was compiled: constants are shared differently then.
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_an_object_that_tells_nothing_of_itself_is_warned_of(load, caplog):
    module = load(
        "import threading\nLOCK = threading.Lock()\ndef clean(sample):\n    with LOCK:\n        return sample\n"
    )
    assert fingerprint(module) == fingerprint(module)
    assert "The function uses a lock, of which no change would be noticed" in caplog.text


@pytest.mark.parametrize(
    ("member", "before", "after"),
    [
        ("PART = re.compile('1')", "'1'", "'2'"),
        ("PART = re.compile('1')", "'1'", "'1', re.I"),
        ("PART = np.array([1, 2])", "[1, 2]", "[1, 3]"),
        ("PART = torch.tensor([1, 2])", "[1, 2]", "[1, 3]"),
        ("PART = np.array([{'a': 1}])", "'a': 1", "'a': 2"),
        ("PART = Word('x')", "'x'", "'y'"),
        ("PART = Shy('x')", "'x'", "'y'"),
        ("PART = functools.partial(max, 1)", ", 1", ", 2"),
        ("PART = property(None, None, lambda self: 1)", "1", "2"),
        ("PART = types.MappingProxyType({'a': 1})", "1", "2"),
        ("@functools.cached_property\n    def PART(self):\n        return 1", "return 1", "return 2"),
        ("@functools.lru_cache\n    def PART(self):\n        return 1", "return 1", "return 2"),
        ("@staticmethod\n    def PART():\n        return 1", "return 1", "return 2"),
        ("__slots__ = ('one',)", "one", "other"),
        ("class PART(enum.Enum):\n        A = 1", "A = 1", "A = 2"),
        ("class PART(abc.ABC):\n        @abc.abstractmethod\n        def f(self):\n            return 1", "1", "2"),
        ("@dataclasses.dataclass\n    class PART:\n        a: int = 1", "= 1", "= 2"),
    ],
)
def test_every_member_of_a_class_counts(load, caplog, member, before, after):
    text = f"""
import abc, dataclasses, enum, functools, re, types
import numpy as np
import torch

class Word:
    def __init__(self, word):
        self.word = word

class Shy(Word):
    def __reduce_ex__(self, protocol):
        raise TypeError("no copies")

class Cutter:
    {member}

def clean(sample):
    return Cutter()
"""
    assert before in member
    one, other = load(text), load(text.replace(member, member.replace(before, after)))
    assert fingerprint(one) == fingerprint(load(text))
    assert fingerprint(one) != fingerprint(other)
    assert not caplog.text


@pytest.mark.parametrize("has_init", [True, False])
def test_modules_inside_of_packages_are_followed_to_any_depth(tmp_path, monkeypatch, has_init):
    def through(value):
        folder = tmp_path / value
        (folder / "mypkg" / "inner").mkdir(parents=True)
        if has_init:
            (folder / "mypkg" / "__init__.py").touch()
            (folder / "mypkg" / "inner" / "__init__.py").touch()
        (folder / "mypkg" / "inner" / "clean.py").write_text(f"import mypkg.inner\ndef clean(v):\n    return {value}\n")
        (folder / "mine.py").write_text(
            "import mypkg.inner.clean\ndef clean(v):\n    return mypkg.inner.clean.clean(v)\n"
            "def make():\n    inner = mypkg.inner\n    return lambda v: inner.clean.clean(v)\n"
        )
        for name in [name for name in sys.modules if re.match(r"(mypkg|mine)\b", name)]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(folder)
        import mine

        return digest_of(mine.clean), digest_of(mine.make())

    one, other = through("1"), through("2")
    assert one[0] != other[0]
    assert one[1] != other[1]
    for name in ("mypkg", "mine"):
        monkeypatch.delitem(sys.modules, name)


def test_own_files_that_are_imported_inside_of_a_function_count_loaded_or_not(tmp_path, monkeypatch, load):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_helper.py").write_text("def help(v):\n    return 1\n")
    module = load(
        "def clean(v):\n    import json, late_helper\n    from torch import nn\n    return late_helper.help(v)\n"
    )
    before = fingerprint(module)
    module.clean(1)
    assert "late_helper" in sys.modules
    monkeypatch.delitem(sys.modules, "late_helper")
    assert fingerprint(module) == before
    (tmp_path / "late_helper.py").write_text("def help(v):\n    return 2\n")
    assert fingerprint(module) != before


def test_imports_inside_of_a_long_function_are_found(tmp_path, monkeypatch, load):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "far_helper.py").write_text("VALUE = 1\n")
    lines = "".join(f"    name_{number} = v.attribute_{number} + {number}.5\n" for number in range(400))
    module = load(
        f"def clean(v):\n{lines}    from far_helper import VALUE\n    import far_helper as again\n    return VALUE\n"
    )
    before = fingerprint(module)
    (tmp_path / "far_helper.py").write_text("VALUE = 2\n")
    assert fingerprint(module) != before


def test_a_library_that_is_imported_inside_of_a_function_is_not_loaded_for_its_fingerprint(load):
    module = load("def clean(v):\n    import lib2to3_not_there.x, wsgiref.types\n    return v\n")
    sys.modules.pop("wsgiref", None)
    fingerprint(module)
    assert "wsgiref" not in sys.modules


def test_our_own_files_are_a_librarys():
    assert code_walk.own_file(files.text) is None
    assert code_walk.own_file(cache) is None
    assert code_walk.own_file(fingerprint) is not None
