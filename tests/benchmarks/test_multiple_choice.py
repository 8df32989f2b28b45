"""multiple_choice: rows, prompts, scores, and what is said about rows that cannot be asked."""

from __future__ import annotations

import json

import pytest
import torch
from tests.benchmarks.quiz import write_lines
from tests.messages import raises

from trainwright.benchmarks.multiple_choice import MultipleChoice
from trainwright.errors import ConfigError, DataError
from trainwright.models.bert import Bert
from trainwright.models.llama import Llama

ROW = {"question": "2 + 2?", "choices": ["3", "four", "five!"], "answer": 1}


def make(folder, rows=(ROW,), **settings):
    write_lines(folder / "rows.jsonl", rows)
    return MultipleChoice("rows.jsonl", "bytes", project_dir=folder, **settings)


def asked(folder, row=ROW, **settings):
    """The prompt of a row."""
    [sample] = make(folder, [row], **settings).load()
    return sample


def model(**settings):
    torch.manual_seed(1)
    return Llama(**{"vocab_size": 260, "hidden_size": 16, "num_layers": 1, "num_heads": 2, **settings}).eval()


def test_the_best_choice_is_that_of_the_highest_likelihood(tmp_path):
    benchmark = make(tmp_path, [ROW, {**ROW, "choices": ["a", "b"], "answer": 0}])
    samples = benchmark.load()
    results = benchmark.run_batch(model(), samples, bool)
    for sample, result in zip(samples, results, strict=True):
        values = result["log_likelihoods"]
        lengths = [len(choice) for choice in sample.choices]
        normalized = [value / length for value, length in zip(values, lengths, strict=True)]
        assert result["prediction"] == values.index(max(values))
        assert result["acc"] == (result["prediction"] == sample.answer)
        assert result["acc_norm"] == (normalized.index(max(normalized)) == sample.answer)
    json.dumps(results)


@pytest.mark.parametrize(
    ("settings", "prompt"),
    [
        ({}, "Question: 2 + 2?\nAnswer:"),
        ({"prompt": "{question} {id}:"}, "2 + 2? 7:"),
        ({"prompt": "{meta.topic} {unknown brace}"}, "sums {unknown brace}"),
        ({"answer_with": "letter"}, "2 + 2?\nA. 3\nB. four\nC. five!\nAnswer:"),
        ({"description": "Sums.\n\n"}, "Sums.\n\nQuestion: 2 + 2?\nAnswer:"),
    ],
)
def test_a_prompt_is_a_template_over_the_row(tmp_path, settings, prompt):
    assert asked(tmp_path, {**ROW, "id": 7, "meta": {"topic": "sums"}}, **settings).prompt == prompt


@pytest.mark.parametrize(
    ("row", "settings", "answer"),
    [
        ({"answer": 2}, {}, 2),
        ({"answer": "four"}, {}, 1),
        ({"answer": "3"}, {}, 0),  # the text of a choice, not its number
        ({"answer": "C"}, {}, 2),
        ({"answer": "2"}, {}, 2),
        ({"answer": "x2", "names": ["x0", "x1", "x2"]}, {"labels": "names"}, 2),
        (
            {"choices": {"text": ["a", "b"], "label": [1, 2]}, "answer": "2"},
            {"choices": "choices.text", "labels": "choices.label"},
            1,
        ),
    ],
)
def test_an_answer_is_a_number_a_label_a_text_or_a_letter(tmp_path, row, settings, answer):
    assert asked(tmp_path, {**ROW, **row}, **settings).answer == answer


def test_choices_are_tokenized_with_their_prompt(tmp_path):
    spaced = asked(tmp_path, prompt="{question} ")  # white space at the end of the prompt belongs to the choice
    assert spaced.encoded[0] == (list(b"2 + 2?"), list(b"  3"))
    plain = asked(tmp_path, prompt="", delimiter="")
    assert plain.encoded[0] == ([257], list(b"3"))  # the token of the beginning of a text


def test_examples_come_first_without_the_question_itself(tmp_path):
    others = [{"question": f"{number}?", "choices": ["no", "yes"], "answer": 1} for number in range(3)]
    settings = {"num_fewshot": 2, "fewshot_path": "shots.jsonl", "prompt": "Q: {question}\nA:"}
    write_lines(tmp_path / "shots.jsonl", [others[0], ROW, *others[1:]])
    assert asked(tmp_path, **settings).prompt == "Q: 0?\nA: yes\n\nQ: 1?\nA: yes\n\nQ: 2 + 2?\nA:"
    assert asked(tmp_path, others[1], **settings).prompt == "Q: 0?\nA: yes\n\nQ: 2 + 2?\nA: four\n\nQ: 1?\nA:"


def test_a_chat_is_rendered_with_the_template(tmp_path):
    write_lines(tmp_path / "shots.jsonl", [{**ROW, "question": "1 + 2?", "answer": 0}, ROW])
    chat = asked(tmp_path, chat=True, description="Add.", num_fewshot=1, fewshot_path="shots.jsonl", chat_template=None)
    turns = [("system", "Add."), ("user", "1 + 2?"), ("assistant", "3"), ("user", "2 + 2?")]
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"
    assert chat.prompt == expected
    assert bytes(chat.encoded[1][0] + chat.encoded[1][1]).decode() == expected + "four"
    (tmp_path / "own.jinja").write_text("{% for each in messages %}[{{ each.content }}]{% endfor %}")
    assert asked(tmp_path, chat=True, chat_template="own.jinja").prompt == "[2 + 2?]"
    messages = [{"role": "user", "content": "2 + 2?"}]
    assert asked(tmp_path, {**ROW, "question": messages}).prompt.endswith("2 + 2?<|im_end|>\n<|im_start|>assistant\n")


def test_other_files_have_the_same_questions(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([ROW, ROW]), tmp_path / "rows.parquet")
    [one] = MultipleChoice("rows.parquet", "bytes", max_samples=1, project_dir=tmp_path).load()
    assert one == asked(tmp_path)


@pytest.mark.parametrize(
    ("row", "settings", "mentions"),
    [
        ({"answer": 3}, {}, ["answer", "3", "0"]),
        ({"answer": -1}, {}, ["answer", "-1"]),
        ({"answer": "six"}, {}, ["answer", "six"]),
        ({"answer": True}, {}, ["answer", "True"]),
        ({}, {"labels": "choices"}, ["answer", "four"]),
        ({"choices": ["a"]}, {}, ["choices"]),
        ({"choices": "abc"}, {}, ["choices"]),
        ({"choices": ["a", ""]}, {}, ["choices[1]"]),
        ({"question": None}, {}, ["question"]),
        ({}, {"question": "text"}, ["text", "question", "choices"]),
        ({}, {"prompt": "{topic}"}, ["topic"]),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tmp_path, row, settings, mentions):
    benchmark = make(tmp_path, [ROW, {**ROW, **row}] if row else [ROW], **settings)
    with raises(DataError, *mentions, at=f"rows.jsonl line {2 if row else 1}"):
        benchmark.load()


@pytest.mark.parametrize(("settings", "kind"), [({"max_positions": 28}, DataError), ({"vocab_size": 122}, DataError)])
def test_a_model_that_cannot_be_asked_a_row_is_rejected(tmp_path, settings, kind):
    benchmark = make(tmp_path, [{**ROW, "question": "?"}, {**ROW, "question": "2 plus 2 is {?"}])
    samples = benchmark.load()
    with raises(kind, at="rows.jsonl line 2"):
        benchmark.check(model(**settings), samples)
    longest = max(len(context) + len(choice) for each in samples for context, choice in each.encoded)
    benchmark.check(model(max_positions=longest - 1), samples)  # the last token needs no position


def test_a_model_that_is_no_decoder_is_rejected(tmp_path):
    bert = Bert(vocab_size=260, hidden_size=16, num_layers=1, num_heads=2)
    with raises(ConfigError, "Bert", "next token"):
        make(tmp_path).check(bert, [])


@pytest.mark.parametrize(
    ("settings", "mentions"),
    [
        ({"num_fewshot": 2}, ["num_fewshot", "fewshot_path"]),
        ({"fewshot_path": "rows.jsonl"}, ["fewshot_path", "num_fewshot"]),
        ({"num_fewshot": -1}, ["num_fewshot"]),
        ({"max_samples": 0}, ["max_samples"]),
        ({"normalize": "words"}, ["normalize", "characters"]),
        ({"answer_with": "number"}, ["answer_with", "letter"]),
    ],
)
def test_settings_that_cannot_be_are_rejected(tmp_path, settings, mentions):
    with raises(ConfigError, *mentions):
        make(tmp_path, **settings)


def test_files_without_enough_rows_are_rejected(tmp_path):
    with raises(DataError, "rows.jsonl", "num_fewshot", "5"):
        make(tmp_path, num_fewshot=5, fewshot_path="rows.jsonl").load()
    with raises(DataError, "rows.jsonl"):
        make(tmp_path, []).load()
