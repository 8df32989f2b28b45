import copy
import pickle

import pytest

from trainwright.config import Frozen


def test_nested_values_read_as_attributes_and_items():
    settings = Frozen({"a": {"b": [1, {"c": 2}]}})
    assert settings.a.b[1].c == settings["a"]["b"][1]["c"] == 2
    assert settings.a.b == (1, {"c": 2})


def test_equals_plain_mappings_with_lists():
    assert Frozen({"a": [1, 2]}) == {"a": [1, 2]} == Frozen({"a": (1, 2)})
    assert Frozen({"a": 1}) != {"a": 2}
    assert Frozen({"a": 1}) != {"a": True}
    assert Frozen({"a": float("nan")}) == {"a": float("nan")}


@pytest.mark.parametrize("change", ["s.a = 2", "s['a'] = 2", "del s.a", "del s['a']", "s.n.b = 2", "s.n['b'] = 2"])
def test_any_change_is_rejected_with_advice(change):
    with pytest.raises((TypeError, AttributeError), match=r"read-only.*derive"):
        exec(change, {"s": Frozen({"a": 1, "n": {"b": 1}})})


def test_a_missing_attribute_names_the_known_ones():
    with pytest.raises(AttributeError, match=r"no setting 'c' here\. Known: a, b"):
        _ = Frozen({"a": 1, "b": 2}).c


def test_pickles_and_copies():
    settings = Frozen({"a": {"b": [1]}})
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert copy.deepcopy(settings) == copy.copy(settings) == settings


def test_to_dict_gives_containers_that_may_be_changed():
    settings = Frozen({"a": {"b": [1]}})
    plain = settings.to_dict()
    plain["a"]["b"].append(2)
    assert plain == {"a": {"b": [1, 2]}}
    assert settings.a.b == (1,)


def test_a_key_that_is_not_text_is_rejected():
    with pytest.raises(TypeError, match="key is text, got 1"):
        Frozen({1: 2})
