"""The settings that a constructor keeps, and those of a config.json that are rejected."""

from __future__ import annotations

from tests.messages import raises

from trainwright.errors import ConfigError
from trainwright.models.bert import Bert
from trainwright.models.layers.settings import keywords_of, reject_other_values


class Parent:
    """Anything with a constructor."""


class Child(Parent):
    """Keeps its settings."""

    def __init__(self, *, width, depth=None):
        depth = 3 if depth is None else depth
        settings = keywords_of(locals())
        super().__init__()
        self.settings = settings


def test_all_keywords_are_kept_with_their_defaults_worked_out():
    assert Child(width=2).settings == {"width": 2, "depth": 3}


def test_the_supported_value_and_a_key_that_is_not_there_pass():
    given = {"is_decoder": False, "other": 1}
    assert reject_other_values(given, {"is_decoder": False, "scale": True}, model=Bert) is None


def test_another_value_is_rejected_by_name_and_value():
    with raises(ConfigError, "is_decoder"):
        reject_other_values({"is_decoder": True}, {"is_decoder": False}, model=Bert)
