import pytest

from trainwright.config.problems import Problem, describe, nearest, raise_all, suggest
from trainwright.config.yaml_text import Origin
from trainwright.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null (nothing)"),
        (True, "true"),
        (1.5, "1.5"),
        ("é", 'the text "é"'),
        ({}, "an empty mapping"),
        ({"a": 1, "b": 2}, "a mapping with a, b"),
        ([1, 2], "a list of 2"),
        ((), "an empty list"),
    ],
)
def test_values_are_described_as_in_yaml(value, words):
    assert describe(value) == words


def test_long_text_is_cut():
    assert len(describe("x" * 1000)) < 80


def test_the_nearest_word_ignores_case_and_hyphens():
    assert nearest("Max-Steps", ["max_epochs", "max_steps"]) == "max_steps"
    assert nearest("zebra", ["max_steps"]) is None
    assert suggest("zebra", ["max_steps"]) == "Known: max_steps."


def test_problems_are_raised_together_in_the_order_of_the_file():
    lines = {("b",): Origin("run.yaml", 10), ("a",): Origin("run.yaml", 9)}
    with pytest.raises(ConfigError) as rejection:
        raise_all([Problem(("b",), "is wrong."), Problem(("a",), "is too.")], lines.get)
    assert str(rejection.value) == "run.yaml:9: a: is too.\nrun.yaml:10: b: is wrong."
    assert rejection.value.where == Origin("run.yaml", 9)


def test_without_a_problem_nothing_is_raised():
    assert raise_all([], lambda path: None) is None
