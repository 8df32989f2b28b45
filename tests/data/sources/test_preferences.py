"""Preference rows: tokens of texts and messages, as TRL makes them, and errors with their file and line."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.chats import MARKED_TEMPLATE, PREFIX_TEMPLATE, chat, make_tokenizer_folder
from tests.messages import mentions, raises
from transformers import AutoTokenizer

from trainwright.data.sources.formats import RowError
from trainwright.data.sources.preferences import PreferencesFormat, preferences
from trainwright.data.tokenizer import load_tokenizer
from trainwright.errors import ConfigError, DataError

PAIR = {"prompt": "the cat ", "chosen": "sat on the mat", "rejected": "ran"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer_folder(tmp_path_factory.mktemp("base") / "base", PREFIX_TEMPLATE)


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def decode(record, tokenizer="bytes", max_length=1024, **options):
    return PreferencesFormat(load_tokenizer(tokenizer), max_length, **options).decode(json.dumps(record).encode(), b"")


def test_texts_are_tokens_with_the_end_of_the_text():
    assert decode({"prompt": "ab", "chosen": "cd", "rejected": "e"}) == {
        "prompt": [97, 98],
        "chosen": [99, 100, 258],
        "rejected": [101, 258],
    }
    assert decode({"prompt": "ab", "completion": "c", "label": False}) == {
        "prompt": [97, 98],
        "completion": [99, 258],
        "label": False,
        "max_length": 1024,
    }


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(prompt=TEXTS, chosen=TEXTS, rejected=TEXTS, limit=st.integers(2, 30))
def test_a_prompt_and_its_answer_are_the_text_up_to_the_limit(prompt, chosen, rejected, limit):
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if len(prompt.encode()) >= limit or not (prompt or (chosen and rejected)):
        with pytest.raises(RowError):
            decode(row, max_length=limit)
        return
    sample = decode(row, max_length=limit)
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        assert sample["prompt"] + sample[name] == [*(prompt + text).encode(), 258][:limit]
        assert sample[name]


def test_messages_have_the_tokens_of_the_chat_template(folder):
    theirs = AutoTokenizer.from_pretrained(folder)
    prompt = chat("the dog?", system="be the cat")
    row = {"prompt": prompt, **{name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}}
    sample = decode(row, folder)
    expected = theirs.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    assert sample["prompt"] == expected
    for name in ("chosen", "rejected"):
        assert sample["prompt"] + sample[name] == theirs.apply_chat_template(prompt + row[name], return_dict=False)


def test_two_conversations_have_their_beginning_as_the_prompt(folder):
    common = chat("one", "two", "three")
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    whole = decode({name: common + each for name, each in answers.items()}, folder)
    assert whole == decode({"prompt": common, **answers}, folder)


def test_another_template_may_be_given(folder):
    row = {"prompt": chat("one"), "completion": [{"role": "assistant", "content": "two"}], "label": True}
    assert decode(row, folder, chat_template=MARKED_TEMPLATE) == decode(row, folder)
    assert decode(row, folder, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}") != decode(
        row, folder
    )


def test_a_template_may_be_a_file_of_the_project(folder, tmp_path):
    row = {"prompt": chat("one"), **{name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "plain.jinja").write_text(template)
    write(tmp_path / "rows.jsonl", row)
    options = {"tokenizer": folder, "project_dir": tmp_path}
    assert preferences("rows.jsonl", chat_template="plain.jinja", **options)[0] == decode(
        row, folder, chat_template=template
    )
    with raises(DataError, "chat_template", "absent.jinja"):
        preferences("rows.jsonl", chat_template="absent.jinja", **options)[0]


def test_an_eos_token_in_the_text_is_not_repeated(folder):
    [with_end, without] = (decode({**PAIR, "rejected": f"ran{end}"}, folder) for end in ("<eos>", ""))
    assert with_end == without
    assert without["rejected"][-1] == load_tokenizer(folder).eos_id


def test_a_token_across_the_border_belongs_to_the_answer(folder, caplog):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("cat the mat")[1:2]) == " the "
    with caplog.at_level(logging.WARNING):
        sample = decode({"prompt": "cat t", "chosen": "he mat", "rejected": "x"}, folder)
    assert tokenizer.decode(sample["prompt"]) == "cat"
    assert tokenizer.decode(sample["prompt"] + sample["chosen"]) == "cat the mat"
    assert tokenizer.decode(sample["rejected"]) == " tx"
    assert mentions(caplog.text, "' t'", "prompt")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, ["rejected"]),
        ({"prompt": "a", "completion": "b"}, ["label"]),
        ({"question": "a"}, ["prompt", "completion", "label", "question"]),
        ({"prompt": "a", "completion": "b", "label": 1}, ["label", "1", "true"]),
        ({"prompt": "a", "completion": "b", "label": None}, ["label"]),
        ({"prompt": "a", "chosen": "b", "rejected": chat("x")}, ["rejected", "list"]),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, ["prompt", "3"]),
        ({"prompt": "a" * 30, "chosen": "b", "rejected": "c"}, ["max_length", "20", "30"]),
        ({"prompt": "", "chosen": "", "rejected": "c"}, ["chosen"]),
        ({"prompt": [{"role": "user"}], "chosen": chat("x"), "rejected": chat("y")}, ["prompt[0].content"]),
        ({"prompt": chat("a"), "chosen": [], "rejected": chat("y")}, ["chosen", "empty"]),
        ([1], ["list"]),
    ],
)
def test_an_invalid_row_is_named_by_file_and_line(tmp_path, row, words):
    path = write(tmp_path / "rows.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"}, row)
    for streaming in (False, True):
        rows = preferences(path, tokenizer="bytes", max_length=20, streaming=streaming)
        with raises(DataError, "rows.jsonl", *words, golden=not streaming) as caught:
            list(rows) if streaming else rows[1]
        assert streaming or "line 2" in str(caught.value)


def test_rows_are_read_by_index_and_as_a_stream_from_several_files(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", {**PAIR, "chosen": name}, {**PAIR, "chosen": name * 2})
    by_index = preferences("*.jsonl", tokenizer="bytes", project_dir=tmp_path)
    stream = preferences(["a.jsonl", "b.jsonl"], tokenizer="bytes", project_dir=tmp_path, streaming=True)
    assert [by_index[n] for n in range(len(by_index))] == list(stream)
    assert [bytes(sample["chosen"][:-1]) for sample in stream] == [b"a", b"aa", b"b", b"bb"]


def test_settings_are_checked(tmp_path):
    for wrong in (1, "many", True):
        with raises(ConfigError, "max_length"):
            preferences("x.jsonl", tokenizer="bytes", max_length=wrong)
    endless = make_tokenizer_folder(tmp_path / "endless", has_end=False)
    with raises(ConfigError, "EOS", "eos_token"):
        decode(PAIR, endless)
