"""Lines of user code, and which characters of them are marked."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from trainwright.user_code import locations
from trainwright.user_code.locations import (
    UserFiles,
    line_of_attribute,
    line_of_frame,
    line_of_function,
    line_of_return,
    line_of_traceback,
)

SOURCE = """\
import sys


def decorate(function):
    return function


@decorate
def spread(
    first,
    second=None,
):
    return first


def branches(value):
    if value:
        return 1
    return 2


def é_fails(values):
    größe = "äöü"; return größe + values["missing"] + "x"


def here(look):
    return (0, look(sys._getframe()))[1]


class Net:
    def __init__(self):
        self.header = 1
        self.head: int = 2
"""


@pytest.fixture
def module(in_tmp):
    Path("code.py").write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("locations_code", in_tmp / "code.py")
    loaded = sys.modules["locations_code"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    yield loaded
    del sys.modules["locations_code"]


@pytest.fixture
def users(in_tmp):
    return UserFiles(in_tmp)


def marked(location):
    return location.text[slice(*location.columns)]


def test_installed_files_are_not_user_code(users, in_tmp):
    assert str(in_tmp / "models" / "net.py") in users
    assert "/home/user/package/net.py" in users
    assert str(in_tmp / ".venv" / "lib" / "site-packages" / "x.py") not in users
    assert torch.nn.__file__ not in users
    assert locations.__file__ not in users
    assert str(Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py") not in users
    assert "<frozen importlib>" not in users


def test_an_installed_class_named_in_the_config_is_user_code_unless_it_is_torch(users):
    import yaml

    users.include(yaml.YAMLError)
    users.include(torch.nn.Linear)
    assert sys.modules["yaml.error"].__file__ in users
    assert sys.modules["torch.nn.modules.linear"].__file__ not in users


def test_the_line_of_an_exception_marks_the_expression_in_characters_not_bytes(module, users):
    with pytest.raises(KeyError) as caught:
        module.é_fails({})
    location = line_of_traceback(caught.value, users)
    assert marked(location) == 'values["missing"]'


def test_an_exception_outside_user_code_has_no_line(users):
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    caught.value.__traceback__ = None
    assert line_of_traceback(caught.value, users) is None


def test_the_line_of_a_frame_marks_what_it_evaluates(module):
    assert marked(module.here(line_of_frame)) == "look(sys._getframe())"


def test_the_line_of_a_function_marks_a_parameter_or_its_name(module, users):
    assert marked(line_of_function(module.spread, users, ["second"])) == "second"
    assert marked(line_of_function(module.spread, users, ["absent"])) == "spread"
    assert line_of_function(torch.relu, users) is None


def test_the_line_of_a_return_is_its_only_one_or_the_def(module, users):
    location = line_of_return(module.spread, users)
    assert (location.text, marked(location)) == ("    return first", "first")
    assert marked(line_of_return(module.branches, users)) == "branches"


def test_the_line_of_an_attribute_is_its_assignment_or_the_class(module, users):
    location = line_of_attribute(module.Net, "head", users)
    assert (location.text, marked(location)) == ("        self.head: int = 2", "self.head")
    assert marked(line_of_attribute(module.Net, "absent", users)) == "Net"
