"""`trainwright generate`: the prompt and what follows, the same for the same seed."""

from __future__ import annotations

import json

import pytest
from tests.export.runs import train_run
from tests.messages import check_message
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_run(tmp_path_factory.mktemp("project"))[0]


def invoke(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments), "--device", "cpu"])


def test_the_text_begins_with_the_prompt_and_repeats_with_its_seed(run):
    texts = [
        invoke(run, "--prompt", "def grü", "--max-new-tokens", 20, "--seed", seed, "--top-k", 20, "--top-p", 0.9)
        for seed in (1, 1, 2)
    ]
    assert all(done.exit_code == 0 for done in texts), texts[0].output
    assert texts[0].stdout.startswith("def grü")
    assert texts[0].stdout == texts[1].stdout != texts[2].stdout


def test_without_a_seed_each_text_is_another(run):
    first, second = (invoke(run, "--prompt", "x", "--max-new-tokens", 30, "--temperature", 5).stdout for _ in "ab")
    assert first != second


def test_a_share_above_one_is_an_explained_error(run):
    done = invoke(run, "--prompt", "x", "--top-p", 1.5)
    assert isinstance(done.exception, ConfigError)
    assert "top_p is 1.5" in str(done.exception)
    assert done.stdout == ""  # not the prompt, which would look like an answer


@pytest.mark.parametrize(
    ("option", "value"), [("--temperature", -1), ("--top-k", 0), ("--max-new-tokens", 0), ("--seed", 2**64)]
)
def test_a_value_out_of_range_names_its_option(run, option, value):
    done = invoke(run, "--prompt", "x", option, value)
    assert done.exit_code == 2
    assert option in done.output
    assert done.stdout == ""


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_each_prompt_of_a_file_is_continued_in_its_order(run, tmp_path):
    lines = ["def f(x):", "a", "", "grüße an", "return x + 1"]
    (tmp_path / "prompts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [{"prompt": line, "id": 1} for line in lines if line]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--max-new-tokens", 12, "--seed", 3, "--repetition-penalty", 1.2)
    plain = invoke(run, "--prompts", tmp_path / "prompts.txt", *options)
    assert plain.exit_code == 0, plain.output
    made = rows_of(plain.stdout)
    assert [row["prompt"] for row in made] == [line for line in lines if line]
    assert all(row["num_tokens"] == 12 and row["finish_reason"] == "length" for row in made)
    file = tmp_path / "made.jsonl"
    done = invoke(run, "--prompts", tmp_path / "prompts.jsonl", "--output", file, "--batch-size", 2, *options)
    assert done.exit_code == 0, done.output
    assert rows_of(file.read_text("utf-8")) == made
    assert done.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.txt", "prompts.jsonl", "made.jsonl"}


def test_a_greedy_continuation_is_the_same_from_a_file(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("def grü\nx\n", encoding="utf-8")
    options = ("--temperature", 0, "--max-new-tokens", 9, "--repetition-penalty", 1.5)
    [first, second] = rows_of(invoke(run, "--prompts", tmp_path / "prompts.txt", *options).stdout)
    assert invoke(run, "--prompt", "def grü", *options).stdout == f"def grü{first['completion']}\n"
    assert invoke(run, "--prompt", "x", *options).stdout == f"x{second['completion']}\n"


@pytest.mark.parametrize(
    ("name", "text", "at"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"text": "y"}\n', "a.jsonl:2"),
        ("a.jsonl", '{"prompt": "x"\n', "a.jsonl:1"),
        ("a.txt", "\n\n", "a.txt"),
        ("absent.txt", None, "absent.txt"),
    ],
)
def test_a_file_without_usable_prompts_is_rejected_with_its_line(run, tmp_path, name, text, at):
    if text is not None:
        (tmp_path / name).write_text(text)
    done = invoke(run, "--prompts", tmp_path / name)
    assert isinstance(done.exception, DataError)
    assert str(done.exception.where).endswith(at)
    check_message(str(done.exception), "--prompts", golden=text is not None)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--prompt", "x", "--prompts", "a.txt"),
        ("--prompt", "x", "--output", "a"),
        ("--prompt", "x", "--batch-size", 2),
    ],
)
def test_options_that_do_not_go_together_are_rejected(run, options):
    done = invoke(run, *options)
    assert isinstance(done.exception, ConfigError)
    check_message(str(done.exception), "--prompt")
