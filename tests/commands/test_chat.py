"""`trainwright chat`: turns, commands, and what ends an answer."""

from __future__ import annotations

import pytest
import torch
from tests.export.runs import train_run
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.commands.chat import _converse
from trainwright.errors import ConfigError
from trainwright.export.chat import chat_format
from trainwright.export.text import load_text_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_run(tmp_path_factory.mktemp("project"), overrides=["model.max_positions=256"])[0]


def invoke(*arguments, lines=()):
    text = "".join(f"{line}\n" for line in lines)
    return CliRunner().invoke(app, ["chat", *map(str, arguments), "--device", "cpu"], input=text)


OPTIONS = ("--max-new-tokens", 8, "--temperature", 0)


def answer(run, messages):
    model, tokenizer = load_text_model(run)
    return "".join(chat_format(tokenizer).answer(model, messages, max_new_tokens=8, temperature=0.0, top_k=None))


def test_each_turn_continues_the_conversation_and_reset_begins_another(run):
    done = invoke(run, *OPTIONS, "--system", "Be brief.", lines=["Hi", "def", "/reset", "Hi", "", "/exit", "never"])
    assert done.exit_code == 0, done.output
    system = {"role": "system", "content": "Be brief."}
    first = answer(run, [system, {"role": "user", "content": "Hi"}])
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first}]
    second = answer(run, [system, *turns, {"role": "user", "content": "def"}])
    assert done.stdout == f"{first}\n{second}\n{first}\n"


def test_the_end_of_the_input_leaves_and_a_seed_repeats(run):
    options = ("--max-new-tokens", 12, "--temperature", 1.5, "--top-k", 40, "--top-p", 0.95)
    texts = [invoke(run, *options, "--seed", seed, lines=["Hi", "you"]).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_conversation_that_is_too_long_is_an_error_that_leaves_the_earlier_turns(run):
    done = invoke(run, *OPTIONS, lines=["x" * 300, "Hi"])
    assert done.exit_code == 0
    assert "/reset" in done.stderr
    assert done.stdout == answer(run, [{"role": "user", "content": "Hi"}]) + "\n"


def test_an_unknown_command_is_no_message(run):
    done = invoke(run, *OPTIONS, lines=["/quit now"])
    assert "/quit is not a command" in done.stderr
    assert done.stdout == ""


def test_an_impossible_option_is_rejected_before_the_first_message(run):
    done = invoke(run, "--top-p", 2, lines=["Hi"])
    assert isinstance(done.exception, ConfigError)


class Interrupted:
    """An answer during which the user presses Ctrl-C."""

    closed = False

    def __iter__(self):
        yield "so "
        yield "far"
        raise KeyboardInterrupt

    def close(self):
        self.closed = True


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(monkeypatch, capsys):
    asked, made = [], []
    lines = iter(["Hi", "and?"])

    def read(_prompt=""):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    def reply(messages):
        asked.append(messages)
        made.append(Interrupted())
        return made[-1]

    monkeypatch.setattr("builtins.input", read)
    _converse(reply, None)
    assert capsys.readouterr().out == "so far\nso far\n"
    assert [message["content"] for message in asked[1]] == ["Hi", "so far", "and?"]
    assert all(each.closed for each in made)


def test_an_answer_that_is_stopped_leaves_the_model_as_it_was(run):
    model, tokenizer = load_text_model(run)
    model.train()
    made = chat_format(tokenizer).answer(model, [{"role": "user", "content": "Hi"}], max_new_tokens=30)
    next(iter(made))
    assert not model.training
    made.close()
    assert model.training
    assert torch.is_grad_enabled()
