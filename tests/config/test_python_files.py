"""Config files in Python: what is run, what is taken, and where each setting is written."""

import importlib
import sys
from pathlib import Path

import pytest

from trainwright import Component, RunConfig
from trainwright.errors import ConfigError

BASE = {"trainer": {"max_steps": 3}}


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        "config = {'trainer': {'max_steps': 3}}",
        "from trainwright import RunConfig\nconfig = RunConfig.from_dict({'trainer': {'max_steps': 3}})",
        "trainer = {'max_steps': 3}",
        "from trainwright.config import TrainerSection\ntrainer = TrainerSection(max_steps=3)",
    ],
    ids=["dict", "RunConfig", "section", "typed section"],
)
def test_a_file_defines_its_config_in_any_of_three_forms(tmp_path, text):
    config = RunConfig.load(write(tmp_path, "mine.py", text))
    assert config == RunConfig.from_dict({"name": "mine", **BASE})
    assert config.project_dir == tmp_path


def test_other_variables_of_a_file_are_not_settings(tmp_path):
    text = "import data\nlr = 1e-3\ndef helper(): pass\ntrainer = {'max_steps': 3}\nseed = None\n"
    write(tmp_path, "data.py", "")
    assert RunConfig.load(write(tmp_path, "mine.py", text)) == RunConfig.from_dict({"name": "mine", **BASE})


def test_a_run_config_keeps_its_own_name_and_project(tmp_path):
    write(tmp_path, "other/base.yaml", "name: named\ntrainer: {max_steps: 3}\n")
    text = f"from trainwright import RunConfig\nconfig = RunConfig.load({str(tmp_path / 'other/base.yaml')!r})"
    config = RunConfig.load(write(tmp_path, "mine.py", text))
    assert config.name == "named"
    assert config.project_dir == tmp_path / "other"


def test_each_read_executes_the_files_again(tmp_path):
    path = write(tmp_path, "mine.py", "from base import steps\nconfig = {'trainer': {'max_steps': steps}}")
    write(tmp_path, "base.py", "steps = 3")
    assert RunConfig.load(path).trainer.max_steps == 3
    write(tmp_path, "base.py", "steps = 3000")
    assert RunConfig.load(path).trainer.max_steps == 3000
    write(tmp_path, "mine.py", "from base import steps\nconfig = {'trainer': {'max_steps': 70007}}")
    assert RunConfig.load(path).trainer.max_steps == 70007


@pytest.mark.parametrize(
    "line", ["import base", "from . import base", "from parts import base", "from parts.base import steps as base"]
)
def test_files_of_the_folder_are_imported_by_name_or_relatively(tmp_path, line):
    for name in ("base.py", "parts/base.py"):
        write(tmp_path, name, "steps = 3")
    text = f"{line}\nconfig = {{'trainer': {{'max_steps': getattr(base, 'steps', base)}}}}"
    assert RunConfig.load(write(tmp_path, "mine.py", text)).trainer.max_steps == 3


def test_two_folders_have_a_file_of_one_name_each(tmp_path):
    for number in (1, 2):
        write(tmp_path, f"{number}/base.py", f"steps = {number}")
        write(tmp_path, f"{number}/mine.py", "from base import steps\nconfig = {'trainer': {'max_steps': steps}}")
    assert [RunConfig.load(tmp_path / f"{number}/mine.py").trainer.max_steps for number in (1, 2, 1)] == [1, 2, 1]


def test_reading_leaves_python_s_path_and_modules_as_they_were(tmp_path, monkeypatch):
    mine = type(sys)("base")
    monkeypatch.setitem(sys.modules, "base", mine)
    write(tmp_path, "base.py", "import inner\nsteps = 3")
    write(tmp_path, "inner.py", "")
    path = write(tmp_path, "mine.py", "from base import steps\nconfig = {'trainer': {'max_steps': steps}}")
    before = (list(sys.path), list(sys.meta_path))
    assert RunConfig.load(path).trainer.max_steps == 3
    assert (sys.path, sys.meta_path) == before
    assert sys.modules["base"] is mine
    assert "inner" not in sys.modules


def test_imports_of_a_run_in_another_folder_do_not_hide_a_folder_next_to_the_file(tmp_path, monkeypatch):
    for folder, name, text in (
        ("first", "parts/__init__.py", ""),
        ("first", "parts/base.py", "steps = 1"),
        ("second", "parts/base.py", "steps = 3"),
        ("second", "mine.py", "from parts.base import steps\nconfig = {'trainer': {'max_steps': steps}}"),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        write(tmp_path / folder, name, text)
    for name in ("parts", "parts.base"):
        monkeypatch.setitem(sys.modules, name, None)  # gone when the test ends
        del sys.modules[name]
    with monkeypatch.context() as earlier:
        earlier.syspath_prepend(tmp_path / "first")
        left = importlib.import_module("parts.base")
        # Python finds it, as it would for a script: such a folder hides no package.
        assert RunConfig.load(tmp_path / "second" / "mine.py").trainer.max_steps == 1
    assert RunConfig.load(tmp_path / "second" / "mine.py").trainer.max_steps == 3
    assert sys.modules["parts.base"] is left


def test_a_folder_of_parts_hides_no_installed_package(tmp_path):
    import datasets

    write(tmp_path, "datasets/mine.py", "")
    text = "import datasets\nconfig = {'trainer': {'max_steps': 3}, 'name': datasets.__file__ and 'right'}"
    path = write(tmp_path, "mine.py", text)
    assert RunConfig.load(path).name == "right"
    assert sys.modules["datasets"] is datasets


def test_a_class_of_the_folder_is_named_by_its_file_and_another_by_its_module(tmp_path):
    write(tmp_path, "parts/net.py", "class Net: pass")
    text = """
from collections import OrderedDict
from parts.net import Net
from trainwright import Component

class Own: pass

config = {"task": {"type": Own, "size": 3}, "model": Component(Net), "hooks": [Component(OrderedDict)]}
"""
    config = RunConfig.load(write(tmp_path, "mine.py", text))
    assert config.task == Component("mine.py:Own", size=3)
    assert config.model.type == "parts/net.py:Net"
    assert config.hooks[0].type == "collections:OrderedDict"


def test_a_yaml_file_extends_a_python_file_and_the_other_way(tmp_path):
    write(tmp_path, "base.yaml", "trainer: {max_steps: 3, max_grad_norm: 2.0}")
    write(tmp_path, "middle.py", "config = {'extends': 'base.yaml', 'trainer': {'max_steps': 4}, 'seed': 1}")
    config = RunConfig.load(write(tmp_path, "top.yaml", "extends: middle.py\nseed: 2"))
    assert (config.trainer.max_steps, config.trainer.max_grad_norm, config.seed) == (4, 2.0, 2)


# errors


def rejection(path, *overrides):
    with pytest.raises(ConfigError) as rejected:
        RunConfig.load(path, overrides)
    return str(rejected.value)


TEXT = """from trainwright import Component

optimizer = Component(
    "adamw",
    lr=1e-3,
)
trainer = dict(
    max_steps="three",
    optimizer=optimizer,
)
config = {
    "seed": -1,
    **{"name": "x"},
    "trainer": trainer,
    "hooks": [
        {"lr": 3},
    ],
    "log": {"every": 3},
}
"""


def test_each_problem_names_the_line_that_it_is_written_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = rejection(Path("mine.py") if write(tmp_path, "mine.py", TEXT) else None).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["mine.py:8:", "mine.py:12:", "mine.py:16:", "mine.py:18:"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "mine.py:1: the file defines neither `config` nor a section such as `trainer`. Add config = {…}."),
        ("\nconfig = 3", "mine.py:2: config: must be a RunConfig or a dict, got 3."),
        ("config = {\n", "mine.py:1: cannot be read as Python: '{' was never closed."),
        ("x = 1\ny = x / 0\n", "mine.py:2: running it failed: ZeroDivisionError: division by zero."),
        ("import sys\nsys.exit(3)", "mine.py:2: running it failed: SystemExit: 3."),
        ("import base", "base.py:2: running it failed: NameError: name 'nothing' is not defined."),
        ("import absent", "mine.py:1: running it failed: ModuleNotFoundError: No module named 'absent'."),
        ("config = {'seed': {3: 4}}", "mine.py:1: seed: a key must be text, got 3. Use '3'."),
    ],
)
def test_a_file_without_a_config_is_rejected_with_the_reason(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "base.py", "x = 1\nnothing")
    write(tmp_path, "mine.py", text)
    assert rejection("mine.py") == message


def test_an_object_that_yaml_cannot_hold_is_rejected_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "mine.py", "config = {'model': {'type': 'llama', 'activation': print}}")
    assert rejection("mine.py").startswith("mine.py:1: model.activation: a builtin_function_or_method cannot be saved")


def test_a_missing_file_is_answered_with_those_that_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "mine.py", "")
    assert rejection("mne.py") == 'mne.py:1: there is no such file. Did you mean "mine.py"? Known: mine.py.'


def test_an_override_of_a_python_file_is_checked_like_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "mine.py", "config = {'trainer': {'max_steps': 3}}")
    assert RunConfig.load("mine.py", ["trainer.max_steps=4"]).trainer.max_steps == 4
    assert rejection("mine.py", "trainer.max_steps=x").startswith(
        "override trainer.max_steps=x: trainer.max_steps: must"
    )
