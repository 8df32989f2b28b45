"""Key maps: names go there and back, and rules say where they differ."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.models.key_map import KeyMap, KeyRule

RULES = (
    KeyRule("body.layers.*.attention.**", "h.*.attn.**"),
    KeyRule("body.layers.*.mlp.weight", "h.*.mlp.weight", transpose=True),
    KeyRule("head.weight", "lm_head.weight"),
)

part = st.text("abcdefgh0123456789_", min_size=1, max_size=6)
OURS = st.one_of(
    st.builds("body.layers.{}.attention.{}.{}".format, part, part, part),
    st.builds("body.layers.{}.mlp.weight".format, part),
    st.just("head.weight"),
)


@settings(max_examples=50)
@given(OURS)
def test_a_name_comes_back_from_the_other_side(name):
    key_map = KeyMap(RULES)
    key, transpose = key_map.to_theirs(name)
    assert key_map.to_ours(key) == (name, transpose)
    assert transpose == name.endswith("mlp.weight")


def test_a_star_is_one_part_and_two_are_any_number():
    key_map = KeyMap(RULES)
    assert key_map.to_theirs("body.layers.3.attention.q.bias") == ("h.3.attn.q.bias", False)
    assert key_map.to_theirs("body.layers.3.4.mlp.weight") == ("body.layers.3.4.mlp.weight", False)


def test_a_key_without_a_rule_stays_as_it_is():
    assert KeyMap().to_ours("a.b") == KeyMap(RULES).to_theirs("a.b") == ("a.b", False)


def test_the_first_rule_that_matches_decides():
    key_map = KeyMap((KeyRule("a.x", "first"), KeyRule("a.*", "rest.*")))
    assert key_map.to_theirs("a.x") == ("first", False)
    assert key_map.to_theirs("a.y") == ("rest.y", False)


def test_files_of_a_body_alone_get_its_prefix():
    key_map = KeyMap(prefix="bert")
    assert key_map.ours_in(["encoder.weight"]) == {"bert.encoder.weight": ("encoder.weight", False)}
    whole = key_map.ours_in(["bert.encoder.weight", "cls.weight"])
    assert set(whole) == {"bert.encoder.weight", "cls.weight"}


def test_ignored_keys_are_left_out():
    key_map = KeyMap(ignored=("h.*.mask",))
    assert set(key_map.ours_in(["h.0.mask", "h.0.weight"])) == {"h.0.weight"}


def test_rules_with_different_wildcards_are_rejected():
    with pytest.raises(ValueError, match="different wildcards"):
        KeyRule("a.*.b", "a.b")
