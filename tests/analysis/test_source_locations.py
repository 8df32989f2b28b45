"""The user's line, and which characters of it are marked."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from trainwright.analysis import findings as places
from trainwright.config import Origin
from trainwright.user_code.locations import UserFiles, of_frame

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
    spec = importlib.util.spec_from_file_location("places_code", in_tmp / "code.py")
    loaded = sys.modules["places_code"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    yield loaded
    del sys.modules["places_code"]


@pytest.fixture
def users(in_tmp):
    return UserFiles(in_tmp)


def marked(place):
    return place.text[slice(*place.columns)]


def test_only_files_that_are_not_installed_are_the_user_s(users, in_tmp):
    assert str(in_tmp / "models" / "net.py") in users
    assert "/home/somebody/their_package/net.py" in users
    assert str(in_tmp / ".venv" / "lib" / "site-packages" / "x.py") not in users
    assert torch.nn.__file__ not in users
    assert places.__file__ not in users
    assert str(Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py") not in users
    assert "<frozen importlib>" not in users


def test_an_installed_class_that_the_config_names_is_the_user_s_but_never_torch_s(users):
    import yaml

    users.include(yaml.YAMLError)
    users.include(torch.nn.Linear)
    assert sys.modules["yaml.error"].__file__ in users
    assert sys.modules["torch.nn.modules.linear"].__file__ not in users


def test_a_setting_is_marked_at_the_first_word_that_stands_in_its_line(in_tmp):
    Path("run.yaml").write_text("a: 1\noptimizer: {type: adamv, lr: 1}  # type\n")
    place = places.of_setting(Origin("run.yaml", 2), ["adam", "adamv", "type"])
    assert (str(place), marked(place)) == ("run.yaml:2", "adamv")
    assert places.of_setting(Origin("run.yaml", 2), ["nothing"]).columns is None
    assert places.of_setting(None) is None


def test_a_section_that_the_file_lacks_shows_no_line(in_tmp):
    Path("run.yaml").write_text("a: 1\n")
    assert places.of_setting(Origin("run.yaml", 1), ["checkpoint"]).text == ""


def test_an_override_is_its_own_line():
    place = places.of_setting(Origin("override trainer.lr=x", 0), ["lr"])
    assert (str(place), place.text, marked(place)) == ("override trainer.lr=x", "trainer.lr=x", "lr")


def test_an_exception_is_placed_at_the_expression_that_raised_in_characters_not_bytes(module, users):
    with pytest.raises(KeyError) as caught:
        module.é_fails({})
    place = places.of_traceback(caught.value, users)
    assert marked(place) == 'values["missing"]'


def test_an_exception_that_passed_no_user_s_file_has_no_place(users):
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    caught.value.__traceback__ = None
    assert places.of_traceback(caught.value, users) is None


def test_a_frame_is_placed_at_what_it_evaluates(module):
    assert marked(module.here(of_frame)) == "look(sys._getframe())"


def test_a_function_is_marked_at_a_parameter_or_at_its_name(module, users):
    assert marked(places.of_function(module.spread, users, ["second"])) == "second"
    assert marked(places.of_function(module.spread, users, ["absent"])) == "spread"
    assert places.of_function(torch.relu, users) is None


def test_the_only_return_is_the_place_of_what_is_returned(module, users):
    place = places.of_return(module.spread, users)
    assert (place.text, marked(place)) == ("    return first", "first")
    assert marked(places.of_return(module.branches, users)) == "branches"


def test_an_attribute_is_found_where_it_is_made(module, users):
    place = places.of_attribute(module.Net, "head", users)
    assert (place.text, marked(place)) == ("        self.head: int = 2", "self.head")
    assert marked(places.of_attribute(module.Net, "absent", users)) == "Net"
