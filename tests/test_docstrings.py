"""The examples in docstrings, run."""

import doctest
import importlib
from pathlib import Path

import pytest

import trainwright

PACKAGE = Path(trainwright.__file__).parent
WITH_EXAMPLES = [
    path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text("utf-8") and "templates" not in path.parts
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_file_give_what_they_say(name, in_tmp):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0
