"""The page is at most as wide as the terminal and has all sections."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tests.analysis.projects import write_project

from trainwright import RunConfig
from trainwright.analysis.data import describe_data
from trainwright.analysis.data_page import cut, fold, number, percent, render, style_runs, visible

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


RUNS = st.lists(st.tuples(st.text(max_size=30), st.booleans()), min_size=1, max_size=6)


@given(RUNS, st.integers(4, 60))
def test_labels_stand_out_and_no_text_is_lost(runs, width):
    lines = style_runs(runs, width)
    text = "".join(visible(text) for text, _ in runs)
    shown = [(one, style) for line in lines for part, style in line for one in part]
    expected = [(one, "bold green" if is_label else "dim") for text, is_label in runs for one in visible(text)]
    assert all(cell_len("".join(part for part, _ in line)) <= width for line in lines)
    if "".join(one for one, _ in shown) == text:  # else the last line is cut
        assert shown == expected
    else:
        kept = shown[:-1]
        assert shown[-1][0] == "…"
        assert kept == expected[: len(kept)]


CHATS = """
  train: {type: chat, path: chats.jsonl, tokenizer: bytes}
  collator: {type: padded, tokenizer: bytes}
"""


def test_a_chat_is_shown_with_its_answers(in_tmp):
    write_project(in_tmp, CHATS)
    messages = [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "one two"}]
    (in_tmp / "chats.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 8)
    report = describe_data(RunConfig.load("run.yaml"), run="run.yaml", show=1, samples=10)
    page = render(report, width=100)
    [line] = [line for line in page if "<|im_start|>user" in line.plain]
    [answer] = [line.plain[span.start : span.end] for line in page for span in line.spans if span.style == "bold green"]
    assert answer == "one two<|im_end|>"
    assert answer in line.plain
