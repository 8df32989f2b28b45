import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.config import yaml_text
from trainwright.config.frozen import same
from trainwright.config.overrides import apply_overrides, parse_override
from trainwright.config.yaml_text import to_tree
from trainwright.errors import ConfigError


def overridden(settings, *overrides):
    return apply_overrides(to_tree(settings, {}), overrides).plain()


@pytest.mark.parametrize(
    ("override", "result"),
    [
        ("a.b=5", {"a": {"b": 5, "c": 2}}),
        ("a=5", {"a": 5}),
        ("a={}", {"a": {}}),
        ("a.b={type: lion, lr: 1e-4}", {"a": {"b": {"type": "lion", "lr": 1e-4}, "c": 2}}),
        ("a.d.e=x=y", {"a": {"b": 1, "c": 2, "d": {"e": "x=y"}}}),
        ("a.b=", {"a": {"b": None, "c": 2}}),
        ("a.b=[1, two]", {"a": {"b": [1, "two"], "c": 2}}),
    ],
)
def test_an_override_replaces_or_adds(override, result):
    assert overridden({"a": {"b": 1, "c": 2}}, override) == result


def test_list_items_are_reached_by_index():
    assert overridden({"hooks": [{"type": "a"}, "b"]}, "hooks.0.steps=5", "hooks.1.n=2") == {
        "hooks": [{"type": "a", "steps": 5}, {"type": "b", "n": 2}]
    }


def test_later_overrides_see_earlier_ones():
    assert overridden({}, "hooks=[a]", "hooks.0.x=1") == {"hooks": [{"type": "a", "x": 1}]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a", "an override is written key=value, such as trainer.max_steps=5; it has no =."),
        ("=1", "an override is written key=value, such as trainer.max_steps=5; a part of the key is empty."),
        ("a..b=1", "an override is written key=value, such as trainer.max_steps=5; a part of the key is empty."),
        ("seed.x=1", "seed: is 42, so it has no keys. Replace it whole: seed=…."),
        ("name.x=1", 'name: is the text "n", so it has no keys. Replace it whole: name=….'),
        (
            "hooks.3.x=1",
            "hooks: is a list of 2, so there is no index 3 (known: 0 to 1). Replace the whole list: hooks=[…].",
        ),
        ("hooks.x=1", 'hooks: is a list of 2; "x" is not an index such as hooks.0.'),
        ("extends=[x]", "extends: is read from the file only. Set it there."),
        (
            "model.lora.match=*.query",
            "model.lora.match: a value that begins with * is an alias in YAML. Quote the value, and the override as "
            """well: 'model.lora.match="*.query"'.""",
        ),
        (
            "model.freeze.x=1",
            'model.freeze: is the text "a", so it has no keys. Replace it whole: model.freeze=….',
        ),
    ],
)
def test_a_wrong_override_is_rejected_by_its_own_text(override, message):
    with pytest.raises(ConfigError) as rejection:
        overridden({"seed": 42, "name": "n", "hooks": ["a", "b"], "model": {"freeze": "a"}}, override)
    assert str(rejection.value) == f"override {override}: {message}"


def test_a_bare_pretrained_folder_is_spelled_out():
    settings = {"model": {"type": "llama", "pretrained": "folder"}}
    changed = overridden(settings, "model.pretrained.strict=false")["model"]
    assert changed == {"type": "llama", "pretrained": {"folder": "folder", "strict": False}}


def test_bad_yaml_in_a_value_is_rejected():
    with raises(ConfigError, "*.q_proj"):
        overridden({}, "a=[*.q_proj]")
    with raises(ConfigError, "override a=", "1", "2"):
        overridden({}, "a=[1, 2")


words = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda word: word not in ("extends", "project_dir")
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))


@given(st.lists(words, min_size=1, max_size=4), values)
def test_any_yaml_value_arrives_at_its_path(path, value):
    text = yaml_text.write({"value": value}).removeprefix("value:")
    parsed_path, node = parse_override(f"{'.'.join(path)}={text}")
    assert parsed_path == tuple(path)
    assert same(node.plain(), value)
    settings = overridden({}, f"{'.'.join(path)}={text}")
    for key in path:
        settings = settings[key]
    assert same(settings, value)


@pytest.mark.parametrize(
    ("override", "result"),
    [
        ("~a.b", {"a": {"c": [1, {"d": 2}]}}),
        ("~a", {}),
        ("~a.c.0", {"a": {"b": 1, "c": [{"d": 2}]}}),
        ("~a.c.1.d", {"a": {"b": 1, "c": [1, {}]}}),
    ],
)
def test_a_removal_removes_a_key_or_an_item(override, result):
    assert overridden({"a": {"b": 1, "c": [1, {"d": 2}]}}, override) == result


def test_removals_and_overrides_are_applied_in_order():
    assert overridden({"a": {"b": 1}}, "~a.b", "a.c=2", "~a.c", "a.d=3") == {"a": {"d": 3}}


@pytest.mark.parametrize(
    ("override", "mentions"),
    [
        ("~a.bb", ("a.bb", '"b"')),
        ("~x", ("x", "a")),
        ("~a.b.c", ("a.b.c",)),
        ("~a.l.7", ("a.l", "7")),
        ("~a.b=1", ("~a.b", "a.b=1")),
        ("~", ("~trainer.schedule",)),
        ("~a..b", ("~trainer.schedule",)),
        (".".join(["a"] * 100) + "=1", ("64",)),
    ],
)
def test_a_wrong_removal_is_rejected_by_its_own_text(override, mentions):
    with raises(ConfigError, *mentions, at=f"override {override}"):
        overridden({"a": {"b": 1, "l": [1]}}, override)
