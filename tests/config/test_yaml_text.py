import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.config import yaml_text
from trainwright.config.frozen import same
from trainwright.config.yaml_text import Origin, merge, to_tree
from trainwright.errors import ConfigError
from trainwright.tracebacks import shown_path


def parse(text):
    return yaml_text.parse(text, lambda line: Origin("run.yaml", line))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5e3", 1500.0),
        ("1E5", 1e5),
        ("-2.", -2.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", 16),
        ("-7", -7),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("on", "on"),
        ("yes", "yes"),
        ("no", "no"),
        ("12:30", "12:30"),
        ("2024-01-02", "2024-01-02"),
        ("2024_01_02", "2024_01_02"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("'5'", "5"),
        ("!!str 5", "5"),
        ("[1, a]", [1, "a"]),
    ],
)
def test_plain_scalars_are_those_of_yaml_1_2(text, value):
    read = parse(f"key: {text}").plain()["key"]
    assert read == value
    assert type(read) is type(value)


def test_nan_is_a_number():
    assert math.isnan(parse("key: .nan").plain()["key"])


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, 'the key "a" is set twice, first at run.yaml:1. Remove one.'),
        ("a:\n\tb: 1\n", 2, "a tab where only spaces are allowed"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, "not valid YAML: while parsing a flow sequence (started at line 2)"),
        ("a: {b: 1\n", 2, "started at line 1"),
        ("a: 1\n2: b\n", 2, 'a key must be text, got 2. Put it in quotes: "2"'),
        ("a: 1\ntrue: b\n", 2, "a key must be text, got true"),
        ("a: 1\n[x]: b\n", 2, "a key must be text, got a list or a mapping"),
        ("a: 1\nb: &loop [*loop]\n", 2, "an alias (*name) inside the value that it names"),
        ("a: 1\nb: !!python/object:os.system {}\n", 2, "the tag !!python/object:os.system is not supported"),
        ("a: 1\nb: !!int x\n", 2, "'x' is not a int"),
        ("a: 1\n--- \nb: 2\n", 2, "another document"),
        ("a: 1\nb: \x07\n", 2, "the character '\\x07' is not allowed"),
        ("a: 1\nb: *unknown\n", 2, "undefined alias"),
    ],
)
def test_what_cannot_be_read_is_rejected_at_its_line(text, line, words):
    with pytest.raises(ConfigError) as rejection:
        parse(text)
    assert str(rejection.value).startswith(f"run.yaml:{line}: ")
    assert words in str(rejection.value)


@pytest.mark.parametrize("levels", [100, 400, 5000])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_deep_nesting_is_rejected(levels, brackets):
    opening = brackets[0] if brackets == "[]" else "{a: "
    with raises(ConfigError, "64", at="run.yaml:2"):
        parse(f"a: 1\nb: {opening * levels}{brackets[1] * levels}\n")


@pytest.mark.parametrize(
    "line", ["a{n}: &a{n} [*a{m}, *a{m}]", "a{n}: &a{n} {{x: *a{m}, y: *a{m}}}", "a{n}: &a{n} {{<<: [*a{m}, *a{m}]}}"]
)
def test_aliases_that_multiply_are_rejected_at_once(line):
    lines = [line.format(n=number + 1, m=number) for number in range(60)]
    with raises(ConfigError, "aliases", at="run.yaml"):
        parse("\n".join(["a0: &a0 {x: 1, y: 2}", *lines]))


def test_aliases_and_merge_keys_are_read():
    text = "base: &base {x: 1, y: 2}\nnext: {<<: *base, y: 3}\nsame: *base\n"
    assert parse(text).plain()["next"] == {"x": 1, "y": 3}
    assert parse(text).plain()["same"] == {"x": 1, "y": 2}


def test_each_key_remembers_its_line():
    origins = dict(parse("a: 1\nb:\n  c:\n    - x\n    - y\n").origins())
    assert origins["b", "c"].line == 3
    assert origins["b", "c", "1"].line == 5


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_what_is_written_is_read_back_the_same(settings):
    assert same(parse(yaml_text.write(settings)).plain() or {}, settings)


@given(st.from_regex(r"[-+.0-9eE_xo:]{1,8}", fullmatch=True) | st.sampled_from(["on", "no", "null", "True", "<<", "="]))
def test_text_that_looks_like_another_type_stays_text(word):
    assert parse(yaml_text.write({"key": word})).plain() == {"key": word}


leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
keys = st.sampled_from(["a", "b", "c", "d"])
trees = st.dictionaries(keys, st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner)))


def merged(first, second):
    return merge(to_tree(first, {}), to_tree(second, {})).plain()


@given(trees)
def test_a_tree_keeps_the_value(tree):
    assert to_tree(tree, {}).plain() == tree


@given(trees)
def test_merging_with_nothing_or_itself_changes_nothing(tree):
    assert merged(tree, {}) == merged({}, tree) == merged(tree, tree) == tree


@given(trees, trees)
def test_the_later_scalars_and_lists_win(first, second):
    for key, value in second.items():
        if not isinstance(value, dict):
            assert merged(first, second)[key] == value
    assert merged(first, second).keys() == first.keys() | second.keys()


def test_a_changed_type_replaces_and_an_equal_one_merges():
    earlier = {"optimizer": {"type": "adamw", "lr": 1}}
    assert merged(earlier, {"optimizer": {"type": "sgd"}}) == {"optimizer": {"type": "sgd"}}
    assert merged(earlier, {"optimizer": {"type": "adamw", "eps": 2}})["optimizer"] == {
        "type": "adamw",
        "lr": 1,
        "eps": 2,
    }
    assert merged(earlier, {"optimizer": {"lr": 2}}) == {"optimizer": {"type": "adamw", "lr": 2}}


def test_a_bare_pretrained_folder_is_extended_as_the_mapping_that_it_is_short_for():
    bare, more = {"model": {"pretrained": "a"}}, {"model": {"pretrained": {"strict": False}}}
    assert merged(bare, more) == {"model": {"pretrained": {"folder": "a", "strict": False}}}
    assert merged(more, bare) == bare


def test_a_bare_evaluation_set_replaces_named_ones():
    named, bare = {"data": {"eval": {"valid": "digits"}}}, {"data": {"eval": {"type": "digits"}}}
    assert merged(named, bare) == bare
    assert merged(bare, named) == named


def test_each_merged_value_keeps_its_own_origin():
    first = to_tree({"a": {"x": 1, "y": 1}}, {("a", "x"): Origin("base.yaml", 1), ("a", "y"): Origin("base.yaml", 2)})
    second = to_tree({"a": {"y": 2}}, {("a", "y"): Origin("run.yaml", 9)})
    origins = dict(merge(first, second).origins())
    assert (str(origins["a", "x"]), str(origins["a", "y"])) == ("base.yaml:1", "run.yaml:9")


def test_a_path_is_shown_as_given_or_shorter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path("configs/lm.yaml") == "configs/lm.yaml"
    assert shown_path(tmp_path / "lm.yaml") == "lm.yaml"
    assert shown_path("/a.yaml") == "/a.yaml"
