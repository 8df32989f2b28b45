"""`trainwright components`: what a person reads, and that the snippets are run files."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys

import pytest
from tests.messages import mentions
from typer.testing import CliRunner

from trainwright import RunConfig
from trainwright.cli import app
from trainwright.commands.components import SECTIONS, snippet
from trainwright.config import builtin as built_ins
from trainwright.config.yaml_text import parse
from trainwright.errors import ComponentError
from trainwright.registry.catalogue import read_catalogue

LION = '''
class Lion:
    """Sign momentum."""
    def __init__(self, params, decay: float, lr=1e-4, betas=(0.9, 0.99), fn=max): pass
'''


@pytest.fixture
def project(in_tmp):
    (in_tmp / "optimizers").mkdir()
    (in_tmp / "optimizers" / "lion.py").write_text(LION)
    return in_tmp


def ask(*arguments):
    return CliRunner().invoke(app, ["components", *map(str, arguments)])


def error_of(*arguments):
    done = ask(*arguments)
    assert isinstance(done.exception, ComponentError)
    return str(done.exception)


def test_every_built_in_and_the_user_s_own_have_a_line(project):
    done = ask()
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    for kind, names in built_ins.BUILT_INS.items():
        for name in names:
            assert any(line.split()[:2] == [kind, name] for line in lines), (kind, name)
    [line] = [line for line in lines if "lion.Lion" in line]
    assert "Sign momentum." in line
    assert line.endswith("decay, lr=0.0001, betas=(0.9, 0.99), fn=max")


def test_recipes_are_listed_with_their_required_settings_and_printed(project):
    for listed in (ask().stdout, ask("recipes").stdout):
        [line] = [line for line in listed.splitlines() if line.split()[:2] == ["recipe", "recipes/sft-lora"]]
        assert line.endswith("model.pretrained, data.train.path")
    for name in ("sft-lora", "recipes/sft-lora"):
        shown = ask("recipe", name).stdout
        assert "lr: 2e-4" in shown
        assert (
            "extends: recipes/sft-lora\nmodel: {pretrained: llama-3.2-1b}\ndata: {train: {path: chats.jsonl}}" in shown
        )
    both = ask("dpo").stdout
    assert both.startswith("trainer dpo")
    assert "recipe recipes/dpo" in both
    assert mentions(error_of("recipe", "sft-lra"), "sft-lra", "sft-lora", "classify")
    assert mentions(error_of("sft-lra"), '"sft-lora"')


def test_columns_are_aligned(project):
    header, *rows = ask("optimizer").stdout.splitlines()
    column = header.index("what it is")
    assert all(row[column - 1] == " " and row[column] != " " for row in rows)


def test_a_kind_lists_only_its_own_also_in_the_plural(project):
    kinds = {line.split()[0] for line in ask("optimizers").stdout.splitlines()[1:]}
    assert kinds == {"optimizer"}
    assert ask("optimizers").stdout == ask("optimizer").stdout


def test_another_project_s_folder_or_run_file_can_be_given(project, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert "lion.Lion" not in ask("optimizer").stdout
    assert "lion.Lion" in ask("optimizer", "--project", project).stdout
    (project / "run.yaml").write_text("seed: 1\n")
    assert "lion.Lion" in ask("optimizer", "--project", project / "run.yaml").stdout
    assert "no folder nowhere" in error_of("optimizer", "--project", "nowhere")


def test_one_component_shows_docstring_location_and_a_snippet(project):
    text = ask("optimizer", "Lion").stdout
    assert "optimizers/lion.py:2" in text
    assert "Sign momentum." in text
    assert text.endswith(
        "trainer:\n"
        "  optimizer:\n"
        "    type: lion.Lion\n"
        "    decay:  # required (float)\n"
        "    # lr: 0.0001\n"
        "    # betas: [0.9, 0.99]\n"
        "    # fn: …  (in Python: max)\n"
    )


@pytest.mark.parametrize("name", ["lion.Lion", "Lion", "optimizers/lion.py:Lion"])
def test_one_is_found_by_any_of_its_names(project, name):
    assert "Sign momentum." in ask("optimizer", name).stdout


def test_a_name_alone_is_enough(project):
    assert ask("cosine").stdout == ask("schedule", "cosine").stdout


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in SECTIONS for name in built_ins.BUILT_INS[kind]])
def test_every_snippet_is_a_run_file_with_the_component_in_its_section(in_tmp, kind, name):
    [entry] = [each for each in read_catalogue(in_tmp, [kind]).entries if each.type == name]
    (in_tmp / "run.yaml").write_text(snippet(entry))
    config = RunConfig.load(in_tmp / "run.yaml")
    is_list = kind in ("hook", "writer", "benchmark", "reward")
    path = SECTIONS[kind].replace("NAME", name) + (".0" if is_list else "")
    assert config.written_at((*path.split("."), "type")) is not None
    required = {one.name for one in entry.signature.parameters if one.default is None}
    assert component_in(snippet(entry), path) == {"type": name, **dict.fromkeys(required)}
    # The defaults stand in comments; without the # they are the constructor's own.
    spelled_out = component_in(re.sub(r"^( *)# ", r"\1", snippet(entry), flags=re.MULTILINE), path)
    for one in entry.signature.parameters:
        if one.default is not None:
            assert type_free(spelled_out[one.name]) == type_free(ast.literal_eval(one.default))


def component_in(text, path):
    value = parse(text, lambda line: None).plain()
    for key in path.split("."):
        value = value[int(key) if key.isdecimal() else key]
    return value


def type_free(value):
    return list(value) if isinstance(value, tuple) else value


def test_an_unknown_kind_or_name_gets_the_nearest(project):
    assert mentions(error_of("optimiser", "adamw"), "optimiser", "optimizer")
    assert mentions(error_of("optimizer", "adamv"), "adamv", "adamw")
    assert mentions(error_of("optimizer", "lyon"), "lyon", "lion.Lion")
    assert mentions(error_of("cosin"), "cosine")


def test_a_file_that_does_not_parse_is_named_and_the_rest_is_shown(project):
    (project / "optimizers" / "broken.py").write_text("class X(:\n")
    done = ask("optimizer")
    assert done.exit_code == 0
    assert "lion.Lion" in done.stdout
    assert mentions(done.stderr, "optimizers/broken.py:1")
    assert mentions(error_of("optimizer", "X"), "optimizers/broken.py:1")


def test_in_a_terminal_each_kind_is_a_table_within_the_width(project):
    ours, theirs = os.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-m", "trainwright", "components", "optimizer"]
    with subprocess.Popen(command, stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        # Reading from a terminal whose other end is closed is an error on Linux, not an end of file.
        with contextlib.suppress(OSError):
            while block := os.read(ours, 65_536):
                shown += block
    os.close(ours)
    assert process.returncode == 0
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()]
    assert lines[0] == "optimizer in trainer.optimizer"
    assert any(line.startswith("lion.Lion  Sign momentum.") for line in lines)
    assert max(map(len, lines)) <= 80


def test_presets_are_listed_with_their_sizes(project):
    text = ask("model", "llama").stdout
    assert "Presets of all arguments, as in {type: llama, preset: tiny}:" in text
    assert re.search(r"^  llama3-8b +8,030,261,248 weights$", text, re.MULTILINE)
    [line] = [line for line in ask("model").stdout.splitlines() if line.split()[1] == "cnn"]
    assert line.endswith("preset: tiny | small")
    assert "Presets" not in ask("optimizer", "adamw").stdout


def test_arguments_that_the_builder_passes_to_muon_are_not_listed(project):
    assert "kinds:" not in ask("optimizer", "muon").stdout
    assert "exclude:" in ask("optimizer", "muon").stdout


def test_a_summary_is_a_whole_sentence(project):
    [line] = [line for line in ask("loss").stdout.splitlines() if line.split()[1] == "l1"]
    assert "and target" in line  # torch wraps this sentence over two lines
