"""`trainwright generate`: the prompt and what follows, the same for the same seed."""

from __future__ import annotations

import pytest
from tests.export.runs import train_run
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.errors import ConfigError


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
