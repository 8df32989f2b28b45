"""Which edits of user code a fingerprint shows."""

import functools
import importlib
import sys

import pytest
import torch

from trainwright.user_code.fingerprints import fingerprint


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module and imports it again."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text, name="edited_code"):
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        sys.dont_write_bytecode = True
        return importlib.import_module(name)

    before = sys.dont_write_bytecode
    yield write
    sys.dont_write_bytecode = before
    for name in ("edited_code", "edited_losses"):
        sys.modules.pop(name, None)


FORWARD = "def loss(x):\n    return abs(x)\n\n\ndef forward(model, batch):\n    return loss(model(batch))\n"


def test_an_edited_function_has_another_fingerprint(module):
    before = fingerprint(module(FORWARD).forward)
    assert fingerprint(module(FORWARD).forward) == before
    assert fingerprint(module(FORWARD.replace("loss(model", "2 * loss(model")).forward) != before


def test_an_edited_function_that_it_calls_counts(module):
    before = fingerprint(module(FORWARD).forward)
    assert fingerprint(module(FORWARD.replace("abs(x)", "x * x")).forward) != before


def test_a_function_of_another_module_of_the_user_counts(module):
    text = "import edited_losses\n\n\ndef forward(model, batch):\n    return edited_losses.loss(model(batch))\n"
    module("def loss(x):\n    return abs(x)\n", "edited_losses")
    before = fingerprint(module(text).forward)
    module("def loss(x):\n    return x * x\n", "edited_losses")
    assert fingerprint(module(text).forward) != before


def test_comments_docstrings_and_formatting_do_not_count(module):
    before = fingerprint(module(FORWARD).forward)
    text = FORWARD.replace("    return abs(x)", '    """The loss."""\n    # of one sample\n    return (abs(x))')
    assert fingerprint(module(text).forward) == before


def test_a_variable_does_not_count(module):
    text = "calls = 0\n\n\ndef forward(model, batch):\n    global calls\n    calls += 1\n    return model(batch)\n"
    loaded = module(text)
    before = fingerprint(loaded.forward)
    loaded.forward(abs, 3)
    assert fingerprint(loaded.forward) == before


def test_an_edited_method_base_class_or_property_of_a_class_counts(module):
    text = (
        "class Base:\n    def scale(self):\n        return 1\n\n\nclass Net(Base):\n"
        "    @property\n    def width(self):\n        return 2\n\n    def forward(self, x):\n        return x\n"
    )
    before = fingerprint(module(text).Net)
    for old, new in (("return 1", "return 3"), ("return 2", "return 4"), ("return x", "return -x")):
        assert fingerprint(module(text.replace(old, new)).Net) != before
    assert fingerprint(module(text).Net()) == before


def test_a_function_without_source_is_compared_by_its_code():
    def made(text):
        names = {"__name__": "made_by_exec"}
        exec(f"def forward(model, batch): return {text}", names)
        return fingerprint(names["forward"])

    assert made("model(batch)") == made("model(batch)")
    assert made("model(batch)") != made("2 * model(batch)")
    assert made("batch in {'a', 'b', 'c'}") == made("batch in {'c', 'b', 'a'}")


def test_a_lambda_is_not_its_whole_line():
    first, other = lambda x: x + 1, 3
    same, another = lambda x: x + 1, lambda x: x + 2
    assert other == 3
    assert fingerprint(first) == fingerprint(same) != fingerprint(another)


def test_plain_arguments_of_a_partial_count():
    def forward(model, batch, scale, data=None):
        return scale * model(batch)

    made = [functools.partial(forward, scale=scale, data=object()) for scale in (1, 1, 2)]
    assert fingerprint(made[0]) == fingerprint(made[1]) != fingerprint(made[2])


def test_code_of_installed_packages_does_not_count():
    assert fingerprint(torch.nn.Linear) == fingerprint(torch.nn.ReLU) == fingerprint()
