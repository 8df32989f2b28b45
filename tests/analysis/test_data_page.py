"""The page is at most as wide as the terminal and has all sections."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tests.analysis.projects import write_project

from trainwright import RunConfig
from trainwright.analysis.data import describe_data
from trainwright.analysis.data_page import cut, fold, number, percent, render, visible

DATA = """
  train:
    type: trainwright.data.mix:mix
    sources:
      code: {type: json_lines, path: code.jsonl, weight: 1}
      prose: {type: json_lines, path: prose.jsonl, weight: 3}
  eval: {valid: {type: json_lines, path: prose.jsonl}}
  collator: {type: tokenize, tokenizer: bytes, drop: [url]}
"""


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal(in_tmp, width):
    look = describe_data(RunConfig.load(write_project(in_tmp, DATA), ["model.vocab_size=10"]))
    lines = render(look, width=width)
    assert max(cell_len(line.plain) for line in lines) <= width
    heads = [line.plain.split("  ")[0] for line in lines if line.plain and not line.plain.startswith(" ")]
    assert heads == ["train", "mixture", "samples", "first batch", "lengths", "other sets", "remarks"]


@given(st.text(max_size=200), st.integers(2, 40), st.integers(1, 4))
def test_folded_texts_fit_and_lose_nothing_until_they_are_cut(text, width, most):
    text = visible(text)
    lines = fold(text, width, most=most)
    assert len(lines) <= most
    assert all(cell_len(line) <= width for line in lines)
    if not lines or not lines[-1].endswith("…"):
        assert "".join(lines) == text
    assert cell_len(cut(text, width)) <= width


def test_breaks_and_control_characters_become_signs():
    assert visible("a\n\tb\x1b[31m") == "a↵⇥b·[31m"


def test_numbers_and_shares_read_as_a_person_writes_them():
    assert [number(each) for each in (1234567, 0.30629, 16.0, float("nan"))] == ["1,234,567", "0.3063", "16", "nan"]
    assert [percent(each) for each in (0, 1, 0.5, 0.00001, 0.99999)] == [
        "0 %",
        "100 %",
        "50.0 %",
        "< 0.1 %",
        "> 99.9 %",
    ]
