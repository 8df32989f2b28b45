"""Assertions on errors and messages that do not depend on their wording.

A test names the error's type, where it points (`at`) and what it must mention: settings, classes, files, numbers. The
full text is compared with `messages.json` of the test's package, so that rewording a message is one command,
`make messages`, and a reviewer reads the new sentences in one diff.
"""

import json
import os
import re
import sysconfig
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
recorded = defaultdict(dict)
"""The texts of this process: package folder, then test, then the texts in the order in which they came."""
_UPDATES = False
_PROCESS = os.getpid()

# What differs between machines, users and edits of the test itself, and what stands in the golden file instead.
_VARYING = (
    (re.compile(rf"{re.escape(sysconfig.get_path('purelib'))}"), "<site-packages>"),
    (re.compile(rf"{re.escape(sysconfig.get_path('stdlib'))}"), "<stdlib>"),
    (re.compile(r"[^\s'\"(=]*/pytest-of-[^/\s]+/pytest-\d+(/popen-gw\d+)?/[^/\s:'\",)]+"), "<tmp>"),
    (re.compile(r"/tmp/(tmp)?[a-z0-9_]{8}(?=[/\s:'\",)])"), "<tmp>"),
    (re.compile(rf"(?:{re.escape(str(TESTS))}|(?<![\w/])tests|\.\.)/(?:[\w/.]*/)?(\w+\.py):\d+"), r"\1:<line>"),
    (re.compile(r"(?:[^\s'\"(=]*/)?(test_\w+\.py):\d+"), r"\1:<line>"),
    (re.compile(r"\btests\.(?:\w+\.)*(?=test_\w+)"), ""),
    (re.compile(rf"{re.escape(str(TESTS.parent))}(?=/)"), "<repo>"),
    (re.compile(r"(src/trainwright/[\w/]+\.py):\d+"), r"\1:<line>"),
    (re.compile(r"0x[0-9a-f]{6,}"), "0x…"),
)


def update_messages(enabled):
    """Makes `raises` and `check_message` record instead of comparing."""
    global _UPDATES
    _UPDATES = enabled


@contextmanager
def raises(kind, *mentions, at=None, golden=True):
    """Expects an error of this type that mentions each string, and whose location ends with `at`.

    `golden=False` leaves out the comparison of the full text, for texts that differ from run to run.
    """
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    if at is not None:
        where = str(getattr(caught.value, "where", None) or "")
        assert where.endswith(at) or re.search(rf"{re.escape(at)}(?!\d)", text), f"{at} is not named: {text}"
    check_message(text, *mentions, golden=golden)


def check_message(text, *mentions, golden=True):
    """Asserts that a text mentions each string, and that it is the one in the golden file."""
    missing = [str(each) for each in mentions if not _has(text, str(each))]
    assert not missing, f"{missing} not mentioned: {text}"
    if golden and os.getpid() == _PROCESS:  # what a forked child says is not recorded
        _compare(text)


def _has(text, mention):
    """A number is mentioned as a number of its own: 8 is not in 18."""
    if re.fullmatch(r"\d+", mention):
        return re.search(rf"(?<![\d.]){mention}(?!\d)", text.replace(",", "")) is not None
    return mention in text


def _compare(text):
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    node = os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0]
    file, _, test = node.partition("::")
    path = (TESTS.parent / file).relative_to(TESTS)
    package = path.parts[0] if len(path.parts) > 1 else ""
    texts = recorded[package].setdefault(f"{path.relative_to(package).as_posix()}::{test}", [])
    texts.append(text)
    if _UPDATES:
        return
    known = _golden(package).get(f"{path.relative_to(package).as_posix()}::{test}", [])
    number = len(texts) - 1
    assert number < len(known), f"no golden text yet (make messages): {text}"
    assert text == known[number], "the wording differs from messages.json (if that is meant: make messages)"


def _golden(package, cache={}):  # noqa: B006  # one read per process
    if package not in cache:
        path = TESTS / package / "messages.json"
        cache[package] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return cache[package]


def write_golden_files(updates):
    """Writes what was recorded, keeping the texts of tests that exist but did not run."""
    for package, tests in updates.items():
        folder = TESTS / package
        kept = {name: texts for name, texts in _golden(package).items() if _exists(folder, name)}
        texts = dict(sorted({**kept, **tests}.items()))
        (folder / "messages.json").write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _exists(folder, name):
    file, _, test = name.partition("::")
    function = test.partition("[")[0].rpartition("::")[2]
    path = folder / file
    return path.exists() and f"def {function}(" in path.read_text("utf-8")


def mentions(text, *names):
    """Returns whether one line of a log, a page or a message mentions all of these names."""
    return any(all(_has(line, str(name)) for name in names) for line in str(text).splitlines())
