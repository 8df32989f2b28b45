from hypothesis import given
from hypothesis import strategies as st

from trainwright.config.yaml_text import Origin, merge, plant
from trainwright.tracebacks import shown_path

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
keys = st.sampled_from(["a", "b", "c", "d"])
trees = st.dictionaries(keys, st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner)))


def merged(first, second):
    return merge(plant(first, {}), plant(second, {})).plain()


@given(trees)
def test_planting_keeps_the_value(tree):
    assert plant(tree, {}).plain() == tree


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
    first = plant({"a": {"x": 1, "y": 1}}, {("a", "x"): Origin("base.yaml", 1), ("a", "y"): Origin("base.yaml", 2)})
    second = plant({"a": {"y": 2}}, {("a", "y"): Origin("run.yaml", 9)})
    origins = dict(merge(first, second).origins())
    assert (str(origins["a", "x"]), str(origins["a", "y"])) == ("base.yaml:1", "run.yaml:9")


def test_a_path_is_shown_as_given_or_shorter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path("configs/lm.yaml") == "configs/lm.yaml"
    assert shown_path(tmp_path / "lm.yaml") == "lm.yaml"
    assert shown_path("/a.yaml") == "/a.yaml"
